"""Bytes that a rank needs."""
