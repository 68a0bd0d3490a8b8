"""Options of `imece bench planner`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imece.bench.planner import planner
from imece.cli.bench_values import read_choices
from imece.errors import UserError
from imece.plan.accuracy import memory as accuracy_memory
from imece.plan.accuracy import steps as accuracy_time


@dataclass(frozen=True)
class PlannerOptions:
    """Options of `imece bench planner`."""

    tables: str = ""
    """Which tables: a list. By default all of them, with the fits and the time of a search."""
    rows: Path | None = None
    """Judge the rows of this CSV file, which has the columns of the one table that --tables names."""
    worst: int = 3
    """Name so many rows of each table, the worst first, of those that are off by 5 % or more."""
    page: Path | None = None
    """Write a page in Markdown to this file."""
    plot: Path | None = None
    """Draw predicted against measured to this PNG file."""
    json: Path | None = None
    """Write all rows to this file."""

    def plan(self) -> planner.Plan:
        """What to judge. UserError for options that cannot be met."""
        if self.worst < 0:
            raise UserError(f"--worst {self.worst}: 0 or more")
        if self.page is not None and self.tables:
            raise UserError("--page is of all tables: leave --tables out")
        chosen = tuple(read_choices(self.tables, planner.TABLES, "--tables", or_none=True))
        readable = (*accuracy_time.TABLES, *accuracy_memory.TABLES)
        if self.rows is not None and (len(chosen) != 1 or chosen[0] not in readable):
            raise UserError(f"--rows needs --tables with one of {', '.join(readable)}")
        return planner.Plan(chosen, self.rows, self.worst)
