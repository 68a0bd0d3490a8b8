"""Cross-entropy a few positions at a time.

`F.cross_entropy` of float32 logits writes the logits again in float32, their log-softmax and the gradient of
that, each as large as the logits, which are the largest tensor of a step. Here a *piece* of the positions is
converted, used and forgotten while it is still in the cache; what stays is one number a position.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum"]

_CPU_PIECE_BYTES = 1 << 20  # in float32; the second-level cache of one core
_PIECE_BYTES = 1 << 28  # elsewhere: large enough that launching kernels costs nothing


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    """F.cross_entropy of logits [..., V] in float32 and targets (int64 [...]): a float32 scalar.

    The logits may have any dtype, and need no `.float()`: of memory it takes them and their gradient in that
    dtype, and a piece of 256 MiB or less; torch's takes 12 bytes for each logit. Targets that are
    `ignore_index` do not count; the mean over none at all is nan. Can be differentiated once. ValueError for
    targets of another shape and for another reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {list(targets.shape)}; logits has shape {list(logits.shape)}")
    nats = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index)
    return nats / (targets != ignore_index).sum() if reduction == "mean" else nats


def summed_cross_entropy(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """The sum over all targets but `ignore`: a float32 scalar, computed in float32 whatever the logits are.

    logits [N, V]; targets int64 [N]. Can be differentiated once.
    """
    if torch.compiler.is_compiling():  # its own fused kernel is better than a loop it would unroll
        return F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction="sum")
    return cast(Tensor, _Pieces.apply(logits, targets, ignore))  # type: ignore[no-untyped-call]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
        kept = targets != ignore
        targets = targets.where(kept, 0)
        totals = torch.empty(len(targets), dtype=torch.float32, device=logits.device)  # log-sum-exp of each
        for piece in _pieces(logits):
            totals[piece] = logits[piece].float().logsumexp(-1)
        ctx.save_for_backward(logits, targets, kept, totals)
        chosen = logits.gather(1, targets[:, None])[:, 0]
        return (totals - chosen).where(kept, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: what follows would silently count as a constant
            raise RuntimeError("this cross-entropy can be differentiated once; F.cross_entropy more often")
        logits, targets, kept, totals = ctx.saved_tensors
        scale = gradient * kept
        result = torch.empty_like(logits)
        for piece in _pieces(logits):
            # Float32 until the last line: in fp16 a gradient that is not yet scaled would be zero.
            softmax = (logits[piece] - totals[piece, None]).exp_()
            rows = torch.arange(len(softmax), device=softmax.device)
            softmax[rows, targets[piece]] -= 1
            result[piece] = softmax.mul_(scale[piece, None])
            del softmax  # or it would lie beside the next piece's
        return result, None, None


def _pieces(logits: Tensor) -> list[slice]:
    piece_bytes = _CPU_PIECE_BYTES if logits.device.type == "cpu" else _PIECE_BYTES
    rows = max(1, piece_bytes // (4 * logits.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
