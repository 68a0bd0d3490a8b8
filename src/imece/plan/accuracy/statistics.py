"""How far predictions are from measurements: errors, order, and the cost of choices made by them.

The rival is a constant: seconds = FLOPs / (peak x one utilisation), with the utilisation fitted in hindsight
on all rows of the table. It knows nothing; on tables of well-tuned runs its error is hard to beat, but it
cannot choose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Row:
    """One measurement beside its prediction, in one unit."""

    name: str
    measured: float
    predicted: float
    work: float = 0.0  # the time at full utilisation, for the constant; 0: unknown
    cell: str = ""  # rows of one cell are alternatives for one choice
    held_out: bool = False  # whether nothing was fitted on it
    ranks: int = 1

    @property
    def error(self) -> float:
        """Above 0 if too much was predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """Errors of some rows, as parts of the measured value."""

    rows: int
    mape: float
    median: float  # of absolute errors
    p90: float
    bias: float  # median of signed errors
    worst: tuple[Row, ...]


def summary(rows: Sequence[Row], worst: int = 5) -> Summary:
    """ValueError without rows."""
    if not rows:
        raise ValueError("no rows: nothing was measured")
    errors = sorted(abs(row.error) for row in rows)
    return Summary(
        rows=len(rows),
        mape=statistics.fmean(errors),
        median=statistics.median(errors),
        p90=float(np.quantile(errors, 0.9)),
        bias=statistics.median(row.error for row in rows),
        worst=tuple(sorted(rows, key=lambda row: abs(row.error), reverse=True)[:worst]),
    )


def kendall(rows: Sequence[Row]) -> float | None:
    """Tau-b of predicted and measured: 1 for the same order, -1 for the opposite. None for fewer than two
    rows."""
    balance = measured_pairs = predicted_pairs = 0
    for i, a in enumerate(rows):
        for b in rows[:i]:
            measured = _sign(a.measured - b.measured)
            predicted = _sign(a.predicted - b.predicted)
            balance += measured * predicted
            measured_pairs += measured != 0
            predicted_pairs += predicted != 0
    if not measured_pairs or not predicted_pairs:
        return None
    return float(balance / (measured_pairs * predicted_pairs) ** 0.5)


def regret(rows: Sequence[Row]) -> float:
    """What choosing the smallest prediction costs: the best measured rate over the chosen one's, minus 1.

    0: the best was chosen; 0.1: the best does 10 % more in the same time. If predictions tie, the mean over
    them.
    """
    best = min(row.measured for row in rows)
    least = min(row.predicted for row in rows)
    chosen = [row.measured for row in rows if row.predicted <= least * (1 + 1e-9)]
    return statistics.fmean(chosen) / best - 1


def cells(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by cell; rows without a cell are left out."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.cell:
            found.setdefault(row.cell, []).append(row)
    return found


def of_cells(rows: Sequence[Row], what: Callable[[Sequence[Row]], float | None]) -> dict[str, float]:
    """`what` for each cell with at least two rows."""
    values = {name: what(members) for name, members in cells(rows).items() if len(members) > 1}
    return {name: value for name, value in values.items() if value is not None}


def constant(rows: Sequence[Row]) -> tuple[float, list[Row]]:
    """The utilisation with the least MAPE on these very rows, and the rows predicted by it.

    Each row is predicted exactly by the utilisation work / measured. The sum of |work / (u measured) - 1| has
    its minimum at one of these.
    """
    known = [row for row in rows if row.work > 0]
    if not known:
        raise ValueError("no row has its work: a constant predicts nothing")
    ratios = sorted(row.work / row.measured for row in known)
    total, sofar = sum(ratios), 0.0
    best = ratios[-1]
    for ratio in ratios:  # 1/u is a median of the ratios, each weighted by itself
        sofar += ratio
        if sofar >= total / 2:
            best = ratio
            break
    return best, [replace(row, predicted=row.work / best) for row in known]


def skill(rows: Sequence[Row]) -> float:
    """1 - MAPE over that of the constant: 1 is perfect, 0 no better, below 0 worse; -inf if the constant is
    exact."""
    known = [row for row in rows if row.work > 0]
    rival = summary(constant(known)[1]).mape
    return 1 - summary(known).mape / rival if rival else -math.inf


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
