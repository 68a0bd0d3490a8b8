"""torch's own wrappers on two backends."""
