"""`imece train`: trains a language model from text on disk, in a run folder that can be resumed."""
