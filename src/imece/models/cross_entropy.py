"""Cross-entropy computed in pieces, so that it needs little memory besides the logits.

The logits are the largest tensor of a step. `F.cross_entropy` in float32 writes them again in float32, then
their log-softmax, then its gradient, all of the same size. Here a *piece* of the positions is converted, used
and dropped while it is still in the cache; only one number per position stays.

If a rank has only some *columns* of the logits (entries of the vocabulary), two numbers per position are all
that the other ranks need of them: the log-sum-exp of these columns, and the target's logit, which one rank
has (after Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Columns:
    """Logits [N, n] that are columns [first, first + n) of `whole`; other ranks have the rest."""

    first: int
    whole: int
    merged: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(log-sum-exp, target's logit), each [N], of these columns -> the same over all columns. The logit is 0
    if another rank has the target."""


OF_CLASS: dict[type[Tensor], Callable[[Tensor, Tensor, int], Tensor]] = {}
"""For tensor subclasses such as DTensor: class -> `summed_cross_entropy` of its logits [..., V]."""

_CPU_PIECE_BYTES = 1 << 20  # in float32: the second-level cache of one core
_PIECE_BYTES = 1 << 28  # on other devices: large enough that launching kernels costs nothing


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    """F.cross_entropy of logits [..., V] and targets (int64 [...]), computed in float32 (of float64: in
    float64).

    The logits may have any dtype and need no `.float()`. Memory: the logits and their gradient in that dtype,
    and a piece of at most 256 MiB; torch's function takes 12 bytes per logit. Targets equal to `ignore_index`
    do not count; the mean over no target is nan. Can be differentiated once. ValueError for targets of
    another shape and for an unknown reduction.

    logits may be a DTensor whose last dim, the vocabulary, is sharded over ranks, as from
    `imece.tensor_parallel(..., divided_logits=True)` or torch's `parallelize_module`. Then all of these ranks
    call this with the same targets; each computes its own columns, two numbers per position travel, and all
    get the same loss. ValueError for logits that are sharded otherwise, or of which a rank has no column.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits {list(logits.shape)}, the vocabulary last, want targets {list(logits.shape[:-1])}, not "
            f"{list(targets.shape)}"
        )
    summed = OF_CLASS.get(type(logits))
    if summed is None:
        nats = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index)
    else:
        nats = summed(logits, targets, ignore_index)
    return nats / (targets != ignore_index).sum() if reduction == "mean" else nats


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, ignore: int, columns: Columns | None = None
) -> Tensor:
    """The sum over all targets but `ignore`: a scalar, float32 (of float64: float64).

    logits: [N, V], or some columns of them; targets: int64 [N]. Can be differentiated once.
    """
    if columns is None and torch.compiler.is_compiling():
        # torch.compile would unroll the loop below; its own fused kernel is better.
        return F.cross_entropy(logits.to(_wide(logits)), targets, ignore_index=ignore, reduction="sum")
    return cast(Tensor, _Pieces.apply(logits, targets, ignore, columns))  # type: ignore[no-untyped-call]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, columns: Columns | None) -> Tensor:
        here = kept = targets != ignore
        targets = targets.where(kept, 0)
        if columns is not None:
            targets, elsewhere = _own(targets, columns, logits.shape[1])
            here = kept & ~elsewhere
        totals = logits.new_empty(len(targets), dtype=_wide(logits))  # log-sum-exp of each row
        for piece in _pieces(logits):
            totals[piece] = logits[piece].to(totals.dtype).logsumexp(-1)
        chosen = logits.gather(1, targets[:, None])[:, 0].to(totals.dtype)
        if columns is not None:
            totals, chosen = columns.merged(totals, chosen.where(here, 0))
        ctx.save_for_backward(logits, targets, kept, here, totals)
        return (totals - chosen).where(kept, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the second derivative would silently be 0
            raise RuntimeError("this cross-entropy can be differentiated once; F.cross_entropy more often")
        logits, targets, kept, here, totals = ctx.saved_tensors
        scale, hits = gradient * kept, here.to(totals.dtype)
        result = torch.empty_like(logits)
        for piece in _pieces(logits):
            # Stays in float32 until the last line: in fp16 a gradient that is not yet scaled would be zero.
            softmax = (logits[piece] - totals[piece, None]).exp_()
            rows = torch.arange(len(softmax), device=softmax.device)
            softmax[rows, targets[piece]] -= hits[piece]
            result[piece] = softmax.mul_(scale[piece, None])
            del softmax  # or it would be in memory together with the next piece's
        return result, None, None, None


def _own(targets: Tensor, columns: Columns, count: int) -> tuple[Tensor, Tensor]:
    """(each target's column among these `count`, bool: another rank has the target, and its column reads
    0)."""
    at = targets - columns.first
    # A target outside the whole vocabulary stays, so that every rank refuses it.
    elsewhere = ((at < 0) | (at >= count)) & (targets >= 0) & (targets < columns.whole)
    return at.where(~elsewhere, 0), elsewhere


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _pieces(logits: Tensor) -> list[slice]:
    piece_bytes = _CPU_PIECE_BYTES if logits.device.type == "cpu" else _PIECE_BYTES
    rows = max(1, piece_bytes // (4 * logits.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
