"""Compares the planner with published measurements."""
