"""Divides one model among several ranks: its sequences (context), its matrices (tensor) or its layers
(pipeline)."""
