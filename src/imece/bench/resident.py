"""Peak resident memory of this process, by the kernel."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def peak_from_now_on() -> int | None:
    """Reset the peak; returns what is resident now, or None if the peak cannot be reset.

    Freed memory is first returned to the system: if it were reused, the peak would miss it.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return peak_bytes()
    except (OSError, ValueError):
        return None


def peak_bytes() -> int:
    """The peak of resident memory. ValueError if the kernel does not tell."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak, *_ = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * peak
