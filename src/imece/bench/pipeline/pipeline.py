"""`imece bench pipeline`: how long ranks idle in each schedule, beside (p - 1) / (v m), and what each keeps.

With more ranks than cores, or --wait, blocks wait instead of computing: that measures the schedule and what
is lost between ranks, not the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from imece.bench import report
from imece.bench.crew import Crew
from imece.bench.options import Options, counts, names
from imece.bench.pipeline.rank import BLOCKS, EMULATED, SHAPE, WAIT_S
from imece.errors import UserError
from imece.listing import many, size_text
from imece.model_parallel.schedules import SCHEDULES, check_schedule, ideal_bubble
from imece.system.control_groups import usable_cores

_MODULE = "imece.bench.pipeline.rank"


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    stages: Annotated[tuple[int, ...], counts("--stages")] = (2, 4)
    """Ranks of a pipeline: a list. If there are more ranks than cores, blocks wait instead of computing."""
    micro_batches: Annotated[tuple[int, ...], counts("--micro-batches")] = (1, 2, 4, 8, 16)
    """Micro-batches per batch: a list. Numbers that a schedule cannot run are left out."""
    schedules: Annotated[tuple[str, ...], names("--schedules", SCHEDULES)] = SCHEDULES
    """Which schedules: a list."""
    steps: int = 5
    """Steps of each measurement."""
    wait: bool = False
    """Let blocks wait instead of computing for any number of ranks, if others use the cores too."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """2 ranks, 2 and 4 micro-batches, 1 step: to see that it works, not to quote."""

    def check(self) -> None:
        if wrong := [each for each in self.stages if not 2 <= each <= BLOCKS]:
            raise UserError(f"--stages {wrong[0]}: from 2 to {BLOCKS}, the blocks of the model")
        if wrong := [each for each in self.micro_batches if each > 256]:
            raise UserError(f"--micro-batches {wrong[0]}: 256 at most")
        self.at_least_one("steps")

    def shortened(self) -> Plan:
        return replace(self, stages=(2,), micro_batches=(2, 4), steps=1)


@dataclass(frozen=True)
class Row:
    """One schedule with one number of micro-batches."""

    ranks: int
    emulated: bool
    schedule: str
    micro_batches: int
    bubbles: list[float]
    """For each step the part of its time in which ranks idle, on average."""
    kept_bytes: int
    """Bytes kept for backward at the peak, on the rank that keeps most."""

    @property
    def ideal(self) -> float:
        """The schedule's bubble if all stages cost the same and messages take no time."""
        return ideal_bubble(self.micro_batches, _chunks(self.schedule), self.ranks)

    @property
    def bubble(self) -> float:
        """The median step's bubble."""
        return statistics.median(self.bubbles)


@dataclass
class Results(report.Results):
    """Results for all pipelines."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    results = Results(plan)
    for ranks in plan.stages:
        emulated = plan.wait or ranks > usable_cores()
        for line in _head(ranks, emulated, plan.steps):
            say(line)
        extra = [{EMULATED: str(int(emulated))}] * ranks
        with Crew.of_ranks(f"{ranks} stages", _MODULE, ranks, extra=extra) as crew:
            for schedule in plan.schedules:
                for micro_batches in plan.micro_batches:
                    if _runs(schedule, micro_batches, ranks):
                        row = _measure(crew, ranks, emulated, schedule, micro_batches, plan.steps)
                        results.rows.append(row)
                        say(_line(row))
    return results


def _measure(crew: Crew, ranks: int, emulated: bool, schedule: str, micro_batches: int, steps: int) -> Row:
    built = crew.ask("build", schedule=schedule, micro_batches=micro_batches)
    bubbles = []
    for _ in range(steps):
        told = crew.ask("step")
        whole_s = max(each["end_s"] for each in told) - min(each["start_s"] for each in told)
        bubbles.append(1 - sum(each["busy_s"] for each in told) / (ranks * whole_s))
    kept = max(each["kept_bytes"] for each in built)
    return Row(ranks, emulated, schedule, micro_batches, bubbles, kept)


def _chunks(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


def _runs(schedule: str, micro_batches: int, ranks: int) -> bool:
    if _chunks(schedule) * ranks > BLOCKS or (schedule == "interleaved" and micro_batches % ranks):
        return False  # with fewer than p micro-batches nothing can interleave
    try:
        check_schedule(schedule, micro_batches, _chunks(schedule), ranks)
    except ValueError:
        return False
    return True


def _head(ranks: int, emulated: bool, steps: int) -> list[str]:
    what = (
        f"blocks that only wait, {WAIT_S * 1e3:.0f} ms forward and {2 * WAIT_S * 1e3:.0f} ms backward: the "
        "schedule is measured, not the machine"
        if emulated
        else f"blocks of width {SHAPE.width}, micro-batches of {SHAPE.length} tokens, 1 thread a rank"
    )
    return [
        f"\n{ranks} ranks, {BLOCKS} {what}; medians of {many(steps, 'step')}",
        "  schedule        m   idle/busy   (p-1)/(vm)    idle     ideal   keeps for backward",
    ]


def _line(row: Row) -> str:
    idle, ideal = (each / (1 - each) for each in (row.bubble, row.ideal))
    kept = "" if row.emulated else f"   {size_text(row.kept_bytes)}"
    return (
        f"  {row.schedule:<12}{row.micro_batches:>5}{idle:>12.3f}{ideal:>13.3f}"
        f"{row.bubble:>8.1%}{row.ideal:>10.1%}{kept}"
    )
