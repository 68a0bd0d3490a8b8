"""Turns text on disk into the batches of this rank."""
