"""`imece bench planner`: predictions of step time and memory beside published measurements.

Nothing runs on a device: tables are read, predicted and judged. The rival is a constant utilisation, fitted
in hindsight on the very rows that it predicts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from imece.bench import report
from imece.bench.options import Options, names
from imece.bench.targets import Verdict, at_least, at_most
from imece.errors import UserError
from imece.plan.accuracy import memory as accuracy_memory
from imece.plan.accuracy import parts as accuracy_parts
from imece.plan.accuracy import statistics as accuracy
from imece.plan.accuracy import steps as accuracy_time
from imece.plan.accuracy.stalls import stalls
from imece.plan.accuracy.statistics import Row, Summary
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import find_model
from imece.plan.presets import find_cluster
from imece.plan.setup import Parallel, Recipe, Setup, Strategy
from imece.plan.speed.step_time import step_time

TABLES = (*accuracy_time.TABLES, *accuracy_parts.TABLES, *accuracy_memory.TABLES)
CANDIDATES = 10_000
_OFF = 0.05  # a smaller error is none that anybody asks about
_UNITS = {"zero_states": "GB", "korthikanti_memory": "GiB or %", "own_engine": "MB"}  # others: GiB
_STRATEGIES: tuple[Strategy, ...] = ("replicate", "zero1", "zero2", "zero3", "hybrid")


@dataclass(frozen=True)
class Plan(Options):
    """What to judge."""

    tables: Annotated[tuple[str, ...], names("--tables", TABLES, or_none=True)] = ()
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

    def check(self) -> None:
        if self.worst < 0:
            raise UserError(f"--worst {self.worst}: 0 or more")
        if self.page is not None and self.tables:
            raise UserError("--page is of all tables: leave --tables out")
        readable = (*accuracy_time.TABLES, *accuracy_memory.TABLES)
        if self.rows is not None and (len(self.tables) != 1 or self.tables[0] not in readable):
            raise UserError(f"--rows needs --tables with one of {', '.join(readable)}")


@dataclass(frozen=True)
class Table:
    """One table with its predictions."""

    name: str
    unit: str
    rows: tuple[Row, ...]

    @property
    def parts(self) -> list[tuple[str, list[Row]]]:
        """All rows; and if something was fitted on some of them, these and the others apart."""
        fitted = [row for row in self.rows if not row.held_out]
        held_out = [row for row in self.rows if row.held_out]
        parts = [("all rows", list(self.rows))]
        return [*parts, ("fitted on", fitted), ("held out", held_out)] if fitted and held_out else parts

    @property
    def has_rival(self) -> bool:
        """Whether a constant could be fitted."""
        return all(row.work > 0 for row in self.rows)


@dataclass
class Results(report.Results):
    """All tables, in order."""

    plan: Plan
    tables: list[Table] = field(default_factory=list)
    fits: dict[str, accuracy_memory.Fits] = field(default_factory=dict)
    candidates_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan),
            "candidates_s": self.candidates_s,
            "fits": {name: asdict(fits) for name, fits in self.fits.items()},
            "tables": [
                {"name": table.name, "unit": table.unit, "rows": [asdict(row) for row in table.rows]}
                for table in self.tables
            ],
        }


def _table(name: str, own: Path | None) -> Table:
    """The table with its predictions. own: a file with rows to predict instead, not for tables of parts."""
    if name in accuracy_parts.TABLES:
        return Table(name, "s", tuple(accuracy_parts.TABLES[name]()))
    if name in accuracy_time.TABLES:
        return Table(name, "s", tuple(accuracy_time.rows(name, own)))
    return Table(name, _UNITS.get(name, "GiB"), tuple(accuracy_memory.rows(name, own)))


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Predict everything and report each table."""
    results = Results(plan)
    for name in TABLES:
        if plan.tables and name not in plan.tables:
            continue
        table = _table(name, plan.rows)
        results.tables.append(table)
        for line in lines(table, plan.worst):
            say(line)
    if plan.rows is not None and "ultrascale_memory" in plan.tables:
        results.fits = {"these rows": accuracy_memory.ultrascale_fits(own=plan.rows)}
    if not plan.tables:
        results.fits = {
            "ultrascale": accuracy_memory.ultrascale_fits(),
            "ultrascale, 3B (held out)": accuracy_memory.ultrascale_fits("3B"),
            "llm_foundry": accuracy_memory.llm_foundry_fits(),
        }
        results.candidates_s = candidates_s()
        say(f"{CANDIDATES:,} candidates, memory and time: {results.candidates_s:.2f} s")
    for name, fits in results.fits.items():
        say(f"fits, {name}: {fits_text(fits)}")
    return results


def lines(table: Table, worst: int) -> list[str]:
    """The report of one table."""
    shown = [f"\n{table.name}"]
    for what, rows in table.parts:
        shown.append(f"  {what:<10} {_errors(accuracy.summary(rows, 0))}")
    if table.has_rival:
        utilisation, rival = accuracy.constant(table.rows)
        shown.append(f"  constant   {_errors(accuracy.summary(rival, 0))}   ({utilisation:.1%} of the peak)")
        shown.append(f"  skill over the constant {accuracy.skill(table.rows):.2f}")
    if table.name == "ultrascale":
        shown += ["  " + line for line in cell_lines(table)]
    for row in accuracy.summary(table.rows, worst).worst:
        if abs(row.error) < _OFF:
            break
        shown.append(
            f"    {row.error:+7.0%}  {row.name}: {row.measured:.4g} {table.unit}, not {row.predicted:.4g}"
        )
    return shown


