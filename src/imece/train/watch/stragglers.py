"""Finds slow ranks and their slow phase, from every rank's own time without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PHASES = ("data", "forward", "backward", "optimizer", "copy", "other")
_WINDOW = 12  # steps
_LOOK_EVERY = 4  # steps between two evaluations, which take 0.4 ms
_BEGINS, _ENDS = 0.75, 0.5  # share of steps in which a rank is late: to be called slow, and to stay so
_LEAST_S = 0.010
_LEAST_SHARE = 0.05  # of a whole step: smaller delays hold nobody up
_ADVANTAGE = 1.5  # of the rank already named, over another one that is late too


@dataclass(frozen=True)
class Slow:
    """A rank that all others wait for."""

    rank: int
    phase: str
    seconds: float
    """Its own time for the phase in a step, median of the latest steps."""
    others: float
    """The same for the other ranks."""

    def describe(self) -> str:
        """In one line."""
        where = "outside of all phases" if self.phase == "other" else f"in {self.phase}"
        return (
            f"rank {self.rank} is slow {where}: {1e3 * self.seconds:.0f} ms a step, the others "
            f"{1e3 * self.others:.0f} ms; all wait for it"
        )

    def figures(self) -> dict[str, int | str | float]:
        """Figures for a step's record."""
        return {
            "slowest_rank": self.rank,
            "slowest_phase": self.phase,
            "slowest_s": self.seconds,
            "others_s": self.others,
        }


class Stragglers:
    """The own times of all ranks in the latest steps, and what follows from them."""

    def __init__(self, ratio: float, stages: int = 1) -> None:
        """ratio: a rank is late above this multiple of the others' median, if it also exceeds it by 10 ms and
        5 % of a step.

        stages: of a pipeline, each with equally many ranks, in order. Then a rank is compared with its own
        stage, because stages differ in their work.
        """
        self._ratio, self._stages = ratio, stages
        self._steps: deque[np.ndarray] = deque(maxlen=_WINDOW)  # each [ranks, PHASES]
        self._added = 0
        self.slow: Slow | None = None

    def add(self, times: Sequence[Sequence[float]]) -> bool:
        """Add a step: seconds for each rank and phase. Returns whether the slow rank changed."""
        self._steps.append(np.asarray(times))
        self._added += 1
        if len(self._steps) < _WINDOW or self._added % _LOOK_EVERY or len(times) < 2 * self._stages:
            return False
        before, self.slow = self.slow, self._slowest()
        return _who(before) != _who(self.slow)

    def clear(self) -> None:
        """Forget all steps, because the ranks have changed."""
        self._steps.clear()
        self.slow = None

    def _slowest(self) -> Slow | None:
        steps = np.stack(self._steps)  # [window, ranks, phases]
        alike = steps.shape[1] // self._stages
        found = [
            each for first in range(0, steps.shape[1], alike) for each in self._late(steps, first, alike)
        ]
        return max(found, key=lambda each: each[0])[1] if found else None

    def _late(self, steps: np.ndarray, first: int, count: int) -> Iterator[tuple[float, Slow]]:
        """Which of `count` ranks, from `first` on, are late, and by how much."""
        steps = steps[:, first : first + count]
        least = np.maximum(_LEAST_S, _LEAST_SHARE * np.median(steps.sum(2), axis=1))  # [window]
        for at, phase in enumerate(PHASES):
            rank = int(np.median(steps[:, :, at], axis=0).argmax())
            own, others = steps[:, rank, at], np.median(np.delete(steps[:, :, at], rank, axis=1), axis=1)
            late = float(np.mean((own > self._ratio * others) & (own - others > least)))
            named = _who(self.slow) == (first + rank, phase)
            if late >= (_ENDS if named else _BEGINS):
                slow = Slow(first + rank, phase, float(np.median(own)), float(np.median(others)))
                yield (slow.seconds - slow.others) * (_ADVANTAGE if named else 1.0), slow


def _who(slow: Slow | None) -> tuple[int, str] | None:
    return (slow.rank, slow.phase) if slow is not None else None
