"""Turns a run's records into curves that are short enough to draw and smooth enough to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000  # points of one curve in a picture: more than it has pixels across
_WINDOW = 0.03  # a smoothed value is the mean over this share of all points, around its own

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values by step; both arrays are [points]."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)


def curve(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """The figure `key` of all records in which it is there and not null."""
    points = [(record["step"], record[key]) for record in records if _is_number(record.get(key))]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return Curve(steps, values)


def smoothed(raw: Curve) -> Curve:
    """The mean around each point.

    Near the start the mean is over fewer points, since the loss falls steeply there. Near the end it is over
    the points that are left, so that the curve does not end with the noise of the last step.
    """
    count = len(raw)
    reach, places = max(int(count * _WINDOW / 2), min(3, count // 10)), np.arange(count)
    first = places - np.minimum(places, reach)
    end = np.minimum(places + np.minimum(places, reach), count - 1) + 1
    sums = np.concatenate(([0.0], np.cumsum(raw.values)))
    return Curve(raw.steps, (sums[end] - sums[first]) / (end - first))


def thinned(raw: Curve, most: int = MOST_POINTS) -> Curve:
    """At most `most` points: the lowest and the highest of each piece, so that no outlier is lost."""
    if len(raw) <= most:
        return raw
    kept = []
    for piece in np.array_split(np.arange(len(raw)), most // 2):
        values = raw.values[piece]
        kept += sorted({int(piece[values.argmin()]), int(piece[values.argmax()])})
    return Curve(raw.steps[kept], raw.values[kept])


def piecewise_mean(raw: Curve, most: int) -> Curve:
    """At most `most` points, each the mean of a piece."""
    pieces = np.array_split(np.arange(len(raw)), min(most, len(raw)) or 1)
    return Curve(
        np.array([raw.steps[piece].mean() for piece in pieces if len(piece)]),
        np.array([raw.values[piece].mean() for piece in pieces if len(piece)]),
    )


def frame(curves: Sequence[Curve], levels: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value to show, so that all `levels` and the detail of the curves are
    visible.

    A few values far above the rest, as when a run diverges, are left out: they would press all others
    together.
    """
    values = np.concatenate([each.values for each in curves])
    low = min([values.min(), *levels])
    usual = max([np.quantile(values, 0.99), *levels])
    high = max([values.max(), *levels])
    if high > usual + (usual - low):
        high = usual
    room = 0.05 * (high - low) or 1.0
    return float(low - room), float(high + room)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
