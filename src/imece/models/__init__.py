"""Decoder-only transformers that know nothing of ranks."""
