"""The schedule of a call that names none: links are measured once for each group, then message
size decides."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from imece import mesh
from imece.collectives import native, over_hosts
from imece.collectives.calls import Call
from imece.collectives.choice import Choice, best_parts, check_forced, choose
from imece.collectives.link_types import Links
from imece.collectives.links import measure
from imece.collectives.schedules import DEFAULT_PARTS, SCHEDULES, check_name
from imece.world import SCHEDULE

FORCED = os.environ.get(SCHEDULE, "")
"""IMECE_SCHEDULE: a schedule for every operation that knows it, or "auto"; the same on all ranks. Read once,
at import."""

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Links]] = weakref.WeakKeyDictionary()
"""Group -> type of device -> its links: in one group NCCL may move a GPU's tensors, and shm the CPU's."""


def schedule_for(op: str, schedule: str | None, tensor: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """The schedule to run where a call names this one, None or "auto"; None for the backend's own way."""
    if schedule is None and FORCED:
        check_forced(FORCED)
        if FORCED != "hierarchical" or over_hosts.is_whole(group):
            schedule = FORCED if FORCED in ("auto", *SCHEDULES[op]) else None
    if schedule == "auto":
        found = choice(op, tensor.numel() * tensor.itemsize, group, tensor.device)
        names = [found.name, *(name for name, _ in found.others)]
        schedule = next(name for name in names if name != "hierarchical" or over_hosts.is_whole(group))
        return None if schedule == "native" else schedule
    if schedule is not None:
        check_name(op, schedule)
    return schedule


def choice(op: str, nbytes: int, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Choice:
    """What schedule="auto" means for a call: `print(choice(...))` says which schedule and why.

    op: "all_reduce", "reduce_scatter", "all_gather", "broadcast" or "reduce". nbytes: of the whole tensor.
    The first call on a group measures its links (0.3 s for two ranks), so all ranks of the group must make
    it. UserError if IMECE_SCHEDULE names no schedule.
    """
    return choose(op, nbytes, links_of(group, device), forced=FORCED)


def parts_of(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The number of parts of a broadcast along the pipelined ring: by the links, if they were measured."""
    links = _links.get(group, {}).get(device.type)
    return best_parts(nbytes, links) if links is not None else DEFAULT_PARTS


def links_of(group: dist.ProcessGroup, device: torch.device | str) -> Links:
    """The measured links of a group, between memories of this type of device. The first call measures them,
    so all ranks of the group must make it."""
    kind = torch.device(device).type
    links = _links.get(group, {}).get(kind)
    if links is None:
        # After all earlier calls: a thread may not have begun one yet, and would begin it in the midst
        # of measuring.
        began = Call("barrier", group, torch.empty(0, device=device), label="to measure links")
        began.native(lambda: native.barrier(group), None, None, async_op=False)
        links = measure(group, mesh.hosts_in(group), device)
        _links.setdefault(group, {})[kind] = links
    return links
