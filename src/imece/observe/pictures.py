"""Pictures by matplotlib: panels, one legend for all of them, and how a picture is written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from imece.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def panels(
    count: int, columns: int, width: float, height: float, margin: float, least: float = 0.0, **axes: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, each `width` x `height` inches, in rows of up to `columns`.

    margin: inches for titles and the legend. least: width of the figure. axes: arguments of `subplots`.
    """
    from matplotlib.figure import Figure  # this import takes a second, which only drawing should pay

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure((max(least, width * columns), margin + height * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **axes).flat)
    for each in grid[count:]:
        each.set_visible(False)
    return figure, grid[:count]


def legend_below(figure: Figure, all_axes: Sequence[Axes], columns: int) -> None:
    """One legend for all panels: each label once."""
    named = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [*named.values()], [*named], loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )


def save(figure: Figure, to: Path | IO[bytes], *, dpi: int = 120) -> None:
    """Write the figure: to a file, in the format of its ending and with its folder made, or as PNG. OSError
    if that fails: then there is no file, or the old one.

    Letters that matplotlib's font lacks, in a run's name say, become boxes, without a warning for each.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        if isinstance(to, Path):
            to.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(to) as file:
                figure.savefig(file, format=to.suffix[1:].lower(), dpi=dpi)
        else:
            figure.savefig(to, format="png", dpi=dpi)
