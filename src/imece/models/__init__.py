"""Decoder-only transformers that know nothing of ranks, and their files in Hugging Face's format."""
