"""Compares imece's collectives with other libraries'."""
