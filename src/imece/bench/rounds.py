"""Alternating rounds: each round runs every way once, so that a slow minute is slow for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

_QUIET = 0.02  # share of processor time that others may take in a round that counts
_MOST = 3  # times the rounds asked for, at most; then the quietest ones count

T = TypeVar("T")


@dataclass(frozen=True)
class Taken:
    """Share of this machine's processor time that its hypervisor gave to others ("steal"), from 0 to 1."""

    kept: tuple[float, ...] = ()
    """In each round that counts, in order."""
    dropped: tuple[float, ...] = ()
    """In each round that does not count."""

    @property
    def lines(self) -> list[str]:
        """What a reader of the figures should know; nothing if no time was taken."""
        if not self.dropped and max(self.kept, default=0.0) < 0.01:
            return []
        line = f"others had {_range(self.kept)} of this virtual machine's processor in these rounds"
        if self.dropped:
            line += f"; {len(self.dropped)} more, with {_range(self.dropped)}, do not count"
        return [f"  {line}"]


def alternate(
    ways: Sequence[str], rounds: int, measure: Callable[[str], T]
) -> tuple[dict[str, list[T]], Taken]:
    """For each way what `measure(way)` returned in each of `rounds` rounds. Rounds begin with different ways.

    A round in which others had more than 2 % of the processor is repeated, up to three times as many rounds
    as asked for; then those with the least taken count. The choice does not depend on the measurements.
    """
    made: list[tuple[float, dict[str, T]]] = []
    quiet = 0
    while quiet < rounds and len(made) < rounds * _MOST:
        taken, whole = _processor_s()
        found = {way: measure(way) for way in turned(ways, len(made))}
        taken, whole = (after - before for after, before in zip(_processor_s(), (taken, whole), strict=True))
        share = taken / whole if whole > 0 else 0.0
        quiet += share <= _QUIET
        made.append((share, found))
    best = set(sorted(range(len(made)), key=lambda at: made[at][0])[:rounds])
    kept = [each for at, each in enumerate(made) if at in best]
    dropped = [share for at, (share, _) in enumerate(made) if at not in best]
    found_by_way = {way: [found[way] for _, found in kept] for way in ways}
    return found_by_way, Taken(tuple(share for share, _ in kept), tuple(dropped))


def turned(ways: Sequence[T], turn: int) -> list[T]:
    """The ways rotated, so that another one is first in each turn."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def odd_losses(losses: Mapping[str, float], near: float) -> list[str]:
    """A line for each way that did not train the same model as most. near: how far apart rounding makes
    losses."""
    numbers = [loss for loss in losses.values() if not math.isnan(loss)]  # NaN cannot be sorted
    middle = statistics.median_low(numbers) if numbers else 0.0
    return [
        f"{way} did not train the same model as the others: a loss of {loss:.6g}, theirs is {middle:.6g}"
        for way, loss in losses.items()
        if not abs(loss - middle) <= near * abs(middle)
    ]


def _processor_s() -> tuple[float, float]:
    """Seconds of all cores since boot: (taken by others, in all)."""
    times = psutil.cpu_times()
    whole = sum(times) - sum(getattr(times, part, 0.0) for part in ("guest", "guest_nice"))  # user's, again
    return getattr(times, "steal", 0.0), whole


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * each:.0f}" for each in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"
