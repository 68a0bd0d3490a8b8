"""What `sample` and `eval` share."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
