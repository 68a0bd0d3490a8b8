"""Writes a picture that matplotlib has drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING

from imece.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
