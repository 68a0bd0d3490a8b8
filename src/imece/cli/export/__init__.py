"""Writes trained models for other programs."""
