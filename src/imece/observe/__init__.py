"""What training shows of itself: for now the timeline of a step."""
