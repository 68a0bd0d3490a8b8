"""torch's own collectives, by the group's ranks and imece's names of reductions. All return torch's Work.

Those of buckets call the group itself: torch's functions repeat checks, and a group of "cpu:shm,cuda:nccl"
would pass a GPU's tensors on in Python, which takes as long as NCCL's launch.

Tensors are flat and contiguous, and the backend knows the reduction (reduction.prepared).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from imece.collectives.given_up import Waitable
from imece.collectives.reduction import TORCH_OPS
from imece.collectives.shared_memory.group import SharedMemoryGroup, on_device
from imece.collectives.shared_memory.tensors import named

_OPS = {name: dist.ReduceOp(op) for name, op in TORCH_OPS.items()}


def all_reduce(flat: torch.Tensor, op: str, group: dist.ProcessGroup) -> Waitable:
    """In place."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = _OPS[op], True
    return cast(Waitable, on_device(group, flat).allreduce([flat], options))


def broadcast(flat: torch.Tensor, src: int, group: dist.ProcessGroup) -> Waitable:
    """In place, from rank `src` of the group."""
    options, group = dist.BroadcastOptions(), on_device(group, flat)
    options.rootRank, options.asyncOp = src, True
    return cast(Waitable, group.broadcast([_as_sent(flat, group)], options))


def reduce(flat: torch.Tensor, dst: int, op: str, group: dist.ProcessGroup) -> Waitable:
    """In place on rank `dst` of the group; some backends leave partial sums in the other ranks' tensors."""
    return cast(Waitable, dist.reduce(flat, op=TORCH_OPS[op], group=group, group_dst=dst, async_op=True))


def reduce_scatter(output: torch.Tensor, flat: torch.Tensor, op: str, group: dist.ProcessGroup) -> Waitable:
    """Put slice `rank` of the reduced `flat` into `output`, which may be that slice."""
    group = on_device(group, flat)
    if flat.is_complex() and op in ("sum", "avg") and not isinstance(group, SharedMemoryGroup):
        # NCCL has no complex dtypes; torch does the same in its other collectives.
        output, flat = torch.view_as_real(output).view(-1), torch.view_as_real(flat).view(-1)
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = _OPS[op], True
    start = named(group, "reduce_scatter_single", "_reduce_scatter_base")
    return cast(Waitable, start(output, flat, options))


def all_gather(output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Waitable:
    """Every rank's `flat` into its slice of `output`, which may be where `flat` lies."""
    options, group = AllgatherOptions(), on_device(group, flat)
    options.asyncOp = True
    start = named(group, "all_gather_single", "_allgather_base")
    return cast(Waitable, start(_as_sent(output, group), _as_sent(flat, group), options))


def all_to_all(output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Waitable | None:
    """Slice i of `flat` goes to rank i, into the sender's slice there. None if the backend cannot do this."""
    try:
        return cast(Waitable, dist.all_to_all_single(output, flat, group=group, async_op=True))
    except RuntimeError as error:  # NotImplementedError is one too
        if "not support" in str(error) or "not implemented" in str(error):
            return None
        raise


def barrier(group: dist.ProcessGroup) -> Waitable:
    """Done when every rank of the group has come."""
    return cast(Waitable, dist.barrier(group=group, async_op=True))


def _as_sent(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What is not summed goes as bytes: Gloo and NCCL do not know all dtypes. "shm" does, and names them."""
    return flat if isinstance(group, SharedMemoryGroup) else flat.view(torch.uint8)
