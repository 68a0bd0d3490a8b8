"""What a figure was measured on: facts of the machine and versions, for the JSON files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

_PEERS = ("mpi4py", "mpich", "deepspeed")


def facts() -> dict[str, Any]:
    """Machine and versions; a peer that is not installed is None."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "imece": version("imece"),
        **{peer: version(peer) for peer in _PEERS},
        "load_before": os.getloadavg()[0],
    }


def describe() -> str:
    """The same in a line."""
    load = os.getloadavg()[0]
    return (
        f"{cpu_model()}, {usable_cores()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB; "
        f"Python {platform.python_version()}, torch {torch.__version__}; load {load:.1f}"
        f"{' (busy: figures will be worse than they could be)' if load > usable_cores() else ''}"
    )


def version(package: str) -> str | None:
    """Its installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """As the kernel calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.machine()
    return platform.machine()
