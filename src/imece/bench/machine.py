"""What a figure of a benchmark was measured on: the environment, the peers, and how busy the machine was."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil
import torch

from imece.observe.environment import cpu_model, environment, usable_cores, version

__all__ = ["cpu_model", "describe", "facts", "usable_cores", "version"]

_PEERS = ("mpi4py", "mpich", "deepspeed")


def facts() -> dict[str, Any]:
    """Machine and versions; a peer that is not installed is None."""
    return environment() | {peer: version(peer) for peer in _PEERS} | {"load_before": os.getloadavg()[0]}


def describe() -> str:
    """The same in a line."""
    load = os.getloadavg()[0]
    return (
        f"{cpu_model()}, {usable_cores()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB; "
        f"Python {platform.python_version()}, torch {torch.__version__}; load {load:.1f}"
        f"{' (busy: figures will be worse than they could be)' if load > usable_cores() else ''}"
    )
