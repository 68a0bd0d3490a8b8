"""What `sample` and `eval` share."""

from __future__ import annotations

import sys

import torch


def say(line: str) -> None:
    """Print on stderr: stdout is for the result."""
    print(f"imece: {line}", file=sys.stderr, flush=True)


def best_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
