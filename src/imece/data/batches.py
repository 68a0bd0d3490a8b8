"""The batches of a step: where training stands in the data is one number, the step.

The *stream* is all documents of a part, each with its end token, once in every epoch and in another order
each time, one epoch right after the other, without end:

    epoch 0                  epoch 1                  epoch 2
    d2 d2 E d0 E d1 d1 d1 E  d0 E d1 d1 d1 E d2 d2 E  d1 d1 ...

*Window* w has the stream's tokens [w * seq, (w + 1) * seq) as targets. Neighbours are mostly of one document,
and a step of neighbours would see little else; so windows are *shuffled*, within stretches that are as long
as an epoch holds whole windows: sequence i of the run is window `shuffle(i)`, and step k has the sequences
[k * global_batch, (k + 1) * global_batch). So each token is a target exactly once in every pass over the
stream, nothing is padded and nothing left out: what does not fill a window at an epoch's end goes on with
the next epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from imece.data.tokens import Part
from imece.errors import UserError

Tokens = npt.NDArray[np.int64]
Kept = TypeVar("Kept")

_KEPT = 3  # a step lies in two stretches at most, and these in three epochs


class Batches:
    """What each step and each rank reads: a function of part, seq, global_batch, seed and step, no more.

    A sequence may hold several documents, or pieces of them; attention is not kept from crossing the end
    tokens. Any step costs about the same, but for the first one of an epoch: it sorts documents and windows.
    """

    def __init__(self, part: Part, seq: int, global_batch: int, seed: int) -> None:
        """seq: tokens; global_batch: sequences, of all ranks together; seed: any int, used modulo 2^64.

        UserError if the part holds fewer tokens than one step reads.
        """
        if seq < 1 or global_batch < 1:
            raise UserError(f"sequences of {seq} tokens, {global_batch} a step: at least 1 of both")
        self.part, self.seq, self.global_batch, self.seed = part, seq, global_batch, seed
        self.tokens_per_epoch = len(part.tokens)
        self.tokens_per_step = seq * global_batch
        if self.tokens_per_epoch < self.tokens_per_step:
            raise UserError(
                f"the {part.name} part holds {self.tokens_per_epoch} tokens, but a step reads "
                f"{global_batch} sequences x {seq} tokens = {self.tokens_per_step}: "
                "give more text, or make the batch or the sequences smaller"
            )
        self._windows_per_stretch = self.tokens_per_epoch // seq
        self._orders: OrderedDict[int, _Order] = OrderedDict()
        self._shuffles: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def epoch(self, step: int) -> float:
        """How many times all documents were targets before this step, such as 1.25."""
        return step * self.tokens_per_step / self.tokens_per_epoch

    def sequences(self, step: int) -> Tokens:
        """The global batch, [global_batch, seq + 1]: inputs are its [:, :-1], targets its [:, 1:].

        The input before a document's first token is an end token: also at the very beginning.
        """
        return self._sequences(step, 0, self.global_batch)

    def for_rank(self, step: int, rank: int, world_size: int) -> tuple[Tokens, Tokens]:
        """(inputs, targets), each [n, seq]: the rank's rows of the global batch, and only these are read.

        Ranks have contiguous rows in the order of ranks. If they do not divide, n differs by one, the first
        ranks having more; with more ranks than sequences, the last ranks have n = 0.
        """
        first, last = rows(self.global_batch, rank, world_size)
        sequences = self._sequences(step, first, last)
        return sequences[:, :-1], sequences[:, 1:]

    def names(self, step: int, first: int = 0, last: int | None = None) -> list[int]:
        """The documents of which rows [first, last) of a step have a target: indices into the part."""
        windows = self._windows(step, first, self.global_batch if last is None else last)
        spans = (self._pieces(window * self.seq, (window + 1) * self.seq) for window in windows)
        return list(dict.fromkeys(piece.document for pieces in spans for piece in pieces))

    def _sequences(self, step: int, first: int, last: int) -> Tokens:
        """Rows [first, last) of a step."""
        windows = self._windows(step, first, last)
        rows = np.empty((len(windows), self.seq + 1), np.int64)
        for row, window in zip(rows, windows, strict=True):
            self._read(row, window * self.seq)
        return rows

    def _read(self, row: Tokens, begin: int) -> None:
        """Fill it with the token before `begin` in the stream and those from there on."""
        # The token before the first target is its input; before the stream's beginning there is an end token.
        row[0] = self.part.end
        place = 1 if begin == 0 else 0
        for piece in self._pieces(max(begin - 1, 0), begin + self.seq):
            row[place : place + piece.last - piece.first] = self.part.tokens[piece.first : piece.last]
            place += piece.last - piece.first
        assert place == len(row), (place, len(row))

    def _windows(self, step: int, first: int, last: int) -> list[int]:
        """Which window each of the rows [first, last) of a step is."""
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        begin = step * self.global_batch
        return [self._shuffled(number) for number in range(begin + first, begin + last)]

    def _shuffled(self, number: int) -> int:
        stretch, place = divmod(number, self._windows_per_stretch)
        shuffle = _kept(
            self._shuffles, stretch, lambda: _permutation(self.seed, 1, stretch, self._windows_per_stretch)
        )
        return stretch * self._windows_per_stretch + int(shuffle[place])

    def _pieces(self, begin: int, end: int) -> list[_Piece]:
        """The stream's tokens [begin, end), as pieces of documents."""
        pieces = []
        while begin < end:
            epoch, place = divmod(begin, self.tokens_per_epoch)
            length = min(end - begin, self.tokens_per_epoch - place)
            pieces += self._order(epoch).pieces(self.part, place, place + length)
            begin += length
        return pieces

    def _order(self, epoch: int) -> _Order:
        return _kept(self._orders, epoch, lambda: _Order.of(self.part, self.seed, epoch))


