"""Moves a plain tensor from one of DTensor's placements to another, and its gradient back.

    before       after        moves                      gradient
    Partial      Replicate    all-reduce                 as it is
    Partial      Shard        reduce-scatter             all-gather
    Shard        Replicate    all-gather                 its part; a Partial one: reduce-scatter
    Replicate    Shard        nothing: takes its part    all-gather
    Replicate    Replicate    nothing                    a Partial one: all-reduce

Rules and results are those of DTensor's `redistribute`. But that works them out anew each time, with tensors
of its own in Python, which takes longer than a small tensor travels (docs/model-parallel.md).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from imece.collectives import native, ops
from imece.collectives.calls import in_shared_memory

_LABEL = "activations or their gradients over the axis tensor"


def cross(
    x: Tensor,
    group: dist.ProcessGroup,
    before: Placement,
    after: Placement,
    gradient: Placement | None = None,
) -> Tensor:
    """This rank's part of x after moving it from placement `before` to `after`. All ranks call this.

    gradient: the placement of the result's gradient, if it is not `after`. The length of a sharded dim is a
    multiple of the number of ranks.
    """
    return cast(Tensor, _Cross.apply(x, group, before, after, gradient or after))  # type: ignore[no-untyped-call]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        before: Placement,
        after: Placement,
        gradient: Placement,
    ) -> Tensor:
        # Each addend's gradient is that of the sum; in double backward, each rank's is again one addend.
        ctx.back = group, gradient, Replicate() if before.is_partial() else before, before
        return _moved(x, group, before, after)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return cross(gradient, *ctx.back), None, None, None, None


def _moved(x: Tensor, group: dist.ProcessGroup, before: Placement, after: Placement) -> Tensor:
    if before == after:
        return x
    ranks = group.size()
    match before, after:
        case Partial(), Replicate():
            whole = x.clone(memory_format=torch.contiguous_format)
            _run("all_reduce", whole, whole, group)
            return whole
        case Partial(), Shard(dim=dim):
            parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
            mine = torch.empty_like(parts[0])
            _run("reduce_scatter", mine, parts, group)
            return mine
        case Shard(dim=dim), Replicate():
            mine = x.contiguous()
            parts = mine.new_empty((ranks, *mine.shape))
            _run("all_gather", parts, mine, group)
            return parts.movedim(0, dim).flatten(dim, dim + 1)
        case Replicate(), Shard(dim=dim):
            return x.chunk(ranks, dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    raise AssertionError(f"from {before} to {after}")


def _run(op: str, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    if isinstance(input, FakeTensor) or input.is_meta:
        return  # somebody only asks for shapes
    # Elsewhere imece's own calls are checked by a message each, for which a GPU's host would wait.
    own = in_shared_memory(group, input)
    if op == "all_reduce":
        if own:
            ops.all_reduce(output, group=group, label=_LABEL)
        else:
            native.all_reduce(output.view(-1), "sum", group).wait()
    elif op == "reduce_scatter":
        if own:
            ops.reduce_scatter(output, input, group=group, label=_LABEL)
        else:
            native.reduce_scatter(output.view(-1), input.view(-1), "sum", group).wait()
    elif own:
        ops.all_gather(output, input, group=group, label=_LABEL)
    else:
        native.all_gather(output.view(-1), input.view(-1), group).wait()
