"""Published measurements that the planner is held against, as CSV files beside this one.

A file begins with lines `# ...`: where its figures come from and what its columns mean. Where rows have
different origins there is a column `source` too. Cells are text; an empty one is unknown.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Table:
    """One file."""

    name: str
    source: str  # the lines at its head
    rows: tuple[dict[str, str], ...]


def names() -> tuple[str, ...]:
    """Of all tables that there are."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".csv") for file in files if file.name.endswith(".csv")))


def read(name: str) -> Table:
    """The table in `name`.csv. FileNotFoundError if there is none, ValueError without a source or a row."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    lines = text.splitlines()
    head = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    rows = tuple(csv.DictReader(line for line in lines if not line.startswith("#")))
    if not head or not rows:
        raise ValueError(f"{name}.csv has {len(head)} lines of source and {len(rows)} rows; both are needed")
    return Table(name, " ".join(head), rows)
