"""`shared_empty`: tensors that live in memory which every rank of the host can map.

Collectives on such tensors need no staging copy: a rank reads the others' data where it lies.
Blocks are cut from arenas (segments of this process), first fit; a block goes back when the last
tensor on it is gone, an arena when its last block is.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.segment import Segment

_ALIGN_BYTES = 4096  # a page: blocks of different tensors never share a cache line or a page
_ARENA_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor lies, in terms that another process understands."""

    fd: int
    serial: int
    offset_bytes: int  # in the payload of the segment


class _Arena:
    """One segment and the holes in it."""

    def __init__(self, nbytes: int) -> None:
        self.segment: Segment = segment.create(nbytes, "a shared tensor", populate=True)
        self.holes: list[tuple[int, int]] = [(0, nbytes)]  # (start, stop), sorted, never touching

    def take(self, nbytes: int) -> int | None:
        """Offset of a block of `nbytes`, or None when no hole is large enough."""
        for at, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[at : at + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, stop: int) -> bool:
        """Take a block back; True when the whole arena is free."""
        at = bisect_right(self.holes, (start, stop))
        if at < len(self.holes) and self.holes[at][0] == stop:
            stop = self.holes.pop(at)[1]
        if at and self.holes[at - 1][1] == start:
            at -= 1
            start = self.holes.pop(at)[0]
        self.holes.insert(at, (start, stop))
        return self.holes == [(0, self.segment.nbytes)]


class Arenas:
    """All arenas of this process. Safe to use from several threads."""

    def __init__(self) -> None:
        # Re-entrant: a tensor's finalizer may run in the middle of an allocation of the same thread.
        self._lock = threading.RLock()
        self._arenas: list[_Arena] = []  # sorted by address
        self._starts: list[int] = []  # address of each arena
        self.freed = 0  # arenas given back so far; peers drop their mappings when it moves

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised tensor of `shape` in shared memory."""
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative dimension")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        taken = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            arena, start = self._find(taken)
        # numpy's array is the owner that torch keeps alive: its end is the end of the last view.
        block = arena.segment.memory[start : start + nbytes].numpy()
        weakref.finalize(block, self._release, arena, start, start + taken).atexit = False
        return torch.from_numpy(block).view(dtype).view(tuple(shape))

    def locate(self, address: int, nbytes: int) -> Location | None:
        """Where these bytes of this process lie in shared memory; None for ordinary memory."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        owner = self._arenas[at].segment
        offset = address - self._starts[at]
        return Location(owner.fd, owner.serial, offset) if offset + nbytes <= owner.nbytes else None

    def memory(self, serial: int) -> torch.Tensor:
        """Payload of one of the arenas, uint8[nbytes]."""
        return next(each.segment.memory for each in self._arenas if each.segment.serial == serial)

    def _find(self, nbytes: int) -> tuple[_Arena, int]:
        for arena in self._arenas:
            start = arena.take(nbytes)
            if start is not None:
                return arena, start
        arena = _Arena(max(nbytes, _ARENA_BYTES))
        at = bisect_right(self._starts, arena.segment.address)
        self._arenas.insert(at, arena)
        self._starts.insert(at, arena.segment.address)
        first = arena.take(nbytes)
        assert first == 0
        return arena, first

    def _release(self, arena: _Arena, start: int, stop: int) -> None:
        with self._lock:
            if arena.give(start, stop):
                at = self._arenas.index(arena)
                del self._arenas[at], self._starts[at]
                arena.segment.close()
                self.freed += 1


ARENAS = Arenas()


def shared_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialised CPU tensor that lives in memory shared with the other ranks of this host.

    Args:
        shape: of the tensor; an int is one dimension.
        dtype: any dtype of torch.

    Returns:
        contiguous tensor of `shape`, page aligned. It is an ordinary tensor in every other respect;
        views of it are shared too, results of operations on it are not.

    Raises:
        ValueError: a dimension is negative.
        UserError: the host or the container has too little memory; the message names both sizes.
    """
    return ARENAS.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)
