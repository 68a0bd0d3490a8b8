"""Says what fits, how fast and why."""
