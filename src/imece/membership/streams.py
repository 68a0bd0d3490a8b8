"""Sends a copy's slot to other hosts: broadcast in chunks, of which each rank keeps what it needs.

So a rank never has more in memory than its own part and one chunk, however large the whole is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.membership.copy import Copy, Piece, table_of
from imece.membership.pieces import Pieces

CHUNK_BYTES = 64 * 2**20
NeededOf = Callable[[str, tuple[int, ...]], tuple[int, int]]
"""(name, whole shape) -> the elements [start, stop) of this tensor that a rank needs."""


class Stream:
    """One copy as of one step, from the rank that holds it to all of a group; all construct it together."""

    def __init__(
        self, copy: Copy | None, root: int, group: dist.ProcessGroup, device: torch.device, label: str
    ) -> None:
        """copy: on rank `root`, None elsewhere. device: on which the group moves tensors."""
        self._copy, self._root, self._group, self._device, self._label = copy, root, group, device, label
        sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
        if copy is not None:
            sizes = torch.tensor([len(copy.raw_table), copy.slot_bytes, copy.still_bytes], device="cpu")
        table_bytes, self.slot_bytes, self.still_bytes = self._broadcast(sizes).tolist()
        table = torch.empty(table_bytes, dtype=torch.uint8, device="cpu")
        if copy is not None:
            table = torch.frombuffer(bytearray(copy.raw_table), dtype=torch.uint8)
        self.raw_table = self._broadcast(table).numpy().tobytes()

    def chunks(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """(first byte, in the slot or behind it, and the bytes) of each chunk, in order; all ranks go
        through them."""
        most = min(CHUNK_BYTES, max(self.slot_bytes, self.still_bytes))
        buffer = torch.empty(most, dtype=torch.uint8, device=self._device)
        end = self.slot_bytes + self.still_bytes
        for first, stop in ((0, self.slot_bytes), (self.slot_bytes, end)):
            for low in range(first, stop, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, stop - low)]
                if self._copy is not None:
                    chunk.copy_(self._copy.span(step, low, len(chunk)))
                ops.broadcast(chunk, self._root, group=self._group, label=self._label)
                yield low, chunk

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """On the CPU if possible: what an aborted call leaves on a GPU is no number, and no table."""
        moved = tensor.to(host_device(self._group, self._device))
        ops.broadcast(moved, self._root, group=self._group, label=self._label)
        return moved.cpu()


@dataclass
class _Wanted:
    """What a rank keeps of one piece."""

    piece: Piece
    start: int  # of the whole tensor
    flat: Tensor  # [numel wanted], filled chunk by chunk

    def take(self, low: int, chunk: Tensor) -> None:
        """Take this piece's bytes out of a chunk that starts at byte `low` of the slot."""
        size = self.piece.dtype.itemsize
        begin = self.piece.offset + (self.start - self.piece.start) * size  # bytes in the slot
        first, last = max(begin, low), min(begin + self.flat.nbytes, low + len(chunk))
        if first < last:
            source = chunk[first - low : last - low].view(self.piece.dtype)
            self.flat[(first - begin) // size : (last - begin) // size].copy_(source)


@dataclass
class Receiver:
    """Takes from a stream what this rank needs."""

    stream: Stream
    needs: NeededOf | None  # None: everything
    _wanted: list[_Wanted] = field(default_factory=list)

    def __post_init__(self) -> None:
        for piece in table_of(self.stream.raw_table):
            start, stop = piece.start, piece.start + piece.numel
            if self.needs is not None:
                low, high = self.needs(piece.name, piece.shape)
                start, stop = max(start, low), min(stop, high)
            numel = max(0, stop - start)
            self._wanted.append(_Wanted(piece, start, torch.empty(numel, dtype=piece.dtype, device="cpu")))

    def take(self, low: int, chunk: Tensor) -> None:
        """One chunk."""
        for wanted in self._wanted:
            wanted.take(low, chunk)

    def give(self, into: Pieces) -> None:
        """All has come. Tensors of which nothing was needed are known by name and shape."""
        for wanted in self._wanted:
            into.add(wanted.piece.name, wanted.piece.shape, wanted.start, wanted.flat)
