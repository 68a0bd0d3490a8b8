"""Measures what imece costs on one GPU."""
