"""Sums that ranks make for each other: an early rank does the work of a late one, instead of waiting.

    post      one tensor of this rank is full: from now on others may read it, and write sums into it
    finish    a collective of all ranks: after it all tensors are summed
    item      one chunk of one rank's row of a tensor, whose sum is one piece of work
    owner     the rank whose row it is, as in reducing.py
    helper    the one other rank that may make that sum in its place

Ranks do not come to the end of a backward together. Ranks in `finish` first sum what all have posted, their
own items and then those they are the helper of; little is left for the last to come. Elements are summed in
the order of ranks, whoever sums: the bits are those of all_reduce and reduce_scatter.

Who makes an item is settled without a lock, by two words in shared memory, one written by its owner and one
by its helper. Each writes its own before it reads the other's (Dekker's way), so that of two at once at least
one sees the other:

    owner     writes TAKEN. If the helper's word says TAKEN, the helper makes it; if TRIED, look again
    helper    writes TRIED. If the owner's word says TAKEN it withdraws; else it writes TAKEN and makes it

A word holds the number of the sum too, so nobody has to clear it for the next one. A tensor's word also holds
how often this rank had to begin anew: if ranks fail together, one may be in its next attempt while another
still has posted what it is about to take back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from imece.collectives.fingerprint import pack
from imece.collectives.shared_memory import futex
from imece.collectives.shared_memory.arena import shared_empty
from imece.collectives.shared_memory.arithmetic import Reduction
from imece.collectives.shared_memory.board import CLOCK, words_of
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.reducing import Chunk, chunks_of, even_rows, sum_chunk
from imece.collectives.shared_memory.waiting import Steps
from imece.errors import CollectiveError

Tensor = torch.Tensor
_TRIED, _TAKEN = 1, 2
_STATES = 4  # an item's word is the number of the sum times this, plus one of these
_ATTEMPTS = 2**24  # a tensor's word is that number times this, plus how often its post was taken back


@dataclass(frozen=True, slots=True)
class _Item:
    """One piece of work, as one of its two ranks sees it."""

    tensor: int
    word: int  # in each rank's sheet
    other: int  # the rank that may make it as well
    chunk: Chunk


class Posted:
    """The same flat tensors on every rank, summed again and again. `DirectCalls.posted` makes it."""

    def __init__(
        self,
        engine: Engine,
        offered: Sequence[Sequence[Tensor]],
        hows: Sequence[Reduction],
        *,
        scatter: bool,
        open_sheet: Callable[[Tensor], Sequence[Tensor]],
        fail: Callable[[BaseException], None],
    ) -> None:
        """offered: for each tensor those of all ranks, in their order, where they lie: [numel].

        scatter: a sum goes to the rank whose shard it is, in place as with reduce_scatter; otherwise to all.
        open_sheet: for a tensor of this rank in shared memory, returns those of all ranks, in their order.
        fail: tells all ranks of an error after which the group is of no use.
        """
        self._engine, self._rank, self._hows, self._fail = engine, engine.rank, hows, fail
        self._own: list[list[_Item]] = []  # by tensor
        self._helped: list[list[_Item]] = []
        self._words: list[range] = []  # of its items
        word = len(offered)  # the first words, one for each tensor, say whether it is posted
        for index, ranks in enumerate(offered):
            first = word
            own, helped = list[_Item](), list[_Item]()
            for owner, helper, chunk in _items(ranks, scatter):
                if owner == self._rank:
                    own.append(_Item(index, word, helper, chunk))
                elif helper == self._rank:
                    helped.append(_Item(index, word, owner, chunk))
                word += 1
            self._own.append(own)
            self._helped.append(helped)
            self._words.append(range(first, word))
        self._sheet = shared_empty(word, torch.int64).zero_()  # held as long as this object
        self._sheets = [words_of(sheet.view(torch.uint8)) for sheet in open_sheet(self._sheet)]
        self._mine = self._sheets[self._rank]
        numels = tuple(ranks[0].numel() for ranks in offered)
        dtypes = {how.dtype for how in hows}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.numel = sum(numels)
        self.fingerprint = pack("reduce_scatter" if scatter else "all_reduce", "sum", self.dtype, self.numel)
        self._way = f"{len(numels)} posted tensors"
        self._shape_word = engine.shape_word(self.fingerprint, numels, self._way)
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        """Begin the next sum, to which this rank has posted nothing."""
        self._number += 1
        self._stamp = self._number * _STATES
        self._posted = self._number * _ATTEMPTS
        self._all_in = False  # in `finish`: nobody takes back any more, whatever an attempt's number
        self._coming = list(range(len(self._words)))  # tensors that not all ranks have posted
        self._to_do: deque[_Item] = deque()
        self._to_help: list[_Item] = []  # taken from its end, as owners begin with the first
        self._undecided = -1  # the rank that is about to take an item of this rank, or to withdraw

    # Before the end.

    def post(self, tensor: int) -> None:
        """A tensor is full: this rank leaves it alone until `finish` is over. May be called again."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self._mine[tensor] = self._posted
        self._engine.board.ring_sleepers()

    def take_back(self) -> None:
        """Take back what this rank has posted since the last `finish`, to fill it anew.

        CollectiveError, on all ranks, if another rank has summed some of it: then the values are gone.
        """
        posted = [tensor for tensor in range(len(self._words)) if self._mine[tensor] == self._posted]
        for tensor in posted:
            self._mine[tensor] = 0
        self._posted += 1
        futex.fence()
        for rank, sheet in enumerate(self._sheets):
            words = (sheet[word] for tensor in posted for word in self._words[tensor])
            if rank != self._rank and any(word >= self._stamp for word in words):
                names = self._engine.board.names
                error = CollectiveError(
                    f"rank {names[self._rank]} was to sum anew what it had posted, as after a backward that "
                    f"raised, but rank {names[rank]} had summed some of it already: what both had is gone"
                )
                self._fail(error)
                raise error

    # The end.

    def finish(self) -> Steps:
        """After it all tensors are summed on all ranks. Each rank has posted all of its own before."""
        engine = self._engine
        engine.way = self._way
        engine.enter(self.fingerprint, shape_word=self._shape_word)
        while any(words[CLOCK] < engine.clock for words in engine.board.words):
            if not self._does_one():
                yield
        yield from engine.entered(self.fingerprint)
        self._all_in = True
        while self._coming or self._to_do or self._to_help:
            if not self._does_one():
                yield
        engine.tick()
        yield from engine.everybody(engine.clock)  # until then others make what they have taken
        self._begin()

    def missing(self) -> list[int]:
        """Ranks without which `finish` cannot go on."""
        return self._engine.missing() or ([self._undecided] if self._undecided >= 0 else [])

    def _does_one(self) -> bool:
        """Make one item, if there is one for this rank."""
        for tensor in [each for each in self._coming if self._is_posted(each)]:
            self._coming.remove(tensor)
            self._to_do += self._own[tensor]
            self._to_help += self._helped[tensor]
        self._undecided = -1
        for _ in range(len(self._to_do)):
            item = self._to_do.popleft()
            taken = self._take(item)
            if taken:
                return True
            if taken is None:
                self._to_do.append(item)
        while self._to_help:
            if self._take_over(self._to_help.pop()):
                return True
        return False

    def _is_posted(self, tensor: int) -> bool:
        """Whether all ranks have posted it, to stay."""
        return self._all_in or all(sheet[tensor] == self._posted for sheet in self._sheets)

    def _take(self, item: _Item) -> bool | None:
        """Take an own item: whether this rank has made it; None if that is undecided."""
        self._mine[item.word] = self._stamp + _TAKEN
        futex.fence()
        theirs = self._sheets[item.other][item.word] - self._stamp
        if theirs == _TRIED:
            self._undecided = item.other
            return None
        return theirs != _TAKEN and self._make(item)

    def _take_over(self, item: _Item) -> bool:
        """Take another rank's item: whether this one has made it."""
        self._mine[item.word] = self._stamp + _TRIED
        futex.fence()
        if self._sheets[item.other][item.word] >= self._stamp:
            self._mine[item.word] = 0
            return False
        self._mine[item.word] = self._stamp + _TAKEN
        return self._make(item)

    def _make(self, item: _Item) -> bool:
        """Whether the item was made. It is not if a rank took its tensor back meanwhile; if this rank does
        not see that, the other one sees this rank's word, and raises."""
        if not self._is_posted(item.tensor):
            self._mine[item.word] = 0
            self._to_do = deque(each for each in self._to_do if each.tensor != item.tensor)
            self._to_help = [each for each in self._to_help if each.tensor != item.tensor]
            self._coming.append(item.tensor)
            return False
        sum_chunk(item.chunk, self._hows[item.tensor], self._engine.scratch)
        return True


def _items(ranks: Sequence[Tensor], scatter: bool) -> Iterator[tuple[int, int, Chunk]]:
    """(owner, helper, chunk) of one tensor, in the same order on all ranks."""
    numel, world_size = ranks[0].numel(), len(ranks)
    rows = even_rows(numel, world_size)
    if scatter:
        length = numel // world_size
        rows = [(rank * length, (rank + 1) * length) for rank in range(world_size)]
    for owner, row in enumerate(rows):
        output, readers = (ranks[owner][slice(*row)], ()) if scatter else (ranks[owner], range(world_size))
        for at, chunk in enumerate(chunks_of(ranks, row, output, readers)):
            yield owner, (owner + 1 + at % (world_size - 1)) % world_size, chunk
