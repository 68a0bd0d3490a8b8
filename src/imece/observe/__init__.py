"""What a run shows of itself, while it runs and afterwards: the live line, metrics, timeline, report and
plots."""
