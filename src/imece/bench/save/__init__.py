"""Measures checkpoints that are saved in the background."""
