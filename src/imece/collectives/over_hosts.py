"""How a call over hosts is carried out: on which groups, and in which lane.

A call leaves the wire idle at its ends: before it, the ranks agree that they all make it and meet within
their hosts; after it, they meet again. If the ranks' computation fills all cores meanwhile, that is a fourth
of the call's time. So asynchronous calls take turns in the mesh's lanes, and the messages of one fill the
gaps of the other. A lane has a thread, groups inside the hosts and a tag for its messages between them, so
messages of two lanes cannot be confused. All ranks count alike which lane a call goes in.

If cores are few, a call waits for one at each hand-over between threads. So the ranks of a host tell each
other where the call's tensor lies when they agree to make it, and its lane waits for the other hosts' answer
by itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imece import mesh
from imece.buckets import LANES
from imece.collectives.calls import Call
from imece.collectives.hierarchical_chunk import HostGroups
from imece.errors import UserError

_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""For each group between hosts, how many calls have gone in its lanes."""


def is_whole(group: dist.ProcessGroup) -> bool:
    """Whether it is the group of all ranks of a mesh, which knows the hosts."""
    try:
        return group is mesh.current().world_group
    except UserError:
        return False


def hosts_of(call: Call) -> HostGroups | None:
    """The mesh's hosts, for this call; None, with a warning that says why, if there is no hierarchy.

    ValueError for any other group than that of all ranks. Errors of the call's check, if groups are made for
    it.
    """
    try:
        arranged = mesh.current()
    except UserError:
        why = "only imece.init() knows the hosts"
    else:
        if call.group is not arranged.world_group:
            raise ValueError("schedule='hierarchical' is for the group of all ranks, not for some of them")
        if not arranged.has_groups_of_hosts:
            # Ranks that call something else would make no groups, and this rank would wait for them in vain.
            call.scheduled(lambda: None, None, False)
        cross = arranged.cross_group
        if cross is not None:
            return HostGroups(arranged.host_group, cross, arranged.hosts)
        sizes = sorted({len(host) for host in arranged.hosts})
        why = f"hosts hold different numbers of ranks, {sizes[0]} to {sizes[-1]}"
    warnings.warn(f"schedule='hierarchical' becomes a ring: {why}", stacklevel=3)
    return None


def between(host: dist.ProcessGroup, cross: dist.ProcessGroup) -> HostGroups | None:
    """The mesh's hosts, if these groups are the mesh's within a host and between hosts, of ranks on CPUs."""
    try:
        arranged = mesh.current()
    except UserError:
        return None
    if arranged.device.type != "cpu" or host is not arranged.host_group or cross is not arranged.cross_group:
        return None
    return HostGroups(host, cross, arranged.hosts)


def start(
    call: Call,
    hosts: HostGroups,
    run: Callable[[HostGroups], object],
    result: torch.Tensor,
    async_op: bool,
    *,
    shared: torch.Tensor | None,
) -> Any:
    """Like Call.scheduled. run: does the whole call on the groups that it is given.

    shared: what all ranks of the host may read and write from now on, if it is in shared memory.
    """
    # On a GPU calls have one order anyway, and NCCL would have to be told of two threads.
    if not async_op or result.is_cuda:
        return call.scheduled(lambda: run(hosts), result, async_op, hosts.host, hosts.cross)
    made = _calls.get(hosts.cross, 0)
    _calls[hosts.cross] = made + 1
    lane = 1 + made % LANES
    beside = hosts._replace(host=mesh.current().host_group_in(lane), lane=lane)
    return call.in_lane(lambda opened: run(beside._replace(opened=opened)), result, lane, shared)
