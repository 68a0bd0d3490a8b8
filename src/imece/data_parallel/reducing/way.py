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
from imece.layout import MIB, usual_cap_bytes


@dataclass(frozen=True)
class Way:
    """How and when a bucket travels if no hook reduces it; fields as for ops.all_reduce."""

    schedule: str | None = None
    wire: str | None = None
    overlap: bool = True  # as soon as it is ready; False: when backward is over, on its own thread


def best_schedule(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """ "hierarchical" for CPU ranks of several hosts; NCCL finds such ways by itself."""
    with contextlib.suppress(UserError):
        arranged = mesh.current()
        if device.type == "cpu" and len(arranged.hosts) > 1 and group is arranged.world_group:
            return "hierarchical" if arranged.cross_group is not None else None
    return None


def most_under_way(groups: ShardGroups, device: torch.device, schedule: str | None) -> int:
    """How many buckets may be summed while another one fills, if they borrow their memory.

    If all ranks share one memory, a sum ends before the next gradient comes: one. On a network a sum takes as
    long as the backward of a unit, and has that time; over hosts there is one sum per lane.
    """
    shard, replicas = groups.shard, groups.replicas
    if schedule == "hierarchical" or (replicas is not None and over_hosts.between(shard, replicas)):
        return mesh.LANES
    return 0 if groups.in_common(device) and replicas is None else 1


def units_at_once(schedule: str | None) -> int:
    """Units that are gathered at a time in forward: one runs and one comes; between hosts one comes in
    each lane."""
    return 1 + (mesh.LANES if schedule == "hierarchical" else 1)


def leave_together(way: Way, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether buckets that keep their memory are posted when full, and summed at the end (posting.py).

    device: of the gradients.
    """
    plain = way.schedule is None and way.wire is None
    in_reach = isinstance(group, SharedMemoryGroup) and group.size() > 1 and device.type == "cpu"
    return plain and in_reach and not way.overlap


def default_cap_bytes(
    schedule: str | None, *, on_cpu: bool = False, borrows: bool = False, together: bool = False,
    gradients_bytes: int = 0,
) -> int:  # fmt: skip
    """The cap of a bucket in bytes. borrows: gradients are sharded, so that a bucket borrows its memory.

    Small buckets in three cases: gradients are sharded on CPUs, where a message costs less than on a GPU;
    between hosts, where a slow wire would wait for the first; and if buckets leave `together`, to leave
    little for the end. gradients_bytes: of all gradients, to limit the number of buckets.
    """
    if together:
        return 4 * MIB
    return usual_cap_bytes(gradients_bytes, small=schedule == "hierarchical" or (borrows and on_cpu))


def has_spare_core(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether something other than backward's cores can reduce: a network, a GPU, or a free core."""
    if device.type != "cpu" or not isinstance(group, SharedMemoryGroup):
        return True
    return group.size() * torch.get_num_threads() < group.cores
