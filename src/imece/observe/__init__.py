"""What a run shows of itself: the live line, metrics, timeline, report and plots."""
