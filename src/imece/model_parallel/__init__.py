"""Divides a model among ranks: its sequences (context), its matrices (tensor) or its layers (pipeline)."""
