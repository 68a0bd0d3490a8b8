"""The strategies, under all names that people know them by: what each rank keeps of a model."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.footprint import DIVIDED, Divided
from imece.mesh import Mesh


@dataclass(frozen=True)
class Strategy(Divided):
    """What is divided among the ranks of a shard group, and which ranks these are."""

    name: str
    hybrid: bool
    """The shard group is the ranks of one host, or those along the mesh's axis shard; otherwise all ranks."""


_OTHER_NAMES = {
    "replicate": ("ddp", "no_shard"),
    "zero1": ("zero-1",),
    "zero2": ("zero-2", "shard_grad_op"),
    "zero3": ("zero-3", "fsdp", "full_shard"),
    "hybrid": ("hybrid_shard",),
    "hybrid_zero2": ("_hybrid_shard_zero2",),
}
STRATEGIES: dict[str, Strategy] = {
    name: Strategy(**asdict(divided), name=name, hybrid=name.startswith("hybrid"))
    for name, divided in DIVIDED.items()
}
_BY_ANY_NAME = {name: each for each in STRATEGIES.values() for name in (each.name, *_OTHER_NAMES[each.name])}


def find_strategy(name: str) -> Strategy:
    """The strategy with this name, in upper or lower case. ValueError, with the nearest name, if there
    is none."""
    found = _BY_ANY_NAME.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), _BY_ANY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown strategy {name!r}{hint} There are auto, {', '.join(STRATEGIES)}")
    return found


def usual_strategy(ranks: Mesh | dist.ProcessGroup) -> Strategy:
    """What "auto" takes if it fits and no measurement shows another to be faster.

    That is zero1: it divides the optimizer's work and moves no more than DDP. Between the CPUs of several
    hosts it is replicate: each host has the whole model, so losing a host loses nothing.
    """
    hosts = isinstance(ranks, Mesh) and ranks.device.type == "cpu" and _has_several_hosts(ranks)
    return STRATEGIES["replicate" if hosts else "zero1"]


def _has_several_hosts(mesh: Mesh) -> bool:
    # A rank that joins knows only itself, and others may be missing.
    return len(mesh.hosts) > 1 or (mesh.world.full_size or 0) > mesh.world.local_world_size


@dataclass(frozen=True)
class ShardGroups:
    """Which ranks share what: `shard` divides the model, `replicas` hold the same shard."""

    world: dist.ProcessGroup
    shard: dist.ProcessGroup
    replicas: dist.ProcessGroup | None  # None: no other rank holds this shard

    @classmethod
    def of(cls, strategy: Strategy, ranks: Mesh | dist.ProcessGroup, spread: bool = False) -> ShardGroups:
        """The groups of a mesh, or a single group that shards. ValueError, with the reason, if a strategy
        has none.

        spread: if a hybrid strategy does not fit the hosts, divide the model among all ranks together.
        """
        if isinstance(ranks, dist.ProcessGroup):
            if strategy.hybrid:
                raise ValueError(f"strategy {strategy.name!r} needs a mesh, which knows hosts, not a group")
            return cls(ranks, ranks, None)
        mesh = ranks
        if not strategy.hybrid or (spread and (len(mesh.hosts) < 2 or mesh.cross_group is None)):
            return cls(mesh.data_group, mesh.data_group, None)
        plain = "zero3" if strategy.parameters else "zero2"
        if mesh.size("shard") > 1:
            replicas = mesh.group("replicate", "context")
            if replicas.size() == 1:
                raise ValueError(
                    f"strategy {strategy.name!r} shards along the axis shard and replicates along replicate, "
                    f"and this mesh has all {mesh.size('shard')} ranks in shard: use {plain!r}"
                )
            return cls(mesh.data_group, mesh.group("shard"), replicas)
        if mesh.data_group is not mesh.world_group:
            raise ValueError(
                f"strategy {strategy.name!r} on a mesh with an axis tensor or pipeline: say what is shared "
                "out by an axis shard, imece.init({..., 'shard': 2})"
            )
        if len(mesh.hosts) < 2:
            raise ValueError(
                f"strategy {strategy.name!r} shards inside hosts and replicates between them, but all "
                f"{mesh.world_size} ranks are on one host: use {plain!r}, or say what shards by axes, "
                "imece.init({'replicate': ..., 'shard': ...})"
            )
        if mesh.cross_group is None:
            sizes = sorted({len(host) for host in mesh.hosts})
            raise ValueError(
                f"strategy {strategy.name!r} needs the same number of ranks on every host, and they have "
                f"{sizes[0]} to {sizes[-1]}"
            )
        return cls(mesh.world_group, mesh.host_group, mesh.cross_group)

    def in_common(self, device: torch.device) -> bool:
        """Whether tensors of the shard group can lie in memory that all its ranks share."""
        return device.type == "cpu" and isinstance(self.shard, SharedMemoryGroup)
