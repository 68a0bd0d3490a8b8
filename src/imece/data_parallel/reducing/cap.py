"""bucket_cap_mb="auto": the cap with which, by the measurements, the last bucket is reduced soonest.

Small buckets leave early and hide behind backward; large ones cost fewer latencies. The first backward shows
when each gradient comes, and the measured links show what a bucket of n bytes takes. Buckets follow each
other on one wire:

    end(k) = max(ready(k), end(k - 1)) + seconds(n(k)) + EACH_S
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from imece.collectives.choice import predict
from imece.collectives.link_types import Links
from imece.layout import MIB

CAPS_BYTES = tuple(int(mb * MIB) for mb in (0.5, 1, 2, 4, 8, 16, 25, 50, 100))
EACH_S = 150e-6  # of Python code, per bucket


def cap_over(
    links: Links,
    schedule: str,
    arrivals: Sequence[tuple[int, float]],
    first_bytes: int,
    overlap: bool,
) -> int:
    """The best cap in bytes if this schedule reduces each bucket over these links."""

    def seconds(nbytes: int) -> float:
        times = predict("all_reduce", nbytes, links)
        return times.get(schedule, min(times.values()))

    if not overlap:  # nothing leaves before the last gradient has come
        arrivals = [(nbytes, arrivals[-1][1]) for nbytes, _ in arrivals]
    return best_cap(arrivals, seconds, first_bytes)[0]


def best_cap(
    arrivals: Sequence[tuple[int, float]], seconds: Callable[[int], float], first_bytes: int
) -> tuple[int, float]:
    """(cap in bytes, predicted seconds from the last gradient to the end of the last bucket).

    arrivals: (bytes, time) of each gradient, in the order in which they came. seconds: of one bucket's
    all-reduce. first_bytes: the cap of the first bucket. Returns the largest of the caps within 2 % of
    the best.
    """
    last = arrivals[-1][1] if arrivals else 0.0
    ends = {cap: _end(arrivals, seconds, cap, first_bytes) - last for cap in CAPS_BYTES}
    least = min(ends.values())
    cap = max(cap for cap, end in ends.items() if end <= least * 1.02)
    return cap, ends[cap]


def _end(
    arrivals: Sequence[tuple[int, float]],
    seconds: Callable[[int], float],
    cap: int,
    first_bytes: int,
) -> float:
    end, held, limit = 0.0, 0, first_bytes
    for at, (nbytes, ready) in enumerate(arrivals):
        held += nbytes
        if held >= limit or at == len(arrivals) - 1:
            end = max(ready, end) + seconds(held) + EACH_S
            held, limit = 0, cap
    return end
