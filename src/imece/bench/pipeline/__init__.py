"""Measures how long the ranks of a pipeline idle, beside its schedule's theory."""
