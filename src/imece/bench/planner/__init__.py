"""The planner beside published measurements."""
