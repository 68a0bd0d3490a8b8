"""`shared_empty`: tensors in memory that every rank of the host can map.

Collectives on such tensors need no staging copy: a rank reads the others' data where it lies. Blocks are cut
from arenas (segments of this process), first fit; a block goes back when the last tensor on it is gone. An
arena whose last block is gone is kept as a spare for the next tensor, since making one (and mapping it in
every rank) costs more than most collectives on it. Beyond 128 MiB of spares, the oldest go back to the
system.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.segment import Segment
from imece.errors import UserError

_ALIGN_BYTES = 4096  # a page: blocks of different tensors never share a cache line or a page
_ARENA_BYTES = 16 * 2**20
_SPARE_BYTES = 128 * 2**20
_MAP_NORESERVE = 0x4000  # the module mmap lacks both of these, and mremap
_MREMAP_MAYMOVE_FIXED = 1 | 2
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None)  # before any fork: not in a child whose parent had threads


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor lies, in terms that another process understands."""

    fd: int
    serial: int
    offset_bytes: int  # in the payload of the segment


class _Arena:
    """One segment and the holes in it."""

    def __init__(self, nbytes: int) -> None:
        self.segment: Segment = segment.create(nbytes, "a shared tensor")
        self.holes: list[tuple[int, int]] = [(0, nbytes)]  # (start, stop), sorted, never touching

    def take(self, nbytes: int) -> int | None:
        """Offset of a block of `nbytes`, or None when no hole is large enough."""
        for at, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[at : at + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                self.segment.populate(start, start + nbytes)
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
        self._lock = threading.Lock()
        self._in_use: list[_Arena] = []
        self._spares: list[_Arena] = []  # arenas without a block, the oldest first
        self._by_address: tuple[list[int], list[Segment]] = [], []  # replaced as one: readers take no lock
        self._returned: deque[tuple[_Arena, int, int]] = deque()  # blocks for `_settle` to take back
        self.freed = 0  # arenas given back so far; peers drop their mappings when it moves

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised tensor of `shape` in shared memory."""
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative dimension")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        taken = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        try:
            with self._lock:
                arena, start = self._find(taken)
        finally:
            self._settle()
        # torch keeps numpy's array alive as the owner: it ends with the last view.
        block = arena.segment.memory[start : start + nbytes].numpy()
        weakref.finalize(block, self._release, arena, start, start + taken).atexit = False
        return torch.from_numpy(block).view(dtype).view(tuple(shape))

    def locate(self, address: int, nbytes: int) -> Location | None:
        """Where these bytes of this process lie in shared memory; None for ordinary memory."""
        starts, owners = self._by_address
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        owner, offset = owners[at], address - starts[at]
        return Location(owner.fd, owner.serial, offset) if offset + nbytes <= owner.nbytes else None

    def memory(self, serial: int) -> torch.Tensor:
        """Payload of one of the arenas, uint8[nbytes]."""
        _, owners = self._by_address
        return next(each.memory for each in owners if each.serial == serial)

    def forget(self) -> None:
        """Start anew, as a forked child must: its parent goes on handing out the same memory, and must not
        see what the child writes into tensors there."""
        for arena in (*self._in_use, *self._spares):
            _make_private(arena.segment)
        self._lock = threading.Lock()
        self._in_use, self._spares, self._by_address = [], [], ([], [])
        self._returned.clear()

    def _find(self, nbytes: int) -> tuple[_Arena, int]:
        """A block of a whole number of pages: (arena, offset)."""
        for arena in self._in_use:
            start = arena.take(nbytes)
            if start is not None:
                return arena, start
        arena = self._spare(nbytes) or self._new(max(nbytes, _ARENA_BYTES))
        self._in_use.append(arena)
        self._index()
        first = arena.take(nbytes)
        assert first == 0
        return arena, first

    def _spare(self, nbytes: int) -> _Arena | None:
        """The smallest spare for `nbytes`, taken out of the spares; None rather than one that a small tensor
        would keep alive."""
        most = 2 * max(nbytes, _ARENA_BYTES)
        fitting = [each for each in self._spares if nbytes <= each.segment.nbytes <= most]
        if not fitting:
            return None
        found = min(fitting, key=lambda each: each.segment.nbytes)
        self._spares.remove(found)
        return found

    def _new(self, nbytes: int) -> _Arena:
        with contextlib.suppress(UserError):
            return _Arena(nbytes)
        self._give_back(keep_bytes=0)  # the memory that was missing may lie in spares
        return _Arena(nbytes)

    def _release(self, arena: _Arena, start: int, stop: int) -> None:
        """The end of a block. Runs on any thread at any moment, even in the middle of `_find` on this one."""
        self._returned.append((arena, start, stop))
        self._settle()

    def _settle(self) -> None:
        """Take back returned blocks. A thread that holds the lock meanwhile looks again after letting
        it go."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    arena, start, stop = self._returned.popleft()
                    if arena in self._in_use and arena.give(start, stop):
                        self._in_use.remove(arena)
                        self._spares.append(arena)
                self._give_back(keep_bytes=_SPARE_BYTES)
            finally:
                self._lock.release()

    def _give_back(self, keep_bytes: int) -> None:
        """Give spares back to the system until those left have `keep_bytes` at most: too large ones first,
        then the oldest."""
        while sum(each.segment.nbytes for each in self._spares) > keep_bytes:
            large = (each for each in self._spares if each.segment.nbytes > keep_bytes)
            given = next(large, self._spares[0])
            self._spares.remove(given)
            given.segment.close()
            self.freed += 1
            self._index()

    def _index(self) -> None:
        arenas = sorted((*self._in_use, *self._spares), key=lambda each: each.segment.address)
        self._by_address = [each.segment.address for each in arenas], [each.segment for each in arenas]


def _make_private(held: Segment) -> None:
    """From now on, copy pages when this process writes to them. If the kernel cannot promise the room, as
    under strict overcommit, nothing changes: a fork never fails for this."""
    map_new, move = _LIBC.mmap, _LIBC.mremap
    map_new.restype = move.restype = ctypes.c_void_p
    address, nbytes = ctypes.c_void_p(held.address), ctypes.c_size_t(held.nbytes)
    first = ctypes.c_long(len(held.map) - held.nbytes)  # of the payload in the file
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    # Not directly in place of the old mapping: if this failed, that would be gone.
    new = map_new(None, nbytes, rights, flags, held.fd, first)
    if new != _FAILED:
        move(ctypes.c_void_p(new), nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, address)


ARENAS = Arenas()
os.register_at_fork(after_in_child=ARENAS.forget)


def shared_empty(
    shape: int | np.integer[Any] | Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Uninitialised CPU tensor in memory shared with the other ranks of this host.

    shape: of the tensor; an int is one dimension. dtype: any of torch's.

    The tensor is contiguous and page aligned, and in every other respect an ordinary one. Views of it are
    shared too, results of operations on it are not.

    ValueError: a dimension is negative. TypeError: dtype is none of torch's. UserError: the host or the
    container has too little memory; the message names both sizes.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"shared_empty: dtype={dtype!r}: one of torch's, as torch.float32")
    # Python ints: a product of numpy's ints may wrap around.
    sizes = (shape,) if isinstance(shape, int | np.integer) else shape
    return ARENAS.empty(tuple(map(operator.index, sizes)), dtype)
