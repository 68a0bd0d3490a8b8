"""Charts as HTML and SVG that need no script and no other file.

The SVG stretches to the width of the page. What must not stretch is made otherwise: words and the grid are
HTML at per-cent positions, lines have the same width at any scale, and a dot is a line of no length with
round ends. So one chart is readable on a phone and on a wide screen. Colours are CSS variables of the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from imece.observe.curves import Curve, Floats

_SIZE = 1000  # width and height of the SVG's own coordinates
_LABEL_APART = 0.075  # part of the height between the labels of two levels


class Axis:
    """Maps values to places from 0 to 1."""

    def __init__(self, low: float, high: float, *, log: bool = False, whole: bool = False) -> None:
        """log: the axis is logarithmic, and `low` is above 0. whole: values are whole numbers. If `low`
        equals `high`, the axis is widened."""
        self.low, self.log, self._whole = low, log, whole
        self.high = high if high > low else low + max(abs(low), 1.0)

    def place(self, values: Floats | float) -> Floats:
        """The place of each value: below 0 or above 1 if it is outside."""
        low, high, at = (np.log(each) if self.log else np.float64(each) for each in self._ends(values))
        return np.asarray((at - low) / (high - low))

    def ticks(self, most: int) -> list[float]:
        """Round values within the axis (powers of ten on a logarithmic one): `most` or a few less."""
        if self.log and self.high / self.low > 30:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, 1 + (last - first) // most)]
        apart = _round_up((self.high - self.low) / most, self._whole)
        first, last = math.ceil(self.low / apart - 1e-9), math.floor(self.high / apart + 1e-9)
        return [number * apart for number in range(first, last + 1)]

    def _ends(self, values: Floats | float) -> tuple[float, float, Floats | float]:
        return self.low, self.high, np.maximum(values, self.low / 10) if self.log else values


def tick_text(value: float) -> str:
    """20_000 -> "20k", 1_500 -> "1500", 0.0025 -> "0.0025": nothing is rounded, because ticks are round."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (unit if unit > 1e3 else 1e4):
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


class Chart:
    """A figure with axes; what is added later is drawn on top."""

    def __init__(
        self, title: str, unit: str, x: Axis, y: Axis, *, wide: bool = False, tall: bool = False
    ) -> None:
        self._title, self._unit, self._x, self._y = title, unit, x, y
        self._wide, self._tall = wide, tall
        self._shapes: list[str] = []
        self._legend: list[str] = []
        self._told: dict[str, str] = {}  # name -> text for people who cannot see the chart
        self._levels: list[tuple[float, str]] = []
        self.note = ""  # below the chart

    def line(self, curve: Curve, style: str, name: str = "") -> None:
        """style: a class of the page's CSS. A name puts the line into the legend. A single point is drawn as
        a dot."""
        points = self._points(curve)
        if len(curve) == 1:
            self._shapes.append(f'<path class="{style} point" d="M{points}h0"/>')
        elif len(curve):
            self._shapes.append(f'<polyline class="{style}" points="{points}"/>')
        self._name(curve, style, name)

    def dots(self, curve: Curve, name: str) -> None:
        """Each dot shows its step and value when the pointer rests on it."""
        for step, value, point in zip(curve.steps, curve.values, self._points(curve).split(), strict=True):
            title = f"<title>step {step:.0f}: {value:.4g}</title>"
            self._shapes.append(f'<path class="dot" d="M{point}h0">{title}</path>')
        self._name(curve, "dot", name)

    def level(self, value: float, name: str) -> None:
        """A horizontal line across the chart, with its name on it."""
        at = self._from_top(value)
        self._shapes.append(f'<path class="level" d="M0 {at:.1f}H{_SIZE}"/>')
        self._levels.append((at / _SIZE, name))

    def stack(self, curves: Sequence[tuple[Curve, str, str]]) -> None:
        """Areas on top of each other: (curve, style, name)s, all with the same steps. If there is one step
        only, the areas are as wide as the chart."""
        steps = curves[0][0].steps
        sides = np.array([steps[0] - 1, steps[0]]) if len(steps) == 1 else steps
        floor = np.zeros(len(sides))
        for curve, style, name in curves:
            ceiling = floor + curve.values
            there = self._points(Curve(sides, ceiling))
            back = self._points(Curve(sides[::-1], floor[::-1]))
            self._shapes.append(f'<polygon class="{style}" points="{there} {back}"/>')
            self._name(curve, style, name)
            floor = ceiling

    def html(self) -> str:
        """The chart as a <figure>."""
        grid, words = [], []
        for value in self._y.ticks(8 if self._tall else 5):
            top = f'style="top:{self._from_top(value) / _SIZE:.2%}"'
            grid.append(f"<i {top}></i>")
            words.append(f'<span class="y" {top}>{tick_text(value)}</span>')
        for value in self._x.ticks(8 if self._wide else 5):
            left = float(self._x.place(value))
            words.append(f'<span class="x" style="left:{left:.2%}">{tick_text(value)}</span>')
        for at, name in _spread(self._levels):
            words.append(f'<span class="name" style="top:{at:.2%}">{html.escape(name)}</span>')
        legend = f'<p class="legend">{"".join(self._legend)}</p>' if self._legend else ""
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        told = [text for name, text in self._told.items() if name] or list(self._told.values())
        label = html.escape("; ".join([f"{self._title}, {self._unit}".rstrip(", "), *told]))
        # The grid comes first and words come last, so that no curve hides a word.
        return (
            f"<figure><figcaption>{html.escape(self._title)} <small>{html.escape(self._unit)}</small>"
            f'</figcaption>{legend}<div class="plot{" tall" if self._tall else ""}">{"".join(grid + words)}'
            f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}">{"".join(self._shapes)}</svg></div>'
            f"{note}</figure>"
        )

    def _points(self, curve: Curve) -> str:
        """The points in SVG's notation; points far outside are moved closer, where they are still not
        seen."""
        x = self._x.place(curve.steps) * _SIZE
        y = (1 - np.clip(self._y.place(curve.values), -0.5, 1.5)) * _SIZE
        return " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True))

    def _from_top(self, value: float) -> float:
        return float(1 - self._y.place(value)) * _SIZE

    def _name(self, curve: Curve, style: str, name: str) -> None:
        if not len(curve):
            return
        ends = dict.fromkeys((0, len(curve) - 1))
        values = " to ".join(f"{curve.values[at]:.4g} at step {curve.steps[at]:.0f}" for at in ends)
        self._told[name] = f"{name} {values}".lstrip()
        if name:
            self._legend.append(f'<span><i class="{style}"></i>{html.escape(name)}</span>')


def _round_up(number: float, whole: bool) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten; whole: only whole numbers."""
    power = 10.0 ** math.floor(math.log10(number if not whole else max(number, 1.0)))
    steps = (step * power for step in (1, 2, 2.5, 5, 10))
    return next(step for step in steps if step >= number * (1 - 1e-9) and (not whole or step.is_integer()))


def _spread(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The labels from above, each moved down if it would lie on the one before."""
    placed: list[tuple[float, str]] = []
    for at, name in sorted(labels):
        placed.append((max(at, placed[-1][0] + _LABEL_APART) if placed else at, name))
    return placed
