"""Checks a host, and every collective on it."""
