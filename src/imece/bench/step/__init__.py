"""Measures a training step in every way of training."""
