"""Predicts the bytes that a rank needs."""
