"""Cross-entropy a few positions at a time.

`F.cross_entropy` of float32 logits writes the logits again in float32, their log-softmax and the gradient of
that, each as large as the logits, which are the largest tensor of a step. Here a *piece* of the positions is
converted, used and forgotten while it is still in the cache; what stays is one number a position.

Where somebody has some *columns* of the logits alone, entries of the vocabulary, two numbers a position are
all that those who have the others need of them: the log-sum-exp of these columns, and the target's logit,
which one of them has (after Shoeybi et al. 2019, section 3).
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
    """Logits [N, n] are columns [first, first + n) of `whole`; others have the rest."""

    first: int
    whole: int
    merged: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Of log-sum-exp and target's logit of each row (0 where others have it), [N]: those over all columns."""


OF_CLASS: dict[type[Tensor], Callable[[Tensor, Tensor, int], Tensor]] = {}
"""For a class of tensors that are more than they hold: `summed_cross_entropy` of its logits [..., V]."""

_CPU_PIECE_BYTES = 1 << 20  # in float32; the second-level cache of one core
_PIECE_BYTES = 1 << 28  # elsewhere: large enough that launching kernels costs nothing


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    """F.cross_entropy of logits [..., V] in float32 and targets (int64 [...]): a float32 scalar, of float64 a
    float64 one.

    The logits may have any dtype, and need no `.float()`: of memory it takes them and their gradient in that
    dtype, and a piece of 256 MiB or less; torch's takes 12 bytes for each logit. Targets that are
    `ignore_index` do not count; the mean over none at all is nan. Can be differentiated once. ValueError for
    targets of another shape and for another reduction.

    logits may be a DTensor whose last dim, the vocabulary, is sharded over ranks, as of
    `imece.tensor_parallel(..., divided_logits=True)` or of torch's `parallelize_module`: each rank computes
    with its own, two numbers a position travel, and all have the same loss. Then all of these ranks call it,
    with the same targets. ValueError for logits that are sharded otherwise, or of which a rank has none.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {list(targets.shape)}; logits has shape {list(logits.shape)}")
    summed = OF_CLASS.get(type(logits))
    if summed is None:
        nats = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index)
    else:
        nats = summed(logits, targets, ignore_index)
    return nats / (targets != ignore_index).sum() if reduction == "mean" else nats


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, ignore: int, columns: Columns | None = None
) -> Tensor:
    """The sum over all targets but `ignore`: a scalar, computed in float32 or, of float64, in that.

    logits [N, V], or some columns of them; targets int64 [N]. Can be differentiated once.
    """
    if columns is None and torch.compiler.is_compiling():
        # Its own fused kernel is better than a loop it would unroll.
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
        if torch.is_grad_enabled():  # create_graph=True: what follows would silently count as a constant
            raise RuntimeError("this cross-entropy can be differentiated once; F.cross_entropy more often")
        logits, targets, kept, here, totals = ctx.saved_tensors
        scale, hits = gradient * kept, here.to(totals.dtype)
        result = torch.empty_like(logits)
        for piece in _pieces(logits):
            # Wide until the last line: in fp16 a gradient that is not yet scaled would be zero.
            softmax = (logits[piece] - totals[piece, None]).exp_()
            rows = torch.arange(len(softmax), device=softmax.device)
            softmax[rows, targets[piece]] -= hits[piece]
            result[piece] = softmax.mul_(scale[piece, None])
            del softmax  # or it would lie beside the next piece's
        return result, None, None, None


def _own(targets: Tensor, columns: Columns, count: int) -> tuple[Tensor, Tensor]:
    """(each target's column of these `count`, bool: others have it and it is said to be 0)"""
    at = targets - columns.first
    # One that nobody has stays what it is, for all to refuse.
    elsewhere = ((at < 0) | (at >= count)) & (targets >= 0) & (targets < columns.whole)
    return at.where(~elsewhere, 0), elsewhere


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _pieces(logits: Tensor) -> list[slice]:
    piece_bytes = _CPU_PIECE_BYTES if logits.device.type == "cpu" else _PIECE_BYTES
    rows = max(1, piece_bytes // (4 * logits.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
