"""Chooses a run's strategy: the one that was asked for, or the fastest that fits, by the planner."""

from __future__ import annotations

import json
from pathlib import Path

from imece.collectives.texts import gather_texts
from imece.data_parallel.sharding.offload import can_offload
from imece.data_parallel.strategy import find_strategy, usual_strategy
from imece.mesh import Mesh
from imece.plan.answer.auto import ORDER, Way, fitting
from imece.plan.answer.space import RESERVE
from imece.plan.check import PLAN_FILE
from imece.plan.setup import Strategy
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
    found = {each: predict(each, given).candidate for each in sharded}
    ways = [
        Way(name, each.needed, each.seconds if machine.is_measured else None) for name, each in found.items()
    ]
    taken = fitting(ways, (1 - RESERVE) * machine.cluster.gpu.memory_bytes, usual)
    return (taken or min(ways, key=lambda way: way.needed)).strategy


def chosen_before(folder: Path) -> str | None:
    """The strategy of the run that is under way in this folder."""
    try:
        return str(json.loads((folder / PLAN_FILE).read_bytes())["predicted"]["strategy"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
