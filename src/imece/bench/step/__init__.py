"""A training step in every way of training."""
