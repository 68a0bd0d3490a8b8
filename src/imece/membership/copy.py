"""A second copy of what one rank alone holds, in memory that outlives the rank.

    piece   what a rank holds of one tensor: elements from `start` on of it, flat
    slot    all pieces of a rank as they were after one finished step; there are two, written by turns
    still   pieces that no step changes, parts of frozen parameters: they are written once
    copy    one rank's segment: a table of its pieces, the step of each slot, the two slots, what is still
    asks    the step after which its pieces were no longer those of the table: its rank wants a new one

A segment is freed when the last process that maps it has ended: what a rank has written into its copy, the
others can read when it is dead.
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

_WORDS = 6  # int64: bytes of the table and of a slot, the steps of both slots and of `asks`, bytes still
_NONE = -1  # the step of a slot that is not whole, and of a rank that asks for nothing
_ALIGN = 64  # bytes


@dataclass(frozen=True)
class Piece:
    """Where it lies in a slot, or behind it if it is still, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    offset: int  # bytes; from `Copy.slot_bytes` on it is still


class Copy:
    """One rank's copy, its own or another's."""

    def __init__(self, memory: Segment) -> None:
        self.memory = memory
        self._words = memory.memory[: 8 * _WORDS].view(torch.int64)
        table_bytes, self.slot_bytes, self.still_bytes = self._words[[0, 1, 5]].tolist()
        self.raw_table = memory.memory[8 * _WORDS : 8 * _WORDS + table_bytes].numpy().tobytes()
        """For another process, see `table_of`."""
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
        self._still: list[tuple[Tensor, int]] = []  # with how often each was written, when it was copied
        self._moving = len(self._table)  # its first pieces: the others are still
        self._held: Held | None = None  # what was written last, and whence
        self._sources: list[Tensor] = []
        self._is_pinned = False

    @classmethod
    def of(cls, held: Held, still: Held = MappingProxyType({})) -> Copy:
        """A new one with room for these. still: what no step changes, which is in it then.

        UserError where the host has too little memory.
        """
        table, end, ends = [], 0, []
        for values in (held, still):
            for name, value in values.items():
                tensor, shape, start = _parts(value)
                table.append([name, str(tensor.dtype), shape, start, tensor.numel(), end])
                end = _aligned(end + tensor.nbytes)
            ends.append(end)
        made = cls.blank(json.dumps(table).encode(), ends[0], end - ends[0], populate=True)
        if any(_parts(value)[0].is_cuda for value in (*held.values(), *still.values())):
            made.pin()
        made._moving = len(held)
        for value, target in zip(still.values(), made._slots[0][len(held) :], strict=True):
            tensor = _parts(value)[0]
            made._still.append((tensor, tensor._version))
            target.copy_(tensor.reshape(-1))
        return made

    @classmethod
    def blank(
        cls, raw_table: bytes, slot_bytes: int, still_bytes: int = 0, *, populate: bool = False
    ) -> Copy:
        """A new one without a whole slot. What is never written of it takes no memory, unless `populate`.

        UserError where the host has too little memory.
        """
        nbytes = _aligned(8 * _WORDS + len(raw_table)) + 2 * slot_bytes + still_bytes
        memory = segment.create(nbytes, "a copy of this rank's part in memory", populate=populate)
        words = torch.tensor([len(raw_table), slot_bytes, _NONE, _NONE, _NONE, still_bytes])
        memory.memory[: 8 * _WORDS].view(torch.int64)[:] = words
        raw = torch.frombuffer(bytearray(raw_table), dtype=torch.uint8)
        memory.memory[8 * _WORDS :][: len(raw_table)] = raw
        return cls(memory)

    @classmethod
    def at(cls, pid: int, fd: int, serial: int, *, keep: bool) -> Copy:
        """The one that a process of this host has mapped; keep: so that others can map it here later."""
        try:
            return cls(segment.attach(pid, fd, serial, keep=keep))
        except (OSError, ValueError) as error:
            raise CollectiveError(f"the copy that process {pid} offers cannot be read: {error}") from None

    @property
    def steps(self) -> set[int]:
        """Of which it has a whole slot."""
        return {step for step in self._words[2:4].tolist() if step != _NONE}

    @property
    def asks(self) -> float:
        """The step after which its rank could not write into it; math.inf if it always could."""
        step = int(self._words[4])
        return math.inf if step == _NONE else step

    @torch.no_grad()
    def write(self, step: int, held: Held) -> bool:
        """These, as of `step` finished steps, in place of what was there two steps before.

        False, and its rank asks for a new one, if they are not the tensors that this one was made for, or
        what should be still has been written into.
        """
        if any(tensor._version != written for tensor, written in self._still):
            self._words[4] = step
            return False
        if held is not self._held:
            sources = [_parts(value)[0].reshape(-1) for value in held.values()]
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
            # By numpy, in bytes: half the time of torch's loops over elements.
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
        """Do not hold what was written last."""
        self._held, self._sources, self._still = None, [], []

    def pin(self) -> None:
        """Let a GPU write it by itself, several times as fast as through a buffer of CUDA's; until `close`.

        It remains as it is where the system does not allow to lock so much memory.
        """
        where = self.memory.address, self.memory.nbytes, 0
        self._is_pinned = int(torch.cuda.cudart().cudaHostRegister(*where)) == 0
        if not self._is_pinned:
            with contextlib.suppress(RuntimeError):  # or whatever runs next would raise this error
                torch.zeros(1, device="cuda")

    def close(self) -> None:
        """Give the file descriptor back. The memory itself goes when the last tensor on it does."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.address)
        self.memory.close()

    def span(self, step: int, low: int, nbytes: int) -> Tensor:
        """Bytes from `low` on of the slot of `step` finished steps, or behind it: this copy's own memory."""
        if low < self.slot_bytes:
            return self._flats[step % 2][low : low + nbytes]
        return self._behind[low - self.slot_bytes :][:nbytes]

    def is_whole(self, step: int) -> None:
        """The slot of `step` finished steps was written through `span`, and what is behind it."""
        self._words[2 + step % 2] = step

    def read(self, step: int, into: Pieces) -> None:
        """Add what it has of `step` finished steps; the memory stays this copy's."""
        for piece, flat in zip(self._table, self._slots[step % 2], strict=True):
            into.add(piece.name, piece.shape, piece.start, flat)


def table_of(raw: bytes) -> list[Piece]:
    """The pieces of a copy, from `Copy.raw_table`."""
    return [
        Piece(name, DTYPES[dtype], tuple(shape), start, numel, offset)
        for name, dtype, shape, start, numel, offset in json.loads(raw)
    ]


def _parts(value: Tensor | Slice) -> tuple[Tensor, tuple[int, ...], int]:
    """(what there is of it, the whole shape, its first element)."""
    if isinstance(value, Slice):
        return value.tensor, value.shape, value.start
    return value, tuple(value.shape), 0


def _bytes(flat: Tensor) -> np.ndarray:
    return flat.view(torch.uint8).numpy()


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN) * _ALIGN
