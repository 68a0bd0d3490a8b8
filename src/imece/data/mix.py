"""In which proportion the sequences of a run are of several sources: a fixed cycle of turns.

Each source has an order of its own, as if it were alone. Sequence i of the run is the next one of the source
whose turn it is, so which it is follows from i. After any number of sequences each source has had its share
of them to within one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_MOST_TURNS = 10_000  # of a cycle: weights of four digits


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportion: (0.5, 0.25, 0.25) -> (2, 1, 1); (): one source.

    ValueError, which begins with the field's name, for weights that are none or have too many digits.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ValueError(
                f"weights are {_shown(weights)}: each a number above 0; a source that is not to be read is "
                "left out"
            )
    if not weights:
        return (1,)
    exact = [Fraction(repr(weight)) for weight in weights]  # 0.1 is a tenth, as it was meant
    unit = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * unit) for each in exact]
    factor = math.gcd(*whole)
    if sum(whole) // factor > _MOST_TURNS:
        per_mille = [max(1, round(1000 * each / sum(exact))) for each in exact]
        raise ValueError(
            f"weights are {_shown(weights)}: too many digits, as whole numbers they may add up to "
            f"{_MOST_TURNS:,}: such as {_shown(per_mille)}"
        )
    return tuple(each // factor for each in whole)


class Turns:
    """The cycle of sources with these weights."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        length = sum(weights)
        self._source = np.empty(length, np.int64)  # [length]
        self._before = np.empty(length, np.int64)  # [length]: turns of the same source before, in the cycle
        had = [0] * len(weights)
        for turn in range(length):
            # A source's turn number n may come once its share has passed n, and must before it passes n + 1.
            # To take the most urgent one keeps all of these dates, however many sources there are.
            free = [at for at, weight in enumerate(weights) if had[at] * length < (turn + 1) * weight]
            source = min(free, key=lambda at: -(-(had[at] + 1) * length // weights[at]))
            self._source[turn], self._before[turn] = source, had[source]
            had[source] += 1
        assert had == list(weights), had

    def place(self, number: int) -> tuple[int, int]:
        """(source, which of its sequences) of the run's sequence of that number."""
        cycle, turn = divmod(number, len(self._source))
        source = int(self._source[turn])
        return source, cycle * self.weights[source] + int(self._before[turn])

    def share(self, source: int) -> Fraction:
        """Of all sequences."""
        return Fraction(self.weights[source], len(self._source))


def _shown(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)
