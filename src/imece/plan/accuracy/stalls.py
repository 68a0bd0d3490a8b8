"""What the slow pipelines of ultrascale have in common: each message between stages takes a quarter second
longer, or none does. Counted here, predicted nowhere: nothing in a configuration tells which.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from imece.plan.accuracy.statistics import Row, kendall, of_cells
from imece.plan.accuracy.steps import Case, row, ultrascale

_STALLED = (0.19, 0.33)  # s a message
_FREE = 0.05
_SLOW = 2.0  # times what is predicted


@dataclass(frozen=True)
class Stalls:
    """Counts of runs with a pipeline, unless it says otherwise."""

    pipelines: int
    stalled: int
    free: int  # whose messages take what is predicted, within 0.05 s
    slow: int  # of all runs: more than twice as long as predicted
    slow_pipelines: int
    slow_stalled: int
    seconds: float  # that a message of stalled ones takes longer, in the middle
    micro_batches: tuple[int, int]  # sequences, of stalled ones
    hosts: tuple[int, int]  # likewise
    twins: int  # pairs that differ in the stage of ZeRO alone
    twins_apart: int  # of them, one stalled and the other not
    apart_by_zero: dict[int, tuple[int, int]]  # hosts -> of those, how many stalled in ZeRO-0, and in ZeRO-1
    alike: int  # pairs that differ in the model or the micro-batch alone
    alike_apart: int
    alike_by_chance: float  # how many would be apart if stalls were dealt by lot
    order: dict[str, float]  # Kendall's tau of each cell if one knew which are stalled
    ceiling: dict[str, float]  # if one did not, and all other runs took exactly what is predicted


def stalls(cases: Sequence[Case] | None = None) -> Stalls:
    """Of ultrascale's runs, or of others of its kind. ValueError if no pipeline of them is stalled."""
    cases = list(ultrascale()) if cases is None else cases
    rows = [row(case) for case in cases]
    late = [_late_s(case, each) for case, each in zip(cases, rows, strict=True)]
    pipelines = [at for at, case in enumerate(cases) if case.setups[0].parallel.pipeline > 1]
    stalled = [at for at in pipelines if _STALLED[0] < late[at] < _STALLED[1]]
    slow = [at for at, each in enumerate(rows) if each.measured > _SLOW * each.predicted]
    recipes = [cases[at].setups[0].recipe.micro_batch for at in stalled]
    hosts = [cases[at].cluster.hosts for at in stalled]
    middle = statistics.median(late[at] for at in stalled)
    twins = [pair for pair in combinations(pipelines, 2) if _are_twins(cases[pair[0]], cases[pair[1]])]
    apart = [pair for pair in twins if (pair[0] in stalled) != (pair[1] in stalled)]
    alike = [pair for pair in combinations(pipelines, 2) if _are_alike(cases[pair[0]], cases[pair[1]])]
    part = len(stalled) / len(pipelines)
    exact = [
        each if at in stalled else replace(each, predicted=each.measured) for at, each in enumerate(rows)
    ]
    informed = [
        replace(each, predicted=each.predicted + middle * _messages(case) * _part(case))
        if at in stalled else each for at, (case, each) in enumerate(zip(cases, rows, strict=True))
    ]  # fmt: skip
    return Stalls(
        pipelines=len(pipelines),
        stalled=len(stalled),
        free=sum(abs(late[at]) < _FREE for at in pipelines),
        slow=len(slow),
        slow_pipelines=len(set(slow) & set(pipelines)),
        slow_stalled=len(set(slow) & set(stalled)),
        seconds=middle,
        micro_batches=(min(recipes), max(recipes)),
        hosts=(min(hosts), max(hosts)),
        twins=len(twins),
        twins_apart=len(apart),
        apart_by_zero=_by_zero(cases, [one if one in stalled else other for one, other in apart]),
        alike=len(alike),
        alike_apart=sum((one in stalled) != (other in stalled) for one, other in alike),
        alike_by_chance=2 * part * (1 - part) * len(alike),
        order=of_cells(informed, kendall),
        ceiling=of_cells(exact, kendall),
    )


def _messages(case: Case) -> float:
    """That one stage after another waits for in a step: an activation or gradient in, and one out."""
    parallel = case.setups[0].parallel
    each = 2 if parallel.pipeline == 2 else 4  # the first and the last stage have one neighbour
    return each * (case.setups[0].recipe.accumulation + (parallel.pipeline - 1) / 2)


def _late_s(case: Case, each: Row) -> float:
    """Seconds a message that the step took longer than predicted; 0 without a pipeline."""
    if case.setups[0].parallel.pipeline == 1:
        return 0.0
    return (each.measured - each.predicted) / _part(case) / _messages(case)


def _part(case: Case) -> float:
    """Of a step, that a row's seconds are."""
    return case.sequences / case.setups[0].global_batch if case.sequences else 1.0


def _are_twins(one: Case, other: Case) -> bool:
    first, second = one.setups[0], other.setups[0]
    return (
        first != second
        and (first.model, first.recipe, one.cluster) == (second.model, second.recipe, other.cluster)
        and replace(first.parallel, strategy="zero1", shard=1)
        == replace(second.parallel, strategy="zero1", shard=1)
    )


def _are_alike(one: Case, other: Case) -> bool:
    return (one.setups[0].parallel, one.cluster) == (other.setups[0].parallel, other.cluster)


def _by_zero(cases: Sequence[Case], chosen: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Hosts -> how many of the `chosen` cases are of ZeRO-0, and how many of ZeRO-1."""
    counts = Counter((cases[at].cluster.hosts, cases[at].setups[0].parallel.strategy) for at in chosen)
    hosts = sorted({hosts for hosts, _ in counts})
    return {each: (counts[each, "replicate"], counts[each, "zero1"]) for each in hosts}