def rows(global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which rows [first, last) of the global batch are this rank's. ValueError for a rank that is none."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
    each, over = divmod(global_batch, world_size)
    first = rank * each + min(rank, over)
    return first, first + each + (rank < over)


@dataclass(frozen=True)
class _Piece:
    document: int
    first: int  # in part.tokens
    last: int


@dataclass(frozen=True)
class _Order:
    """The documents in the order of one epoch."""

    documents: npt.NDArray[np.int64]  # [documents], a permutation
    ends: npt.NDArray[np.int64]  # [documents]: tokens of the epoch up to the end of each, in that order

    @classmethod
    def of(cls, part: Part, seed: int, epoch: int) -> _Order:
        order = _permutation(seed, 0, epoch, part.documents)
        return cls(order, np.cumsum(np.diff(part.offsets)[order]))

    def pieces(self, part: Part, begin: int, end: int) -> list[_Piece]:
        """The epoch's tokens [begin, end); they are not empty and lie within it."""
        first, last = np.searchsorted(self.ends, [begin, end - 1], side="right").tolist()
        pieces = []
        for place in range(first, last + 1):
            document, stop = int(self.documents[place]), int(self.ends[place])
            shift = int(part.offsets[document + 1]) - stop  # from the epoch's tokens to the part's
            start = stop - int(part.offsets[document + 1] - part.offsets[document])
            pieces.append(_Piece(document, max(begin, start) + shift, min(end, stop) + shift))
        return pieces


def _permutation(seed: int, purpose: int, number: int, length: int) -> npt.NDArray[np.int64]:
    """The numbers below `length` in an order that seed, purpose and number (of the epoch, say) decide."""
    # numpy promises the generator's raw bits for ever and everywhere, but not what `permutation` makes
    # of them. Two equal keys, which hardly happen, stay in their order: the sort is stable.
    key = np.array([seed % 2**64, number], np.uint64)
    counter = np.array([0, 0, 0, purpose], np.uint64)
    keys = np.random.Philox(key=key, counter=counter).random_raw(length)
    return np.argsort(keys, kind="stable")


def _kept(memory: OrderedDict[int, Kept], number: int, make: Callable[[], Kept]) -> Kept:
    """The one of that number; the latest few stay, for steps go on in order."""
    if number not in memory:
        while len(memory) >= _KEPT:
            memory.popitem(last=False)
        memory[number] = make()
    memory.move_to_end(number)
    return memory[number]
