"""From samples on disk to the batches of this rank."""
