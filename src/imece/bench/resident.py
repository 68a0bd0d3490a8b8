"""Memory of this process, by the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path


def peak_from_now_on() -> int | None:
    """Reset the peak; returns what is resident now, or None if the peak cannot be reset.

    Freed memory is first returned to the system: if it were reused, the peak would miss it.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak_bytes() or None


def peak_bytes() -> int:
    """The peak of resident memory; 0 if the kernel does not tell."""
    return bytes_of("status", "VmHWM")


def bytes_of(file: str, name: str) -> int:
    """A figure of a file in /proc/self; 0 if the kernel does not tell."""
    try:
        text = Path(f"/proc/self/{file}").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
