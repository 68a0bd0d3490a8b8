"""Chooses a run's strategy, and where its gradients accumulate: what was asked for, or what the planner says
is fastest and fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from imece.collectives.texts import gather_texts
from imece.data_parallel.sharding.offload import can_offload
from imece.data_parallel.strategy import find_strategy, usual_strategy
from imece.footprint import DIVIDED
from imece.mesh import Mesh
from imece.plan.answer.auto import ORDER, Way, fitting
from imece.plan.answer.space import RESERVE
from imece.plan.check import PLAN_FILE
from imece.plan.setup import Strategy
from imece.reading import json_if_any
from imece.train.batch import BatchPlan
from imece.train.dividing import goes_with_stages
from imece.train.prediction import Given, predict


def strategy_of(given: Given, mesh: Mesh) -> str:
    """The run's strategy. "auto": rank 0 chooses, and a rank that joins takes what the others have. All ranks
    call this."""
    config = given.config
    if config.strategy != "auto":
        return find_strategy(config.strategy).name
    if mesh.world.joining:
        return chosen_before(config.folder) or usual_strategy(mesh).name
    mine: list[str] = []
    if mesh.rank == 0:
        mine.append(choose(given, mesh))
    return gather_texts(mine, mesh.world_group, mesh.device, "strategy that rank 0 chooses")[0][0]


def choose(given: Given, mesh: Mesh) -> Strategy:
    """For "auto": the fastest strategy that fits, by the measurements of this machine.

    The default for these ranks stays if nothing is clearly faster or nothing was measured. If nothing fits,
    it is the strategy that needs least.
    """
    usual, offload, machine = usual_strategy(mesh).name, given.config.offload, given.machine
    on_hosts = len(mesh.hosts) > 1 and mesh.cross_group is not None
    sharded = [each for each in ORDER if on_hosts or not each.startswith("hybrid")]
    if given.plan.mesh.pipeline > 1:
        sharded = [each for each in sharded if goes_with_stages(each)]
    if offload is not None:
        sharded = [each for each in sharded if can_offload(offload, find_strategy(each))]
    if given.config.compute.accumulate == "sharded":
        sharded = [each for each in sharded if DIVIDED[each].gradients]
    found = {each: predict(each, _by_own_memory(each, given)).candidate for each in sharded}
    ways = [
        Way(name, each.needed, each.seconds if machine.is_measured else None) for name, each in found.items()
    ]
    taken = fitting(ways, _room_bytes(given), usual)
    return (taken or min(ways, key=lambda way: way.needed)).strategy


def accumulating(strategy: str, given: Given, mesh: Mesh) -> BatchPlan:
    """The plan of the batch, which says where the run's gradients accumulate. Where that depends on memory,
    rank 0 chooses. All ranks call this, with the same but for the machine."""
    if not _depends_on_memory(strategy, given):
        return _by_own_memory(strategy, given).plan
    mine = ["whole" if _fits_whole(strategy, given) else "sharded"] if mesh.rank == 0 else []
    told = gather_texts(mine, mesh.world_group, mesh.device, "where gradients accumulate")
    return replace(given.plan, whole=told[0] == ["whole"])


def _by_own_memory(strategy: str, given: Given) -> Given:
    """The same with the plan for this strategy, by this rank's memory."""
    whole = given.config.compute.accumulate != "sharded"
    if _depends_on_memory(strategy, given):
        whole = _fits_whole(strategy, given)
    elif not _may_shard(strategy, given.plan):
        whole = True
    return replace(given, plan=replace(given.plan, whole=whole))


def _may_shard(strategy: str, plan: BatchPlan) -> bool:
    """Whether gradients could be summed after each micro-batch; a pipeline's are after the last one."""
    return DIVIDED[strategy].gradients and plan.mesh.pipeline == 1


def _depends_on_memory(strategy: str, given: Given) -> bool:
    plan = given.plan
    auto = given.config.compute.accumulate == "auto"
    return auto and plan.accumulation > 1 and _may_shard(strategy, plan)


def _fits_whole(strategy: str, given: Given) -> bool:
    whole = replace(given, plan=replace(given.plan, whole=True))
    return predict(strategy, whole).candidate.needed <= _room_bytes(given)


def _room_bytes(given: Given) -> float:
    return (1 - RESERVE) * given.machine.cluster.gpu.memory_bytes


def chosen_before(folder: Path) -> str | None:
    """The strategy of the run that is under way in this folder."""
    predicted = json_if_any(folder / PLAN_FILE).get("predicted")
    return predicted.get("strategy") if isinstance(predicted, dict) else None
