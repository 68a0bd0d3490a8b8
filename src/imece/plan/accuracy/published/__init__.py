"""Published measurements to compare the planner with, as CSV files beside this one.

A file begins with lines `# ...` that say where its figures come from and what its columns mean. If its rows
have different origins, it also has a column `source`. Cells are whole numbers or text; an empty
one is unknown.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from imece.errors import UserError


@dataclass(frozen=True)
class Table:
    """One file."""

    name: str
    source: str  # the lines at its top
    rows: tuple[dict[str, Any], ...]


def names() -> tuple[str, ...]:
    """The names of all tables."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".csv") for file in files if file.name.endswith(".csv")))


def read(name: str, own: Path | None = None) -> Table:
    """The table in `name`.csv, or in a file of your own with its columns.

    UserError if your own cannot be read or lacks a column. FileNotFoundError if there is no such table,
    ValueError if it is without a source or a row.
    """
    table = _table(name, resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8"))
    if own is None:
        return table
    try:
        found = _table(name, own.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{own}: {error.strerror}") from None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise UserError(f"{own}: {error}") from None
    missing = [column for column in table.rows[0] if column not in found.rows[0]]
    if missing:
        raise UserError(f"{own} has no column {', '.join(missing)}; table {name} has")
    return found


def _table(name: str, text: str) -> Table:
    lines = text.splitlines()
    head = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    rows = tuple({column: _cell(text) for column, text in row.items()} for row in table)
    if not head or not rows:
        raise ValueError(f"{name}.csv has {len(head)} lines of source and {len(rows)} rows; both are needed")
    return Table(name, " ".join(head), rows)


def _cell(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdecimal() else text
