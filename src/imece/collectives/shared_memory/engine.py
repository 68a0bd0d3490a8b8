"""The collectives of one group, as generators over the board.

Every rank runs the same collectives in the same order, so one counter a rank says it all: CLOCK. A step is
"do my part, tick, wait until everybody's clock has come as far". There are three ways through a collective,
and all ranks take the same one because they decide from what all have seen:

- small: the data travels with the announcement, one step in all;
- direct: the tensors lie in shared memory, so each rank works on the others' memory in place;
- staged: ordinary tensors travel in pieces through slots that stay in the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from imece.collectives.fingerprint import OPS, Said, SameLabel, explain, name_of
from imece.collectives.shared_memory import futex
from imece.collectives.shared_memory.arena import ARENAS
from imece.collectives.shared_memory.board import (
    CLOCK,
    DESCRIPTORS,
    DETAIL,
    FD,
    FINGERPRINT,
    FREED,
    OFFERED,
    OFFSET,
    SERIAL,
    SLOTS,
    Board,
)
from imece.collectives.shared_memory.waiting import Operation, Steps
from imece.errors import MismatchError

_KEPT = 1024  # lists of views
_SOON_POLLS = 100  # about 10 us: the other rank is on its own core and nearly there
T = TypeVar("T")
_SAME_SHAPE = frozenset(OPS.index(op) for op in ("broadcast", "reduce", "all_reduce"))
SHAPE = 5


class Engine:
    """Runs on one thread at a time; `Group` sees to that."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.rank = board.rank
        self.world_size = board.world_size
        self.number = 0  # collectives entered
        self.clock = 0
        self.shape: tuple[int, ...] = ()  # of the tensor under way, for messages
        self.label = ""
        self.way = ""  # as in fingerprint.Said
        self._others = [board.words[other] for other in board.others]
        self._piece = 0
        self._freed = 0
        self._views: dict[Hashable, list[Any]] = {}
        self._scratches: dict[torch.dtype, torch.Tensor] = {}

    def missing(self) -> list[int]:
        """Ranks that are behind this one."""
        return [other for other in self.board.others if self.board.words[other][CLOCK] < self.clock]

    def operation(self, fingerprint: int, steps: Steps) -> Operation:
        """`steps` of a collective, ready to be driven."""
        return Operation(steps, fingerprint, self.which, self.missing)

    def which(self) -> str:
        """The collective under way, in words."""
        return f"number {self.number}" + (f" ({self.label})" if self.label else "")

    # One step.

    def enter(
        self, fingerprint: int, offered: torch.Tensor | None = None, shape_word: int | None = None
    ) -> None:
        """Announce the next collective; `offered` (flat) is what others may read in place."""
        self.number += 1
        mine, at = self.board.mine, DESCRIPTORS + 8 * (self.number & 1)
        word = self.shape_word(fingerprint, self.shape) if shape_word is None else shape_word
        mine[at + FINGERPRINT] = fingerprint
        mine[at + SHAPE] = hash((word, name)) if (name := name_of(self.label)) else word
        mine[at + FD] = -1  # others may look for an offer even if this rank makes none
        if offered is not None:
            nbytes = offered.numel() * offered.itemsize
            location = ARENAS.locate(offered.data_ptr(), nbytes)
            mine[at + OFFERED] = nbytes
            if location is not None:
                mine[at + FD] = location.fd
                mine[at + SERIAL] = location.serial
                mine[at + OFFSET] = location.offset_bytes
            self.board.announce_freed()
        self.tick()

    def shape_word(self, fingerprint: int, shape: Sequence[int], way: str = "") -> int:
        """Shape and way in one word, 0 if ranks may differ in it. Tuples of ints hash alike everywhere."""
        word = hash(tuple(shape)) if fingerprint >> 59 in _SAME_SHAPE else 0
        return hash((word, zlib.crc32(way.encode()))) if way else word

    def tick(self) -> None:
        self.clock += 1
        self.board.publish(CLOCK, self.clock)

    def everybody(self, clock: int) -> Steps:
        """Wait until all ranks have come to `clock`."""
        for other in self.board.others:
            words = self.board.words[other]
            while words[CLOCK] < clock:
                yield
        if futex.NEEDS_FENCE:
            futex.fence()

    def entered_soon(self, fingerprint: int, shape_word: int) -> bool:
        """Whether all ranks announce this same collective within a few microseconds.

        If not, `entered` waits for the late ones, and says what differs.
        """
        polls = 0 if self.board.crowded else _SOON_POLLS
        clock, at = self.clock, DESCRIPTORS + 8 * (self.number & 1)
        for words in self._others:
            while words[CLOCK] < clock:
                polls -= 1
                if polls < 0:
                    return False
        if futex.NEEDS_FENCE:
            futex.fence()
        return all(words[at] == fingerprint and words[at + SHAPE] == shape_word for words in self._others)

    def entered(self, fingerprint: int) -> Steps:
        """Wait until all ranks have announced this collective, and see that it is the same one."""
        yield from self.everybody(self.clock)
        at = DESCRIPTORS + 8 * (self.number & 1) + FINGERPRINT
        for other in self.board.others:
            words = self.board.words[other]
            if words[at] != fingerprint or words[at + SHAPE] != self.board.mine[at + SHAPE]:
                yield from self._differ(at)

    def _differ(self, at: int) -> Steps:
        """The ranks are in different collectives: exchange the details, raise MismatchError on every rank."""
        own = f"{'x'.join(map(str, self.shape))}|{self.way}|{self.label}"
        self.board.write_text(DETAIL, self.number, own)
        for other in self.board.others:
            while self.board.words[other][DETAIL] < self.number:
                yield
        said: dict[int, Said] = {}
        for rank, world_rank in enumerate(self.board.names):
            text = own if rank == self.rank else self.board.read_text(rank, DETAIL)
            shape, _, rest = text.partition("|")
            way, _, label = rest.partition("|")
            name = name_of(SameLabel(label)) if name_of(self.label) else 0
            said[world_rank] = Said(self.board.words[rank][at], _shape(shape), label, way, name)
        message = explain(self.number, said)
        raise MismatchError(message or f"collective number {self.number} differs between ranks")

    # Slots and views.

    def next_slot(self) -> int:
        """The slot for the next piece, the same number on all ranks.

        Four slots take turns, and no step asks whether one is free. A rank writes piece q after it has
        finished piece q - 2. For that it saw everybody announce at least q - 2 (or the step after), which
        each rank does only after it has finished q - 4: the slot's last readers are gone.
        """
        self._piece += 1
        return self._piece % SLOTS

    def in_pieces(self, count: int, send: Callable[[int, int], None]) -> Iterator[tuple[int, int]]:
        """(piece, its slot) for each of `count` pieces: while one is read, the next is on its way.

        send: puts what this rank has of a piece into a slot. The clock ticks when the first piece is sent,
        and in each turn once more, when the next one is.
        """
        slot = self.next_slot()
        send(0, slot)
        self.tick()
        for piece in range(count):
            following = slot
            if piece + 1 < count:
                following = self.next_slot()
                send(piece + 1, following)
            self.tick()
            yield piece, slot
            slot = following

    def slot_views(self, slot: int, start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Bytes [start, stop) of one slot of each rank, as `dtype`; kept, since the same ones come again."""
        key = (slot, start, stop, dtype)
        return self.kept(key, lambda: [each[start:stop].view(dtype) for each in self.board.slots[slot]])

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the running result of one piece, as large as the largest one so far."""
        found = self._scratches.get(dtype)
        if found is None or found.numel() < numel:
            with torch.inference_mode(False):  # small calls write to it outside of the mode too
                found = self._scratches[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return found[:numel]

    def in_place(self, ranks: Iterable[int]) -> list[torch.Tensor] | None:
        """What `ranks` offer, as uint8 tensors where it lies; None unless all of it is in shared memory."""
        freed = sum(words[FREED] for words in self.board.words)
        if freed != self._freed:  # views of memory that its owner has given back would keep it alive
            self._freed = freed
            self._views.clear()
        at = DESCRIPTORS + 8 * (self.number & 1)
        found = []
        for rank in ranks:
            words = self.board.words[rank]
            if words[at + FD] < 0:
                return None
            found.append((rank, words[at + FD], words[at + SERIAL], words[at + OFFSET], words[at + OFFERED]))
        return self.kept(
            tuple(found),
            lambda: [
                self.board.memory(rank, fd, serial)[offset : offset + nbytes]
                for rank, fd, serial, offset, nbytes in found
            ],
        )

    def kept(self, key: Hashable, make: Callable[[], list[T]]) -> list[T]:
        """make(), or its last result: steps of a training run use the same memory again and again.

        Making views of a few pieces costs as much as summing 100 KiB.
        """
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _KEPT:
                self._views.clear()
            found = self._views[key] = make()
        return found


def _shape(text: str) -> tuple[int, ...]:
    """The inverse of "2x3x4"; () for anything else."""
    parts = text.split("x")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
