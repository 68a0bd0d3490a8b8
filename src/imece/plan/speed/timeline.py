"""Places buckets and units beside computation: how much communication stays exposed.

Communication of one group runs in the order of its requests, one piece after the other.
"""

from __future__ import annotations

from collections.abc import Sequence


def ends(ready: Sequence[float], lasts: Sequence[float]) -> list[float]:
    """When each piece is done: it begins when it is `ready` and the pieces before it are done."""
    through: list[float] = []
    now = 0.0
    for may, long in zip(ready, lasts, strict=True):
        now = max(now, may) + long
        through.append(now)
    return through


def exposed_after(compute_s: float, pieces: int, piece_s: float) -> float:
    """For equal pieces, each ready after its share of `compute_s`: how much later than it the last one is
    done.

    The last piece is always exposed: it is ready when the computation ends.
    """
    if pieces < 1:
        return 0.0
    return max(piece_s, pieces * piece_s - compute_s * (pieces - 1) / pieces)


def exposed_before(compute_s: float, pieces: int, piece_s: float, there: int = 0) -> float:
    """The same for equal pieces that are needed before their shares of `compute_s`, and requested one share
    ahead.

    there: this many of the first pieces are already there.
    """
    if pieces <= there:
        return 0.0
    late = max(0.0, piece_s - compute_s / pieces)
    return (pieces - there) * late if there else piece_s + (pieces - 1) * late
