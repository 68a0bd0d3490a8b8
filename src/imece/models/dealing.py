"""Deals the pieces of a model to the stages of a pipeline, and how many messages a stage keeps: numbers only,
for the engine and the planner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_SENT = 4
"""Messages whose memory a rank of an interleaved schedule keeps: of the latest two forwards and backwards."""


def layer_cost(parameters: float, query: float, seen: float) -> float:
    """Multiplications per token of one layer.

    query: width of its queries. seen: positions that one attends to at most: half of them on average, once
    for the scores and once for the values.
    """
    return parameters + seen * query


def deal(costs: Sequence[float], stages: int) -> list[range]:
    """Consecutive pieces for each stage, at least one, so that the most expensive stage is as cheap as
    possible.

    ValueError if there are fewer pieces than stages.
    """
    count = len(costs)
    if count < stages:
        raise ValueError(f"a model of {count} pieces cannot be cut into {stages} stages")
    sums = [0.0, *itertools.accumulate(costs)]
    # best[stop]: for the first `stop` pieces in so many stages, the cost of the costliest stage. It grows
    # with them, while what is left for one more stage costs less: that starts best where the two meet.
    best, starts = sums, []
    for stage in range(1, stages):
        start, better, where = stage, [float("inf")] * (stage + 1), [0] * (stage + 1)
        for stop in range(stage + 1, count + 1):
            whole = sums[stop]
            while start < stop - 1 and best[start] < whole - sums[start]:
                start += 1
            most, at = max(best[start], whole - sums[start]), start
            if start > stage and whole - sums[start - 1] <= most:
                most, at = whole - sums[start - 1], start - 1
            better.append(most)
            where.append(at)
        best = better
        starts.append(where)
    ends = [count]
    for each in reversed(starts):
        ends.insert(0, each[ends[0]])
    return between([0, *ends])


def between(ends: Sequence[int]) -> list[range]:
    """The pieces from each end to the next."""
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]
