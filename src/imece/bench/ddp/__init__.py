"""Compares two backends under torch's own wrappers."""
