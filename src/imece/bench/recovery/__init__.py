"""Ranks that die, and what is lost."""
