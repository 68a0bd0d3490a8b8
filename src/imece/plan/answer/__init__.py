"""Chooses the best way to train, explains the choice, and prints it."""
