"""A step of ranks that divide matrices, beside one rank and beside torch's own way."""
