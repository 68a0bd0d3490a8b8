"""Compares `imece train` with a plain loop."""
