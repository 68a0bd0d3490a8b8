"""Checkpoints in the background."""
