"""The plot of `imece bench planner`: predicted against measured, a panel for each table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imece.bench.planner.planner import Table
from imece.observe.pictures import legend_below, panels, save
from imece.plan.accuracy import statistics as accuracy
from imece.plan.accuracy.statistics import Row

_STYLES: dict[bool, dict[str, Any]] = {  # by whether the row was held out
    False: {"color": "#b45f06", "marker": "o", "label": "fitted on"},
    True: {"color": "#0b5394", "marker": "^", "label": "held out"},
}
_MANY = 60  # rows of a table whose points would cover each other


def draw(tables: Sequence[Table], path: Path) -> None:
    """Write a PNG. Beside others a table with fewer than five rows is left out: a line shows as much."""
    shown = [table for table in tables if len(table.rows) >= 5] or list(tables)
    figure, grid = panels(len(shown), 3, 4.2, 3.7, 0.9)
    for axes, table in zip(grid, shown, strict=True):
        _panel(axes, table)
    legend_below(figure, grid, 2 if len(shown) == 1 else 4)
    figure.suptitle("The planner beside published measurements", fontsize=12)
    save(figure, path, dpi=100)


def _panel(axes: Any, table: Table) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    numbers = [number for row in table.rows for number in (row.measured, row.predicted) if number > 0]
    low, high = min(numbers) / 2, max(numbers) * 2
    axes.plot([low, high], [low, high], color="#444444", linewidth=1.0, label="exact")
    near = {"color": "#cccccc", "alpha": 0.5, "linewidth": 0, "label": "within 20 %"}
    axes.fill_between([low, high], [low * 0.8, high * 0.8], [low * 1.2, high * 1.2], **near)
    for held_out, style in _STYLES.items():
        of: list[Row] = [row for row in table.rows if row.held_out == held_out]
        at = [row.measured for row in of], [row.predicted for row in of]
        if of:
            axes.scatter(*at, s=9 if len(table.rows) > _MANY else 25, alpha=0.7, linewidth=0, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
        if high < 100 * low:  # there may be no power of ten
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(True, which="major", alpha=0.3)
    found = accuracy.summary(table.rows, 0)
    axes.set_title(f"{table.name}: {found.rows} rows, median error {found.median:.1%}", fontsize=9)
    axes.set_xlabel(f"measured, {table.unit}", fontsize=8)
    axes.set_ylabel(f"predicted, {table.unit}", fontsize=8)
    axes.tick_params(labelsize=7)