def cell_lines(table: Table) -> list[str]:
    """Order and choice in each cell, beside the constant's."""
    rival = accuracy.cells(accuracy.constant(table.rows)[1])
    shown = [f"{'cell':<13} rows  median    bias    tau (constant)  regret (constant)  slow  tau without"]
    for name, rows in accuracy.cells(table.rows).items():
        found, usual = accuracy.summary(rows, 0), not_slow(rows)
        tau, other, without = (accuracy.kendall(some) for some in (rows, rival[name], usual))
        shown.append(
            f"{name:<13} {found.rows:4d}  {found.median:6.1%}  {found.bias:+6.1%}  "
            f"{_number(tau)}   ({_number(other)})  "
            f"{accuracy.regret(rows):6.1%}   ({accuracy.regret(rival[name]):4.0%})"
            f"   {len(rows) - len(usual):4d}        {_number(without)}"
        )
    return shown


def not_slow(rows: Sequence[Row]) -> list[Row]:
    """Rows without those that took more than twice the prediction: see the page for what is known of them."""
    return [row for row in rows if row.measured <= 2 * row.predicted]


def fits_text(fits: accuracy_memory.Fits) -> str:
    """The counts of successes and failures in words."""
    text = f"{fits.ran_passed} of {fits.ran} that ran are predicted to fit"
    if fits.too_large:
        text += f"; {fits.too_large_flagged} of {fits.too_large} that were too large are predicted not to"
    return text


def judged(results: Results) -> list[Verdict]:
    tables = {table.name: table for table in results.tables}
    shown = []
    for text, name, figure, bound in _ERRORS:
        found = figure(accuracy.summary(tables[name].rows, 0)) if name in tables else None
        shown.append(at_most(text, found, bound, "{:.1%}"))
    shown += _judged_cells(tables.get("ultrascale"), published=results.plan.rows is None)
    shown.append(at_most(f"{CANDIDATES:,} candidates in 2 s", results.candidates_s, 2, "{:.2f} s"))
    fits = results.fits.get("ultrascale")
    if fits is None:
        return shown
    passed, flagged = fits.ran_passed / fits.ran, fits.too_large_flagged / fits.too_large
    return [
        *shown,
        at_least("ultrascale: at least 98 % of successes fit", passed, 0.98, "{:.1%}"),
        at_least("ultrascale: at least 85 % of too large ones do not", flagged, 0.85, "{:.1%}"),
    ]


def _judged_cells(table: Table | None, published: bool) -> list[Verdict]:
    taus_text = "ultrascale, order in every cell: Kendall tau at least 0.7"
    regret_text = "ultrascale, regret of a choice: median at most 10 %, p90 25 %"
    if table is None:
        return [Verdict(taus_text), Verdict(regret_text)]
    taus = accuracy.of_cells(table.rows, accuracy.kendall)
    regrets = list(accuracy.of_cells(table.rows, accuracy.regret).values())
    median, p90 = statistics.median(regrets), float(np.quantile(regrets, 0.9))
    low = {name: tau for name, tau in taus.items() if tau < 0.7}
    figure = f"{min(taus.values()):.2f} to {max(taus.values()):.2f}"
    figure += f"; below: {', '.join(f'{name} {tau:.2f}' for name, tau in low.items())}" if low else ""
    if published:
        figure += f"; {min(stalls().unaware.values()):.2f} if nanotron's version were not known"
    return [
        Verdict(taus_text, not low, figure, min(taus.values())),
        Verdict(regret_text, median <= 0.10 and p90 <= 0.25, f"{median:.1%}, {p90:.1%}", median),
    ]


_ERRORS: tuple[tuple[str, str, Callable[[Summary], float], float], ...] = (
    ("ultrascale, time: median error at most 20 %", "ultrascale", lambda found: found.median, 0.20),
    ("llm_foundry: MAPE at most 8 %", "llm_foundry", lambda found: found.mape, 0.08),
    ("torchtitan, bf16: MAPE at most 8 %", "torchtitan", lambda found: found.mape, 0.08),
    ("vtrain, one host: MAPE at most 20 %", "vtrain", lambda found: found.mape, 0.20),
    ("SC21 table 1: MAPE at most 6 %", "sc21", lambda found: found.mape, 0.06),
    ("ultrascale_memory: median error at most 7 %", "ultrascale_memory", lambda found: found.median, 0.07),
    ("ultrascale_memory: MAPE at most 10 %", "ultrascale_memory", lambda found: found.mape, 0.10),
)


def candidates_s() -> float:
    """Seconds that predicting memory and time of CANDIDATES different setups takes."""
    setups = _candidates()
    cluster = find_cluster("H100", 8, 8)
    before = time.perf_counter()
    for setup in setups:
        memory(setup)
        step_time(setup, cluster)
    return time.perf_counter() - before


def _candidates() -> list[Setup]:
    model, ranks = find_model("llama-8b"), 64
    found: list[Setup] = []
    for seq in range(1024, 65536, 1024):
        for strategy in _STRATEGIES:
            for tensor in (1, 2, 4, 8):
                for pipeline in (1, 2, 4, 8):
                    data = ranks // tensor // pipeline
                    for micro_batch in (1, 2, 4):
                        parallel = Parallel(strategy, data, min(data, 8), tensor, pipeline=pipeline)
                        found.append(Setup(model, parallel, Recipe(seq, micro_batch, accumulation=8)))
                        if len(found) == CANDIDATES:
                            return found
    raise AssertionError(f"only {len(found)} candidates")


def _errors(found: Summary) -> str:
    return (
        f"{found.rows:4d} rows   MAPE {found.mape:6.1%}   median {found.median:6.1%}   "
        f"p90 {found.p90:6.1%}   bias {found.bias:+6.1%}"
    )


def _number(value: float | None) -> str:
    return "    -" if value is None else f"{value:5.2f}"
