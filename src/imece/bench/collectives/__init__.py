"""Collectives beside other libraries."""
