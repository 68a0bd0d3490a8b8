"""Small collectives: the data travels with the announcement, one step in all.

What repeats with every call of a kind (fingerprint, views of the slots) is made once and kept: making it
would take longer than moving 1 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from imece.collectives.fingerprint import pack
from imece.collectives.shared_memory.arithmetic import Reduction
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.waiting import Steps

REDUCED_BYTES = 16 * 1024  # up to here every rank sums everything: cheaper than a second step
EXCHANGED_BYTES = 32 * 1024

Tensor = torch.Tensor


class Small:
    """One kind of small collective; this class itself is a barrier.

    A call is `begin`, then waiting until all ranks have begun, then `end`.
    """

    def __init__(
        self,
        engine: Engine,
        op: str,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] = (),
        reduce_op: str = "",
        root: int = -1,
        way: str = "",
    ) -> None:
        """dtype, shape: of the tensor that this rank sends here, or that travels another `way`."""
        numel = math.prod(shape) if dtype is not None else 0
        self.engine, self.op, self.dtype, self.shape = engine, op, dtype, tuple(shape)
        self.reduce_op, self.root, self.numel, self.way = reduce_op, root, numel, way
        self.fingerprint = pack(op, reduce_op, dtype, numel, root)
        self.shape_word = engine.shape_word(self.fingerprint, self.shape, way)
        self.slot = 0
        nbytes = numel * dtype.itemsize if dtype is not None else 0
        self.sent: list[list[Tensor]] = [
            [each[:nbytes].view(dtype) for each in ranks] if dtype is not None and not way else []
            for ranks in engine.board.slots
        ]  # [slot][rank], each [numel]

    def begin(self, source: Tensor | None, label: str) -> None:
        """Send `source`, [numel], and announce the call."""
        engine = self.engine
        engine.shape, engine.label, engine.way = self.shape, label, self.way
        self.slot = slot = engine.next_slot()
        if source is not None:
            self.sent[slot][engine.rank].copy_(source)
        engine.enter(self.fingerprint, shape_word=self.shape_word)

    def end(self, target: Tensor | None) -> None:
        """Take what this rank wants out of what all ranks sent."""

    def steps(self, source: Tensor | None, target: Tensor | None, label: str = "") -> Steps:
        """The whole call."""
        self.begin(source, label)
        yield from self.engine.entered(self.fingerprint)
        self.end(target)


class SmallReduce(Small):
    """Reductions: every rank sums what it wants, all in the same order."""

    def __init__(self, engine: Engine, op: str, how: Reduction, shape: Sequence[int], root: int) -> None:
        super().__init__(engine, op, how.dtype, shape, how.op, root)
        self.how, self.scratch = how, engine.scratch
        self.wanted = root in (-1, engine.rank)
        self.parts = self.sent
        if op == "reduce_scatter":
            length = self.numel // engine.world_size
            start = engine.rank * length
            self.parts = [[each[start : start + length] for each in ranks] for ranks in self.sent]

    def end(self, target: Tensor | None) -> None:
        if self.wanted:
            assert target is not None
            self.how(self.parts[self.slot], target, self.scratch, True)


class SmallGather(Small):
    """All-gather into one tensor."""

    def end(self, target: Tensor | None) -> None:
        torch.cat(self.sent[self.slot], out=target)


class SmallBroadcast(Small):
    """Broadcast: only the root sends."""

    def begin(self, source: Tensor | None, label: str) -> None:
        super().begin(source if self.root == self.engine.rank else None, label)

    def end(self, target: Tensor | None) -> None:
        if self.root != self.engine.rank:
            assert target is not None
            target.copy_(self.sent[self.slot][self.root])
