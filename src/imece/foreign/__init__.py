"""Reads configuration files of other programs and translates each of their values."""
