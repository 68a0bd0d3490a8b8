"""Bytes that a process has in memory at most, as the kernel tells."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def peak_from_now_on() -> int | None:
    """What is resident now, and `peak_bytes` counts from it; None if it cannot be made to.

    What was freed is given back to the system before: used again, it would not be seen.
    """
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return peak_bytes()
    except (OSError, ValueError):
        return None


def peak_bytes() -> int:
    """The most that was resident. ValueError if the kernel does not tell."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak, *_ = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * peak
