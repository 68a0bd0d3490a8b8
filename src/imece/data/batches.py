"""The batches of a step: one number, the step, says where training stands in the data.

The *stream* is endless: one epoch after the other, and in each epoch all documents of a part, each with its
end token, in another order:

    epoch 0                  epoch 1                  epoch 2
    d2 d2 E d0 E d1 d1 d1 E  d0 E d1 d1 d1 E d2 d2 E  d1 d1 ...

*Window* w has the stream's tokens [w * seq, (w + 1) * seq) as targets. Neighbouring windows are mostly of one
document, and a step of neighbours would see little else. So windows are *shuffled*, within stretches of as
many windows as an epoch holds whole: sequence i of the run is window `shuffle(i)`, and step k has the
sequences [k * global_batch, (k + 1) * global_batch). So every pass over the stream has each token as a target
exactly once. Nothing is padded or left out: tokens that do not fill a window at an epoch's end share it with
the next epoch.

Text of several sources has a stream and windows for each; sequence i is the next window of the source whose
turn it is: see mix.py.

Records, of which only the answers are learned, are not cut, but padded: their windows are those of
whole_windows.py, and a stretch has each of them once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from imece.data.begins import begins_of
from imece.data.mix import Turns
from imece.data.tokens import Part
from imece.data.whole_windows import WholeWindows
from imece.errors import UserError
from imece.listing import many

IGNORE = -100  # a target that does not count

Tokens = npt.NDArray[np.int64]
Kept = TypeVar("Kept")

# A step touches at most two stretches, and these at most three epochs; of a small source more, in turn.
_KEPT = 3


class Place(NamedTuple):
    """Where a sequence is cut out."""

    source: int
    window: int


class Windows(Protocol):
    """Where sequences are cut out of a part. Windows are numbered through all stretches."""

    per_stretch: int  # windows that are shuffled among themselves
    per_epoch: Fraction  # windows that have all documents as targets once

    def documents(self, window: int) -> list[int]:
        """The documents with a target in a window: indices into the part."""

    def read(self, windows: Sequence[int]) -> tuple[Tokens, npt.NDArray[np.bool_] | None]:
        """The tokens of windows, [windows, seq + 1], and which of them count as targets; None: all."""

    def begins(self, windows: Sequence[int]) -> Tokens:
        """As `Batches.begins`, of windows: [windows, seq]."""

    def learned(self, windows: Sequence[int]) -> int:
        """The targets of windows that count."""


class Batches:
    """The sequences of each step and rank: a function of its arguments and the step only.

    A sequence may hold several documents or pieces of them; `begins` says where they are. All steps cost
    about the same, except the first of an epoch, which sorts documents and windows.
    """

    def __init__(
        self, part: Part, seq: int, global_batch: int, seed: int, weights: Sequence[int] = (1,)
    ) -> None:
        """seq: tokens; global_batch: sequences of all ranks together; seed: any int, used modulo 2^64;
        weights: of the part's sources.

        UserError if the only source holds fewer tokens than a step reads.
        """
        if seq < 1 or global_batch < 1:
            raise UserError(f"sequences of {seq} tokens, {global_batch} a step: at least 1 of both")
        self.part, self.seq, self.global_batch, self.seed = part, seq, global_batch, seed
        if len(weights) != len(part.sources):
            raise UserError(
                f"{many(len(weights), 'weight')} for text of {many(len(part.sources), 'source')}: "
                "--data.weights names one for each"
            )
        self.turns = Turns(weights)
        self.wholes = [WholeWindows(each, seq) for each in part.sources if each.learned is not None]
        """The windows of records, by source."""
        self._windows: list[Windows] = [*self.wholes] or [
            _Stream(each, seq, seed, source) for source, each in enumerate(part.sources)
        ]
        self._shuffles = [OrderedDict[int, npt.NDArray[np.int64]]() for _ in part.sources]
        if not part.divided:
            self._check_length()

    def _check_length(self) -> None:
        """Text that is alone is read by smaller steps as well. A small source beside others has its turns in
        a large step, and may come to be read more than once in it."""
        seq, count = self.seq, self.global_batch
        there = len(self.wholes[0]) if self.wholes else len(self.part.tokens) // seq
        if there < count:
            have = many(there, "sequence") if self.wholes else f"{len(self.part.tokens):,} tokens"
            fewer = f"--batch.sequences {there} or less, " if there else ""
            raise UserError(
                f"the {self.part.title} holds {have}, but a step reads {count:,} sequences x {seq:,} "
                f"tokens = {seq * count:,}: give more text, {fewer}or a smaller --model.max-seq"
            )

    def epochs(self, step: int) -> list[float]:
        """How many times all documents of each source were targets before this step, for instance 1.25."""
        return [float(step * self.global_batch / each) for each in self._per_epoch()]

    def epoch(self, step: int) -> float:
        """The same of the source that is read least often: how many times all documents were targets."""
        return min(self.epochs(step))

    def steps(self, epochs: float) -> int:
        """The fewest steps, at least 1, that read all documents this many times."""
        most = max(self._per_epoch())
        return max(1, math.ceil(epochs * most.numerator / (most.denominator * self.global_batch)))

    def _per_epoch(self) -> list[Fraction]:
        """For each source the sequences of the run in which it is read once."""
        return [each.per_epoch / self.turns.share(source) for source, each in enumerate(self._windows)]

    def sequences(self, step: int) -> Tokens:
        """The global batch, [global_batch, seq + 1]: inputs are [:, :-1], targets [:, 1:].

        The input before a document's first token is an end token, also at the very beginning.
        """
        return self._read(self._places(step, 0, self.global_batch))[0]

    def for_rank(self, step: int, rank: int, world_size: int) -> tuple[Tokens, Tokens]:
        """(inputs, targets), each [n, seq]: the rank's rows of the global batch; only these are read.

        Targets that do not count are IGNORE. Ranks have contiguous rows, in the order of ranks. If the rows
        do not divide evenly, the first ranks have one more; with more ranks than sequences, the last ranks
        have n = 0.
        """
        first, last = rows(self.global_batch, rank, world_size)
        return inputs_and_targets(*self._read(self._places(step, first, last)))

    def begins(self, step: int, rank: int, world_size: int) -> Tokens:
        """For each of `for_rank`'s inputs, [n, seq], the place in its row where its document begins: as far
        back as attention may see if each document is to be read as if it stood alone.

        A document begins with its begin token, or with the end token before its first.
        """
        places = self._places(step, *rows(self.global_batch, rank, world_size))
        begins = np.empty((len(places), self.seq), np.int64)
        for windows, into, numbers in self._by_source(places):
            begins[into] = windows.begins(numbers)
        return begins

    def learned(self, step: int) -> int:
        """The targets of the global batch that count."""
        places = self._places(step, 0, self.global_batch)
        return sum(windows.learned(numbers) for windows, _, numbers in self._by_source(places))

    def names(self, step: int, first: int = 0, last: int | None = None) -> list[int]:
        """The documents with a target in rows [first, last) of a step: indices into the part."""
        places = self._places(step, first, self.global_batch if last is None else last)
        begins = np.cumsum([0, *(each.documents for each in self.part.sources)]).tolist()
        return list(
            dict.fromkeys(
                begins[source] + each
                for source, window in places
                for each in self._windows[source].documents(window)
            )
        )

    def _places(self, step: int, first: int, last: int) -> list[Place]:
        """Source and window of each of the rows [first, last) of a step."""
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        begin = step * self.global_batch
        places = map(self.turns.place, range(begin + first, begin + last))
        return [Place(source, self._shuffled(source, number)) for source, number in places]

    def _shuffled(self, source: int, number: int) -> int:
        length = self._windows[source].per_stretch
        stretch, place = divmod(number, length)
        shuffle = _kept(
            self._shuffles[source], stretch, lambda: _permutation(self.seed, 1, stretch, length, source)
        )
        return stretch * length + int(shuffle[place])

    def _read(self, places: Sequence[Place]) -> tuple[Tokens, npt.NDArray[np.bool_] | None]:
        """As `Windows.read`."""
        rows = np.empty((len(places), self.seq + 1), np.int64)
        counts = np.empty(rows.shape, np.bool_) if self.wholes else None
        for windows, into, numbers in self._by_source(places):
            rows[into], which = windows.read(numbers)
            if counts is not None:
                counts[into] = which
        self.part.check(rows)
        return rows, counts

    def _by_source(self, places: Sequence[Place]) -> Iterator[tuple[Windows, list[int], list[int]]]:
        """(the source's windows, which of the places are its, the windows there) of each that has any."""
        for source, windows in enumerate(self._windows):
            if own := [at for at, place in enumerate(places) if place.source == source]:
                yield windows, own, [places[at].window for at in own]


def inputs_and_targets(rows: Tokens, counts: npt.NDArray[np.bool_] | None) -> tuple[Tokens, Tokens]:
    """(inputs, targets), each [n, seq], of rows [n, seq + 1]; targets that do not count are IGNORE."""
    targets = rows[:, 1:]
    return rows[:, :-1], targets if counts is None else np.where(counts[:, 1:], targets, IGNORE)


class _Stream:
    """Text: one document after the other, whose windows are cut where they end."""

    def __init__(self, part: Part, seq: int, seed: int, source: int) -> None:
        self._part, self._seq, self._seed, self._source = part, seq, seed, source
        self._length = len(part.tokens)
        self.per_stretch, self.per_epoch = max(1, self._length // seq), Fraction(self._length, seq)
        self._orders: OrderedDict[int, _Order] = OrderedDict()

    def documents(self, window: int) -> list[int]:
        return [piece.document for piece in self._pieces(window * self._seq, (window + 1) * self._seq)]

    def read(self, windows: Sequence[int]) -> tuple[Tokens, None]:
        rows = np.empty((len(windows), self._seq + 1), np.int64)
        for row, window in zip(rows, windows, strict=True):
            self._read(row, window)
        return rows, None

    def begins(self, windows: Sequence[int]) -> Tokens:
        begins = np.empty((len(windows), self._seq), np.int64)
        for row, window in zip(begins, windows, strict=True):
            row[:] = begins_of(
                [place - self._part.read_before for place, _ in self._placed(window)], self._seq
            )
        return begins

    def learned(self, windows: Sequence[int]) -> int:
        return len(windows) * self._seq

    def _read(self, row: Tokens, window: int) -> None:
        # The token before the first target is its input; the stream begins with an imagined end token.
        row[0] = self._part.end
        for place, piece in self._placed(window):
            row[place : place + piece.length] = self._part.tokens[piece.first : piece.last]

    def _placed(self, window: int) -> Iterator[tuple[int, _Piece]]:
        """The pieces of a window's tokens, [seq + 1], each with its place among them."""
        begin = window * self._seq
        place = 1 if begin == 0 else 0
        for piece in self._pieces(max(begin - 1, 0), begin + self._seq):
            yield place, piece
            place += piece.length
        assert place == self._seq + 1, (place, self._seq)

    def _pieces(self, begin: int, end: int) -> list[_Piece]:
        """The stream's tokens [begin, end), as pieces of documents."""
        pieces = []
        while begin < end:
            epoch, place = divmod(begin, self._length)
            length = min(end - begin, self._length - place)
            pieces += self._order(epoch).pieces(self._part, place, place + length)
            begin += length
        return pieces

    def _order(self, epoch: int) -> _Order:
        return _kept(self._orders, epoch, lambda: _Order.of(self._part, self._seed, epoch, self._source))


def rows(global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows [first, last) of the global batch that this rank reads. ValueError if rank is not in the
    world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
    each, over = divmod(global_batch, world_size)
    first = rank * each + min(rank, over)
    return first, first + each + (rank < over)


@dataclass(frozen=True)
class _Piece:
    document: int
    first: int  # index in part.tokens
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class _Order:
    """The order of the documents in one epoch."""

    documents: npt.NDArray[np.int64]  # [documents], a permutation
    ends: npt.NDArray[np.int64]  # [documents]: the epoch's tokens up to the end of each, in that order

    @classmethod
    def of(cls, part: Part, seed: int, epoch: int, source: int) -> _Order:
        order = _permutation(seed, 0, epoch, part.documents, source)
        return cls(order, np.cumsum(np.diff(part.offsets)[order]))

    def pieces(self, part: Part, begin: int, end: int) -> list[_Piece]:
        """The epoch's tokens [begin, end), a range that is not empty and within the epoch."""
        first, last = np.searchsorted(self.ends, [begin, end - 1], side="right").tolist()
        pieces = []
        for place in range(first, last + 1):
            document, stop = int(self.documents[place]), int(self.ends[place])
            shift = int(part.offsets[document + 1]) - stop  # from the epoch's positions to the part's
            start = stop - int(part.offsets[document + 1] - part.offsets[document])
            pieces.append(_Piece(document, max(begin, start) + shift, min(end, stop) + shift))
        return pieces


def _permutation(seed: int, purpose: int, number: int, length: int, source: int) -> npt.NDArray[np.int64]:
    """The numbers below `length`, in an order that depends on seed, purpose, number (the epoch, say) and
    source."""
    # numpy promises the generator's raw bits for ever and on every machine, but not the result of
    # `permutation`. Equal keys, which hardly occur, keep their order, because the sort is stable.
    key = np.array([seed % 2**64, number], np.uint64)
    counter = np.array([0, 0, source, purpose], np.uint64)
    keys = np.random.Philox(key=key, counter=counter).random_raw(length)
    return np.argsort(keys, kind="stable")


def _kept(memory: OrderedDict[int, Kept], number: int, make: Callable[[], Kept]) -> Kept:
    """The entry of that number, made if missing. The last few stay, because steps come in order."""
    if number not in memory:
        while len(memory) >= _KEPT:
            memory.popitem(last=False)
        memory[number] = make()
    memory.move_to_end(number)
    return memory[number]
