"""A mesh for tests in which no other rank is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from imece.axes import Partition, check_axes
from imece.groups import Groups
from imece.mesh import Mesh
from imece.world import World


class FakeMesh(Mesh):
    """What `imece.init` returns to one rank, of which only the arithmetic is real.

    axes, hosts: as in the mesh itself; all ranks are on one host by default. groups: those that there are;
    the others are `FakeGroup`s. world: more of what this rank knows of its world.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        *,
        rank: int = 0,
        hosts: Partition | None = None,
        device: str = "cpu",
        backend: str = "gloo",
        groups: Sequence[dist.ProcessGroup] = (),
        can_change: bool = False,
        **world: Any,
    ) -> None:
        size = sum(map(len, hosts)) if hosts else math.prod((axes or {}).values())
        self.device, self.backend, self.can_change = torch.device(device), backend, can_change
        self.hosts = hosts or (tuple(range(size)),)
        self.world = World(**{"launcher": "single", **world}, **_place(rank, self.hosts))
        self._sizes, self._closed = check_axes(axes, size), False
        self._groups = cast(Groups, _FakeGroups(rank, size, groups))


@dataclass(frozen=True)
class FakeGroup:
    """The group of these ranks, of which this is `own`."""

    ranks: tuple[int, ...]
    own: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.own)


class _FakeGroups:
    def __init__(self, rank: int, size: int, groups: Sequence[dist.ProcessGroup]) -> None:
        self._rank = rank
        self._known: dict[tuple[int, ...], Any] = {}
        for each in groups:
            self._known[tuple(dist.get_process_group_ranks(each))] = each
        self.world = self.over((tuple(range(size)),))

    def over(self, sets: Partition, *_: object) -> Any:
        (own,) = (ranks for ranks in sets if self._rank in ranks)
        return self._known.setdefault(own, FakeGroup(own, self._rank))


def _place(rank: int, hosts: Partition) -> dict[str, Any]:
    """What a rank of a world on these hosts knows of it."""
    (own,) = (number for number, ranks in enumerate(hosts) if rank in ranks)
    return {
        "rank": rank,
        "world_size": sum(map(len, hosts)),
        "local_rank": hosts[own].index(rank),
        "local_world_size": len(hosts[own]),
        "host": f"host {own}",
    }
