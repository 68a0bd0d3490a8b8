"""Alternating rounds: every way of doing a thing once a round, so that a slow minute is slow for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

_QUIET = 0.02  # of the processor time that there is: what others may take of it in a round that counts
_MOST = 3  # times as many rounds as are asked for, before those with the least taken have to do

T = TypeVar("T")


@dataclass(frozen=True)
class Taken:
    """What part of this machine's processor time its hypervisor gave to others ("steal"), from 0 to 1."""

    kept: tuple[float, ...] = ()
    """In each of the rounds that count, in their order."""
    dropped: tuple[float, ...] = ()
    """In each of those that do not."""

    @property
    def lines(self) -> list[str]:
        """What a reader of the figures should know; nothing on a machine of one's own."""
        if not self.dropped and max(self.kept, default=0.0) < 0.01:
            return []
        line = f"others had {_range(self.kept)} of this virtual machine's processor in these rounds"
        if self.dropped:
            line += f"; {len(self.dropped)} more, with {_range(self.dropped)}, do not count"
        return [f"  {line}"]


def alternate(
    ways: Sequence[str], rounds: int, measure: Callable[[str], T]
) -> tuple[dict[str, list[T]], Taken]:
    """What `measure(way)` gave in each of `rounds` rounds, by way. Each round begins with another way.

    A round in which others had more than 2 % of the processor is made once more, until there are three times
    as many as asked for; the rounds in which they had least count. Which ones those are does not depend on
    what was measured.
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
    """Another one first in each turn."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def odd_losses(losses: Mapping[str, float], near: float) -> list[str]:
    """The ways that did not train the same model as most: `near` is how far apart rounding makes losses."""
    numbers = [loss for loss in losses.values() if not math.isnan(loss)]  # no order has nan in it
    middle = statistics.median_low(numbers) if numbers else 0.0
    return [way for way, loss in losses.items() if not abs(loss - middle) <= near * abs(middle)]


def _processor_s() -> tuple[float, float]:
    """Seconds that others had, and all there were, of all cores since the machine was started."""
    times = psutil.cpu_times()
    whole = sum(times) - sum(getattr(times, part, 0.0) for part in ("guest", "guest_nice"))  # user's, again
    return getattr(times, "steal", 0.0), whole


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * each:.0f}" for each in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"
