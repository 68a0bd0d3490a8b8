"""Exact attention over sequences whose parts lie on several ranks: Ring Attention (Liu et al., 2023).

    turn     each rank computes with the keys and values that it holds, while they travel to its neighbour;
             after as many turns as ranks every rank has seen all keys
    block    what one turn computes: this rank's queries with one rank's keys
    out, lse a softmax over the keys seen so far, and the logarithm of its denominator, with which it is
             merged with a softmax over other keys

Backward goes round once more. The gradients of keys and values travel along, one turn behind, so that a
message of each kind is under way while a block is computed. After the last turn they are back on their own
rank.

With causal attention a sequence is cut into twice as many stretches as there are ranks, and rank r has the
r-th from the beginning and the r-th from the end. Then every block but a rank's own is half visible and half
hidden, the hidden half is not computed, and all ranks have the same work:

    keys of a rank before    all queries see the first stretch, none sees the second
    keys of a rank behind    the second stretch of queries sees all, the first sees none
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from imece.collectives.ops import Pending, Recv, Send, exchange
from imece.model_parallel.kernels import attend, attend_backward

_KEYS, _GRADIENTS = 0, 1  # tags of messages
_ALL = slice(None)


def positions_of(rank: int, ranks: int, length: int) -> Tensor:
    """The positions of a rank, of `length` (a multiple of 2 `ranks`): int64 [length / ranks], ascending."""
    stretches = torch.arange(length, device="cpu").view(2 * ranks, -1)
    return stretches[[rank, 2 * ranks - 1 - rank]].flatten()


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool, scale: float
) -> Tensor:
    """Softmax attention of this rank's queries to the keys and values of all ranks of the group.

    q [B, heads, T, width]; k, v [B, kv_heads, T, width], heads a multiple of kv_heads. T: positions of each
    rank; with `causal` they are those of `positions_of`.
    Returns the shape and dtype of q, merged and summed in fp32 (of fp64: in fp64). All ranks call this, and
    backward through it. Can be differentiated once. Bytes that a rank sends: (N-1) M in forward and (N-1) M +
    N M32 in backward, where M is the size of k and v together and M32 that in fp32.
    """
    return cast(Tensor, _Attention.apply(q, k, v, group, causal, scale))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, causal: bool, scale: float
    ) -> Tensor:
        ring = _Ring(group, causal, q.shape[2])
        kv = torch.stack((k, v))  # [2, B, kv_heads, T, width]: one message
        out = lse = torch.empty(0, device="cpu")
        for source, (keys, values) in ring.turns(kv):
            rows, seen, diagonal = ring.block(source)
            part, part_lse = attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen], diagonal, scale)
            if source == ring.rank:  # the first turn, which covers all rows
                out, lse = part.to(_wide(q)), part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        d_q = torch.zeros_like(q, dtype=_wide(q))
        travelling = _Travelling(ring, kv, _wide(q))
        for source, (keys, values) in ring.turns(kv):
            rows, seen, diagonal = ring.block(source)
            part_q, *parts = attend_backward(
                gradient[:, :, rows], q[:, :, rows], keys[:, :, seen], values[:, :, seen],
                out[:, :, rows], lse[:, :, rows], diagonal, ctx.scale,
            )  # fmt: skip
            d_q[:, :, rows] += part_q
            for sums, part in zip(travelling.arrived(), parts, strict=True):
                sums[:, :, seen] += part
            travelling.hand_on()
        d_k, d_v = travelling.arrived().to(kv.dtype)
        return d_q.to(q.dtype), d_k, d_v, None, None, None


class _Ring:
    """The ranks in a circle, and which queries see which keys."""

    def __init__(self, group: dist.ProcessGroup, causal: bool, positions: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._causal, self._half = causal, positions // 2

    def turns(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(source rank, its keys and values) for every rank, this one first."""
        for turn in range(self.size):
            arriving = None
            if turn < self.size - 1:
                arriving = torch.empty_like(kv)
                under_way = self.hand_on(kv, arriving, _KEYS)
            yield (self.rank - turn) % self.size, kv
            if arriving is not None:
                under_way.wait()
                kv = arriving

    def hand_on(self, tensor: Tensor, arriving: Tensor, tag: int) -> Pending[None]:
        """Send `tensor` to the next rank and receive `arriving` from the previous one."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages: list[Send | Recv] = [Send(tensor, after, tag), Recv(arriving, before, tag)]
        label = ("keys and values", "gradients of keys and values")[tag]
        return exchange(messages, group=self.group, async_op=True, label=label)

    def block(self, source: int) -> tuple[slice, slice, bool]:
        """(this rank's queries, the source rank's keys that they see, whether a query sees only keys up to
        its own position)."""
        if not self._causal or source == self.rank:
            return _ALL, _ALL, self._causal
        if source < self.rank:
            return _ALL, slice(self._half), False
        return slice(self._half, None), _ALL, False


class _Travelling:
    """The gradients of the keys and values that this rank now holds, summed over all ranks that they have
    passed."""

    def __init__(self, ring: _Ring, kv: Tensor, dtype: torch.dtype) -> None:
        self._ring = ring
        self._sums = torch.zeros_like(kv, dtype=dtype)
        self._arriving: Tensor | None = None
        self._under_way: Pending[None] | None = None

    def arrived(self) -> Tensor:
        """The gradients of the current turn, which this rank adds to."""
        if self._under_way is not None:
            self._under_way.wait()
            assert self._arriving is not None
            self._sums, self._arriving, self._under_way = self._arriving, self._sums, None
        return self._sums

    def hand_on(self) -> None:
        if self._arriving is None:
            self._arriving = torch.empty_like(self._sums)
        self._under_way = self._ring.hand_on(self._sums, self._arriving, _GRADIENTS)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `part` into `out` in place: the softmax over the keys of both."""
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part.to(out.dtype), share[..., None].to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
