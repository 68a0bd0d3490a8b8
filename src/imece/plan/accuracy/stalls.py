"""Counts the slow pipelines of ultrascale, whose messages between stages take a quarter second longer.

Nearly all slow runs were made before nanotron's pipelines were repaired, and nearly none after.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from imece.plan.accuracy.statistics import Row, kendall, of_cells
from imece.plan.accuracy.steps import Case, cases_of, row
from imece.plan.speed.stage import messages

_STALLED = (0.19, 0.33)  # extra s per message
_FREE = 0.05


@dataclass(frozen=True)
class Stalls:
    """Counts of runs with a pipeline."""

    before: int  # stalled runs with the earlier version
    before_stalled: int
    before_wide: int  # of the earlier runs that did not stall, those with tensor parallelism over hosts
    after: int
    after_stalled: int
    after_free: int  # later runs whose messages take what is predicted, within 0.05 s
    seconds: dict[str, float]  # for each model, the median extra time of a message in earlier stalled runs
    micro_batches: tuple[int, int]  # fewest and most sequences in earlier stalled runs
    hosts: tuple[int, int]  # fewest and most hosts in earlier stalled runs
    slow_network: tuple[tuple[int, int], tuple[int, int]]
    """(how many, of how many) runs on several hosts were on the slow network: with a pipeline, and
    without."""
    unaware: dict[str, float]  # Kendall's tau of each cell if the version were unknown
    ceiling: dict[str, float]  # if one did not, and all runs but the stalled took exactly what is predicted


def stalls(cases: Sequence[Case] | None = None) -> Stalls:
    """Counts for ultrascale's runs, or other runs of its kind. ValueError if no earlier run is stalled."""
    cases = list(cases_of("ultrascale")) if cases is None else cases
    rows = [row(replace(case, manner=replace(case.manner, message_s=0.0))) for case in cases]
    late = [_late_s(case, each) for case, each in zip(cases, rows, strict=True)]
    pipelines = {at for at, case in enumerate(cases) if case.setups[0].parallel.pipeline > 1}
    before = {at for at in pipelines if cases[at].manner.message_s}
    after = pipelines - before
    whole = [case for at, case in enumerate(cases) if at not in pipelines]
    stalled = {at for at in pipelines if _STALLED[0] < late[at] < _STALLED[1]}
    slow = sorted(before & stalled)
    if not slow:
        raise ValueError(f"none of {len(before)} runs with the earlier version is stalled")
    models = sorted({cases[at].setups[0].model.name for at in slow})
    recipes = [cases[at].setups[0].recipe.micro_batch for at in slow]
    hosts = [cases[at].cluster.hosts for at in slow]
    exact = [
        each if at in stalled else replace(each, predicted=each.measured) for at, each in enumerate(rows)
    ]
    return Stalls(
        before=len(before),
        before_stalled=len(slow),
        before_wide=sum(_is_wide(cases[at]) for at in before - stalled),
        after=len(after),
        after_stalled=len(after & stalled),
        after_free=sum(abs(late[at]) < _FREE for at in after),
        seconds={
            name: statistics.median(late[at] for at in slow if cases[at].setups[0].model.name == name)
            for name in models
        },
        micro_batches=(min(recipes), max(recipes)),
        hosts=(min(hosts), max(hosts)),
        slow_network=(_on_slow_network([cases[at] for at in sorted(pipelines)]), _on_slow_network(whole)),
        unaware=of_cells(rows, kendall),
        ceiling=of_cells(exact, kendall),
    )


def _on_slow_network(cases: Sequence[Case]) -> tuple[int, int]:
    """(how many, of how many) of the runs on several hosts were on the slow network."""
    several = [case for case in cases if case.cluster.hosts > 1]
    return sum(case.manner.spread_host_s > 0 for case in several), len(several)


def _is_wide(case: Case) -> bool:
    """Whether tensor parallelism goes over several hosts."""
    return case.setups[0].parallel.tensor > case.cluster.gpus_per_host


def _messages(case: Case) -> float:
    """Messages between stages that a step waits for in turn: each an activation or gradient in, and one
    out."""
    parallel = case.setups[0].parallel
    return messages(parallel.pipeline) * (case.setups[0].recipe.accumulation + (parallel.pipeline - 1) / 2)


def _late_s(case: Case, each: Row) -> float:
    """Seconds per message that the step took longer than predicted; 0 without a pipeline."""
    if case.setups[0].parallel.pipeline == 1:
        return 0.0
    return (each.measured - each.predicted) / case.part / _messages(case)
