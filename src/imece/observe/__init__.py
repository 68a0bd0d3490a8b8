"""What a run shows of itself: the live line, metrics, report and plots."""
