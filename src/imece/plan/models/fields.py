"""Fields of a config.json: their names, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 10**12  # of layers, channels, heads and so on
WINDOW = "sliding_window"
POSITIONS = "max_position_embeddings"
# Into these is translated what is unlike Llama's (mixtures.py).
LATENT = "latent"
SHARED_WIDTH, ROUTING, DENSE_LAYERS = "shared_width", "routing", "dense_layers"


def one_of(content: Mapping[str, Any], *names: str) -> Any:
    """The first present one of several names for the same field."""
    return next((content[name] for name in names if content.get(name) is not None), None)


def number(content: Mapping[str, Any], key: str, usual: int = 0) -> int:
    """The whole number, `usual` if absent or null. ValueError for anything else."""
    value = usual if content.get(key) is None else content[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"{key} is {value!r}, not a whole number below {_MOST:.0e}")
    return value
