"""Outside the ranks: start them, and leave nothing of them behind."""
