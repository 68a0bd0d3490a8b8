"""Predicts how long a step takes."""
