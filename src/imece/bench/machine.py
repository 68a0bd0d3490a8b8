"""What figures were measured on: the environment, other libraries, and how busy the machine was."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from imece.observe.environment import cpu_model, environment, version
from imece.system.control_groups import allowed_bytes, usable_cores

_PEERS = ("mpi4py", "mpich", "deepspeed", "accelerate", "lightning")


def facts() -> dict[str, Any]:
    """Machine and versions; a library that is not installed is None."""
    return environment() | {peer: version(peer) for peer in _PEERS} | {"load_before": os.getloadavg()[0]}


def describe() -> str:
    """The facts in one line."""
    return (
        f"{cpu_model()}, {usable_cores()} cores, {allowed_bytes() / 1e9:.0f} GB; "
        f"Python {platform.python_version()}, torch {torch.__version__}; {load()}"
    )


def load() -> str:
    """ "load 1.3", with what it means for figures if it is more than the number of cores."""
    now = os.getloadavg()[0]
    busy = " (busy: figures will be worse than they could be)" if now > usable_cores() else ""
    return f"load {now:.1f}{busy}"
