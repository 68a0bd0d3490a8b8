"""torch's own collectives come behind imece's asynchronous ones that this rank began before on their group.

A thread of imece's starts those, once all ranks are known to make them. What the program calls of torch
meanwhile (a sum of losses behind a step whose parameters still come, a batch norm of torch's in backward)
would start before them on one rank and behind them on another: Gloo and NCCL would take each for the other,
which is a wrong sum, or no end. So it waits, on the host, until they have started. While none is to be
started, that costs nothing.

Not seen are calls that torch makes in C++, as DTensor does. Single messages are left alone: one of them may
have to come first. A batch of them over NCCL waits: there it has a place among its group's collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from imece.collectives import checks, pending
from imece.collectives.shared_memory.other_devices import owner_of

# Methods that torch's functions call. Of two names torch's versions have the first or the second.
_CALLS = (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *((name,) for name in (
        "_start_coalescing", "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced",
        "alltoall", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
    )),
)  # fmt: skip


def wait_turn(group: dist.ProcessGroup) -> None:
    """Returns once all that was begun on this group has started; at once in a thread that starts it."""
    if not pending.starts_calls():
        group = owner_of(group)
        pending.drain(group)
        checks.wait_started(group)


def _in_order(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def in_order(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        wait_turn(group)
        return call(group, *args, **kwargs)

    # C++ looks for methods of groups written in Python. It would take this one for such, and call it from the
    # call below for ever, if it had not the name of what C++ looks for; or if that had two names.
    in_order.__code__ = in_order.__code__.replace(co_name=name)
    return functools.update_wrapper(in_order, call)


def install() -> None:
    """From now on torch's functions wait; groups of "shm" keep the order of the CPU's calls by themselves."""
    for names in _CALLS:
        for name in [each for each in names if hasattr(dist.ProcessGroup, each)][:1]:
            setattr(dist.ProcessGroup, name, _in_order(name, getattr(dist.ProcessGroup, name)))
