"""`imece train`: trains a language model from text on disk, in one run folder that later commands go on
from."""
