"""Predictions beside what was published."""
