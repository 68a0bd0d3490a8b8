"""The limit: the bytes of an operation, moved by plain torch operations without waiting.

Every rank owns one slice of the result. It reads that slice from all tensors that hold a part of it and
writes it to all that need it, in chunks that stay in cache between reading and writing. Nobody waits for
anybody, so no collective on shared tensors made of these operations can be faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from imece.bench.collectives.contenders import numel_of
from imece.collectives.shared_memory import segment

CHUNKS_BYTES = (64 * 2**10, 256 * 2**10, 2**20)
"""Chunk sizes per tensor; the fastest is the limit."""


class Limit:
    """One rank's share of the plain copies and sums, on one tensor of each rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._own: segment.Segment | None = None
        self._tensors: list[torch.Tensor] = []  # fp32[numel] of each rank
        self._op = ""

    def offer(self, op: str, size_bytes: int) -> tuple[int, int]:
        """Allocate this rank's tensor; returns the file descriptor and serial with which other ranks map
        it."""
        self.release()
        self._op = op
        nbytes = 4 * numel_of(size_bytes, self.world_size)
        self._own = segment.create(nbytes, "the benchmark's tensor", populate=True)
        self._own.memory.zero_()
        return self._own.fd, self._own.serial

    def attach(self, offers: list[tuple[int, int, int]]) -> None:
        """Map the tensors of all ranks: (pid, fd, serial) for each."""
        assert self._own is not None
        for rank, (pid, fd, serial) in enumerate(offers):
            mapped = self._own if rank == self.rank else segment.attach(pid, fd, serial, populate=True)
            self._tensors.append(mapped.memory.view(torch.float32))

    def release(self) -> None:
        """Unmap everything."""
        self._tensors.clear()
        if self._own is not None:
            self._own.close()
            self._own = None

    def bind(self, chunk_bytes: int) -> Callable[[], None]:
        """The work of one operation, ready to be called many times."""
        count = self.world_size
        numel = self._tensors[0].numel()
        part = numel // count
        start, stop = self.rank * part, (self.rank + 1) * part
        mine = self._tensors[self.rank]
        others = [tensor for rank, tensor in enumerate(self._tensors) if rank != self.rank]
        root, leaves = self._tensors[0], self._tensors[1:]
        sources, targets = {
            "all_reduce": ([mine, *others], others),
            "reduce_scatter": ([mine, *others], []),
            "all_gather": ([mine], others),
            "broadcast": ([root], leaves),
        }[self._op]
        step = chunk_bytes // 4
        pieces = [
            ([tensor[at : min(at + step, stop)] for tensor in sources],
             [tensor[at : min(at + step, stop)] for tensor in targets])
            for at in range(start, stop, step)
        ]  # fmt: skip
        # all_gather's own part moves from the input to the rank's own output, as in the operation itself.
        # Written now, because untouched pages all read as the same page of zeros, from the cache.
        scratch = torch.ones(part) if self._op in ("all_gather", "reduce_scatter") else None

        def work() -> None:
            for at, (reads, writes) in enumerate(pieces):
                total = reads[0]
                if scratch is not None and self._op == "all_gather":
                    total.copy_(scratch[at * step : at * step + total.numel()])
                if len(reads) > 1:
                    out = total if scratch is None else scratch[at * step : at * step + total.numel()]
                    torch.add(total, reads[1], out=out)
                    for more in reads[2:]:
                        out.add_(more)
                for target in writes:
                    target.copy_(total)

        return work
