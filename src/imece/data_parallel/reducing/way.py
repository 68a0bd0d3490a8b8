"""The defaults of a group: how large buckets are, and how and when they travel."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from imece import mesh
from imece.collectives import over_hosts
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.strategy import ShardGroups
from imece.errors import UserError

HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class Way:
    """How and when a bucket travels if no hook reduces it; fields as for ops.all_reduce."""

    schedule: str | None = None
    wire: str | None = None
    overlap: bool = True  # as soon as it is ready; False: when backward is over, on its own thread

    @property
    def is_plain(self) -> bool:
        """Whether it is the backend's own, with numbers as they are."""
        return self.schedule is None and self.wire is None


def best_schedule(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """ "hierarchical" for CPU ranks of several hosts; NCCL finds such ways by itself."""
    with contextlib.suppress(UserError):
        arranged = mesh.current()
        if device.type == "cpu" and len(arranged.hosts) > 1 and group is arranged.world_group:
            return HIERARCHICAL if arranged.cross_group is not None else None
    return None


def is_over_hosts(groups: ShardGroups, schedule: str | None) -> bool:
    """Whether buckets are summed inside hosts first, and then between them."""
    if schedule == HIERARCHICAL:
        return True
    return groups.replicas is not None and over_hosts.between(groups.shard, groups.replicas) is not None


def leave_together(way: Way, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether buckets that keep their memory are posted when full, and summed at the end (posting.py).

    device: of the gradients.
    """
    in_reach = isinstance(group, SharedMemoryGroup) and group.size() > 1 and device.type == "cpu"
    return way.is_plain and in_reach and not way.overlap


def has_spare_core(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether something other than backward's cores can reduce: a network, a GPU, or a free core."""
    if device.type != "cpu" or not isinstance(group, SharedMemoryGroup):
        return True
    return group.size() * torch.get_num_threads() < group.cores
