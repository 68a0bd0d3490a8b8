"""Windows that hold whole records, so that no answer is cut off from its prompt.

Records are packed once, the longest first, each into the window that it fills best (best fit decreasing).
What stays empty is padded, and no target there counts. A window has `seq` targets and so `seq` + 1 tokens,
since the first token of a record is never a target. Records of more tokens fit nowhere and are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from imece.data.begins import begins_of
from imece.data.tokens import Part
from imece.errors import UserError


class WholeWindows:
    """The windows of a part whose documents are records. A pass over all of them has each learned token of
    each record that fits as a target exactly once."""

    def __init__(self, part: Part, seq: int) -> None:
        """seq: targets of a window. UserError if the part has records and none fits."""
        assert part.learned is not None
        self.part, self.seq = part, seq
        lengths = np.diff(part.offsets)
        fitting = np.flatnonzero(lengths <= seq + 1)
        self.left_out = len(lengths) - len(fitting)
        self.longest = int(lengths.max(initial=0))  # tokens
        if self.left_out and not len(fitting):
            raise UserError(
                f"none of {len(lengths):,} records of the {part.title} fits into a sequence of {seq:,} "
                f"tokens, the shortest has {lengths.min():,}: --model.max-seq {lengths.min() - 1} or more"
            )
        self._records = _packed(lengths, fitting[np.argsort(-lengths[fitting], kind="stable")], seq + 1)
        self.per_stretch, self.per_epoch = len(self), Fraction(len(self))

    def __len__(self) -> int:
        return len(self._records)

    def documents(self, window: int) -> list[int]:
        """The records in a window, which each stretch has again: indices into the part."""
        return self._records[window % len(self)]

    def learned(self, windows: Sequence[int]) -> int:
        """The targets of these windows that count."""
        return sum(
            int(self._learned(record).sum()) for window in windows for record in self.documents(window)
        )

    def read(self, windows: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The tokens of windows, [windows, seq + 1], and which of them count as targets."""
        rows = np.full((len(windows), self.seq + 1), self.part.end, np.int64)
        counts = np.zeros(rows.shape, np.bool_)
        for row, count, window in zip(rows, counts, windows, strict=True):
            place = 0
            for record in self.documents(window):
                tokens = self.part.document(record)
                row[place : place + len(tokens)] = tokens
                count[place : place + len(tokens)] = self._learned(record)
                place += len(tokens)
        return rows, counts

    def begins(self, windows: Sequence[int]) -> npt.NDArray[np.int64]:
        """As `Batches.begins`, of windows: [windows, seq]."""
        lengths = np.diff(self.part.offsets)
        rows = [begins_of([0, *np.cumsum(lengths[self.documents(each)])], self.seq) for each in windows]
        return np.array(rows, np.int64).reshape(len(windows), self.seq)

    def _learned(self, record: int) -> npt.NDArray[np.bool_]:
        assert self.part.learned is not None
        return self.part.learned[self.part.offsets[record] : self.part.offsets[record + 1]]


def _packed(lengths: npt.NDArray[np.int64], records: npt.NDArray[np.int64], room: int) -> list[list[int]]:
    """Records, in the order given, each in the window with the least room that is enough for it."""
    windows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # room left -> the windows that have it
    rooms: list[int] = []  # the keys of `left`, ascending
    for record, length in zip(records.tolist(), lengths[records].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            window, least = len(windows), room
            windows.append([])
        else:
            least = rooms[place]
            window = left[least].pop()
            if not left[least]:
                del left[least], rooms[place]
        windows[window].append(record)
        if rest := least - length:
            if rest not in left:
                left[rest] = []
                insort(rooms, rest)
            left[rest].append(window)
    return windows
