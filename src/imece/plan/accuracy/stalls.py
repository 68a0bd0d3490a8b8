"""What the slow pipelines of ultrascale have in common: each message between stages takes a quarter second
longer, or none does. Counted here, predicted nowhere: nothing in a configuration tells which.
"""

from __future__ import annotations

import statistics
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
    order: dict[str, float]  # Kendall's tau of each cell if one knew which are stalled


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
        twins_apart=sum((one in stalled) != (other in stalled) for one, other in twins),
        order=of_cells(informed, kendall),
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
