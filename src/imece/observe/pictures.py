"""Writes a picture that matplotlib has drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, to: Path | IO[bytes], *, dpi: int = 120, kind: str | None = None) -> None:
    """Write the figure. kind: the format; None: as the file's name ends. OSError if that fails.

    Letters that matplotlib's font lacks, in a run's name say, become boxes, without a warning for each.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(to, format=kind, dpi=dpi)
