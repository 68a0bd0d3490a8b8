"""Buckets and units laid over computation: how much communication stays in sight.

Communication of one group runs in the order in which it was asked for, one piece after the other.
"""

from __future__ import annotations

from collections.abc import Sequence


def ends(ready: Sequence[float], lasts: Sequence[float]) -> list[float]:
    """When each piece is through: it may begin at `ready`, and when those before it are through."""
    through: list[float] = []
    now = 0.0
    for may, long in zip(ready, lasts, strict=True):
        now = max(now, may) + long
        through.append(now)
    return through


def exposed_after(compute_s: float, pieces: int, piece_s: float) -> float:
    """Of equal pieces, each ready after its share of `compute_s`: by how much the last is late.

    The last piece is always in sight: it is ready when the computation ends.
    """
    if pieces < 1:
        return 0.0
    return max(piece_s, pieces * piece_s - compute_s * (pieces - 1) / pieces)


def exposed_before(compute_s: float, pieces: int, piece_s: float, there: int = 0) -> float:
    """Of equal pieces, each needed before its share of `compute_s`, asked for one share ahead.

    there: so many of the first are there already, and need not come.
    """
    if pieces <= there:
        return 0.0
    late = max(0.0, piece_s - compute_s / pieces)
    return (pieces - there) * late if there else piece_s + (pieces - 1) * late
