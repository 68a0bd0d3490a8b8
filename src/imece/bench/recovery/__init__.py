"""Measures what is lost when ranks die."""
