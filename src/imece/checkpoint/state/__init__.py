"""What of a model and its optimizers goes into a checkpoint, and back: as named tensors and slices."""
