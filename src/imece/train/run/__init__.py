"""The folder of a run: what lies in it, who may write to it, and whether a command goes on with it."""
