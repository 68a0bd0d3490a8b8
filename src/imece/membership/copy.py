"""A copy of what one rank alone holds, in memory that outlives the rank.

    piece   what a rank holds of one tensor: its elements from `start` on, flat
    slot    all pieces of a rank as of one finished step; two slots are written in turn
    still   pieces that no step changes, parts of frozen parameters: they are written once
    copy    one rank's segment: a table of its pieces, the step of each slot, the two slots, the still pieces
    asks    the step after which the rank's pieces no longer fitted the table: it wants a new copy

A segment is freed when the last process that maps it has ended. So when a rank is dead, the others can still
read what it has written into its copy.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from imece.checkpoint.deal import Slice
from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.segment import Segment
from imece.errors import CollectiveError
from imece.membership.pieces import DTYPES, Pieces

Held = Mapping[str, Tensor | Slice]

_WORDS = 6  # bytes of the table and of a slot, the step of each slot, `asks`, bytes of the still pieces
_NONE = -1  # the step of a slot that is not whole, and of a rank that asks for nothing
_ALIGN = 64  # bytes


@dataclass(frozen=True)
class Piece:
    """One piece: where it lies, in a slot or (if still) behind both, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    offset: int  # bytes; still from `Copy.slot_bytes` on


class Copy:
    """One rank's copy, its own or another's."""

    def __init__(self, memory: Segment) -> None:
        self.memory = memory
        self._words = memory.memory[: 8 * _WORDS].view(torch.int64)
        table_bytes, self.slot_bytes, self.still_bytes = self._words[[0, 1, 5]].tolist()
        self.raw_table = memory.memory[8 * _WORDS : 8 * _WORDS + table_bytes].numpy().tobytes()
        """The table for another process; see `table_of`."""
        self._table = table_of(self.raw_table)
        first = _aligned(8 * _WORDS + table_bytes)
        self._flats = [memory.memory[first + at * self.slot_bytes :][: self.slot_bytes] for at in range(2)]
        self._behind = memory.memory[first + 2 * self.slot_bytes :][: self.still_bytes]
        self._slots = [
            [
                self.span(at, piece.offset, piece.numel * piece.dtype.itemsize).view(piece.dtype)
                for piece in self._table
            ]
            for at in range(2)
        ]
        self._still: list[tuple[Tensor, int]] = []  # each with how often it was written when it was copied
        self._moving = len(self._table)  # number of the first pieces, which move; the others are still
        self._held: Held | None = None  # the last state written, and where it came from
        self._sources: list[Tensor] = []
        self._is_pinned = False

    @classmethod
    def of(cls, held: Held, still: Held = MappingProxyType({})) -> Copy:
        """A new copy with room for these. still: what no step changes; it is written now.

        UserError if the host has too little memory.
        """
        table, end, ends = [], 0, []
        for values in (held, still):
            for name, value in values.items():
                of = Slice.of(value)
                table.append([name, str(of.tensor.dtype), of.shape, of.start, of.tensor.numel(), end])
                end = _aligned(end + of.tensor.nbytes)
            ends.append(end)
        made = cls.blank(json.dumps(table).encode(), ends[0], end - ends[0], populate=True)
        if any(Slice.of(value).tensor.is_cuda for value in (*held.values(), *still.values())):
            made.pin()
        made._moving = len(held)
        for value, target in zip(still.values(), made._slots[0][len(held) :], strict=True):
            tensor = Slice.of(value).tensor
            made._still.append((tensor, tensor._version))
            target.copy_(tensor.reshape(-1))
        return made

    @classmethod
    def blank(
        cls, raw_table: bytes, slot_bytes: int, still_bytes: int = 0, *, populate: bool = False
    ) -> Copy:
        """A new copy without a complete slot. Parts that are never written take no memory, unless `populate`.

        UserError if the host has too little memory.
        """
        nbytes = _aligned(8 * _WORDS + len(raw_table)) + 2 * slot_bytes + still_bytes
        memory = segment.create(nbytes, "a copy of this rank's part in memory", populate=populate)
        words = torch.tensor([len(raw_table), slot_bytes, _NONE, _NONE, _NONE, still_bytes], device="cpu")
        memory.memory[: 8 * _WORDS].view(torch.int64)[:] = words
        raw = torch.frombuffer(bytearray(raw_table), dtype=torch.uint8)
        memory.memory[8 * _WORDS :][: len(raw_table)] = raw
        return cls(memory)

    @classmethod
    def at(cls, pid: int, fd: int, serial: int, *, keep: bool) -> Copy:
        """The copy that a process of this host has mapped. keep: others can still map it from here later."""
        try:
            return cls(segment.attach(pid, fd, serial, keep=keep))
        except (OSError, ValueError) as error:
            raise CollectiveError(f"the copy that process {pid} offers cannot be read: {error}") from None

    @property
    def steps(self) -> set[int]:
        """The steps of its complete slots."""
        return {step for step in self._words[2:4].tolist() if step != _NONE}

    @property
    def asks(self) -> float:
        """The step after which its rank could not write into it; math.inf if it always could."""
        step = int(self._words[4])
        return math.inf if step == _NONE else step

    @torch.no_grad()
    def write(self, step: int, held: Held) -> bool:
        """Write `held`, as of `step` finished steps, over the slot of two steps before.

        False if these are not the tensors that the copy was made for, or if a still piece was written into;
        then its rank asks for a new copy.
        """
        if any(tensor._version != written for tensor, written in self._still):
            self._words[4] = step
            return False
        if held is not self._held:
            sources = [Slice.of(value).tensor.reshape(-1) for value in held.values()]
            kinds = [(name, source.dtype, len(source)) for name, source in zip(held, sources, strict=True)]
            moving = self._table[: self._moving]
            if kinds != [(piece.name, piece.dtype, piece.numel) for piece in moving]:
                self._words[4] = step
                return False
            self._held, self._sources = held, sources
        slot = step % 2
        targets = self._slots[slot][: self._moving]
        self._words[2 + slot] = _NONE
        if all(source.is_cpu for source in self._sources):
            # numpy copies bytes in half the time of torch's loops over elements.
            for target, source in zip(targets, self._sources, strict=True):
                np.copyto(_bytes(target), _bytes(source))
        else:
            for target, source in zip(targets, self._sources, strict=True):
                target.copy_(source, non_blocking=True)
            for device in {source.device for source in self._sources if not source.is_cpu}:
                torch.accelerator.current_stream(device).synchronize()
        self._words[2 + slot] = step
        return True

    def forget(self) -> None:
        """Let go of the tensors written last."""
        self._held, self._sources, self._still = None, [], []

    def pin(self) -> None:
        """Let a GPU write into it directly, several times as fast as through a buffer of CUDA's;
        until `close`.

        Does nothing if the system does not allow locking so much memory.
        """
        where = self.memory.address, self.memory.nbytes, 0
        self._is_pinned = int(torch.cuda.cudart().cudaHostRegister(*where)) == 0
        if not self._is_pinned:
            with contextlib.suppress(RuntimeError):  # or the next CUDA call would raise this error
                torch.zeros(1, device="cuda")

    def close(self) -> None:
        """Close the file descriptor. The memory itself goes with the last tensor on it."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.address)
        self.memory.close()

    def span(self, step: int, low: int, nbytes: int) -> Tensor:
        """Bytes from `low` on of the slot of `step` finished steps, or behind it: the copy's own memory."""
        if low < self.slot_bytes:
            return self._flats[step % 2][low : low + nbytes]
        return self._behind[low - self.slot_bytes :][:nbytes]

    def complete(self, step: int) -> None:
        """The slot of `step` finished steps, and what is behind it, was written through `span`."""
        self._words[2 + step % 2] = step

    def read(self, step: int, into: Pieces) -> None:
        """Add its pieces of `step` finished steps to `into`, without copying them."""
        for piece, flat in zip(self._table, self._slots[step % 2], strict=True):
            into.add(piece.name, piece.shape, piece.start, flat)


def table_of(raw: bytes) -> list[Piece]:
    """The pieces of a copy, from its `raw_table`."""
    return [
        Piece(name, DTYPES[dtype], tuple(shape), start, numel, offset)
        for name, dtype, shape, start, numel, offset in json.loads(raw)
    ]


def _bytes(flat: Tensor) -> np.ndarray:
    return flat.view(torch.uint8).numpy()


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN) * _ALIGN
