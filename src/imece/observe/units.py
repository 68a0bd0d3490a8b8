"""Figures for people: with a unit, and with no more digits than mean something."""

from __future__ import annotations

import math

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def si(number: float) -> str:
    """6.8e6 -> "6.8M", 12_437 -> "12.4k", 123_456 -> "123k", 8.03e9 -> "8.0B", 812 -> "812"."""
    size = abs(number)
    for unit, letter in _LARGE:
        if size >= 0.9995 * unit:  # 999.5k rounds up to 1.0M, not to 1000k
            scaled = number / unit
            return f"{scaled:.1f}{letter}" if abs(scaled) < 99.95 else f"{scaled:.0f}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """91 -> "1:31", 3_723 -> "1:02:03", 200_000 -> "2 d 7:33 h"; "?" if negative or not finite."""
    if not (math.isfinite(seconds) and seconds >= 0):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gigabytes(nbytes: float) -> str:
    """304_000_000 -> "0.30 GB", 31_200_000_000 -> "31.2 GB"; a GB is 10^9 bytes."""
    number = nbytes / 1e9
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} GB"


def megabytes(nbytes: float) -> str:
    """11_300_000 -> "11.3 MB", 37_412 -> "37.4 kB", 2 -> "2 bytes"; a MB is 10^6 bytes."""
    if nbytes >= 999_950:  # anything less rounds to 999.9 kB at most
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e3:.1f} kB" if nbytes >= 1e3 else f"{nbytes:.0f} byte{'s' * (nbytes != 1)}"


def milliseconds(seconds: float) -> str:
    """0.1234 -> "123 ms", 0.00123 -> "1.23 ms", 12.3 -> "12.3 s"."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def multiples_near(number: int, step: int) -> str:
    """(10, 4) -> "8 and 12"; (3, 4) -> "4 and 8"."""
    below = number // step * step
    return f"{below} and {below + step}" if below else f"{step} and {2 * step}"
