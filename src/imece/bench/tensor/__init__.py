"""Compares a step of ranks that divide matrices with one rank and with torch's own way."""
