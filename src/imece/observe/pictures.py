"""Writes a picture that matplotlib has drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING

from imece.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, to: Path | IO[bytes], *, dpi: int = 120, kind: str | None = None) -> None:
    """Write the figure. kind: the format; None: as the file's name ends. OSError if that fails: then there is
    no file, or the old one.

    Letters that matplotlib's font lacks, in a run's name say, become boxes, without a warning for each.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        if isinstance(to, Path):
            with whole_file(to) as file:
                figure.savefig(file, format=kind or to.suffix[1:].lower(), dpi=dpi)
        else:
            figure.savefig(to, format=kind, dpi=dpi)
