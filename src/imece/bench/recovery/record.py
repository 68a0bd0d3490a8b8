"""What `imece bench recovery` measures, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from imece.bench import report
from imece.bench.options import Options, names
from imece.bench.recovery.rank import SEQUENCES
from imece.bench.recovery.runs import TorchKill
from imece.bench.rounds import ratio
from imece.errors import UserError

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
PARTS = ("kills", "cost", "torchrun", "start")


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    ranks: int = 4
    """Number of ranks."""
    kills: int = 5
    """Kills for each strategy."""
    every_s: float = 8.0
    """Seconds between two kills, give or take half of it. Each kill waits until the last dead rank is
    replaced."""
    strategies: Annotated[tuple[str, ...], names("--strategies", STRATEGIES)] = STRATEGIES
    """Which strategies: a list."""
    parts: Annotated[tuple[str, ...], names("--parts", PARTS)] = PARTS
    """What to measure: a list of kills, cost (when nothing fails), torchrun, start."""
    steps: int = 200
    """Steps after which parameters are compared with those of an undisturbed run."""
    torchrun_runs: int = 3
    """Runs of torchrun in each of two settings, with one kill each."""
    checkpoint_every: int = 10
    """Steps between two checkpoints under torchrun."""
    seed: int = 0
    """The seed of the kills: another one hits other ranks at other instants."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """2 ranks, 1 kill, the first strategy, no torchrun, no starts: to see that it works, not to quote."""

    @property
    def cost_rounds(self) -> int:
        """Rounds of the part "cost","""
        return 2 if self.quick else 15

    @property
    def cost_steps(self) -> int:
        """and steps in each of them."""
        return 2 if self.quick else 10

    @property
    def pause_s(self) -> float:
        """Added to each step, so that short runs can be hit."""
        return 0.02 if self.quick else 0.0

    def check(self) -> None:
        if not 2 <= self.ranks <= SEQUENCES:
            raise UserError(f"--ranks {self.ranks}: from 2 to {SEQUENCES}, the sequences of a step")
        self.at_least_one("kills", "torchrun_runs", "checkpoint_every")
        if self.steps < 2:
            raise UserError(f"--steps {self.steps}: at least 2 are needed")
        if not 0 < self.every_s <= 3600:
            raise UserError(f"--every-s {self.every_s:g}: more than 0 and up to 3600 seconds")

    def shortened(self) -> Plan:
        one, parts = self.strategies[:1], ("kills", "cost")
        return replace(self, strategies=one, parts=parts, ranks=2, kills=1, every_s=2.0, steps=20)


@dataclass
class Kills:
    """The kills in one strategy."""

    strategy: str
    step_s: float
    """Without kills."""
    drill: dict[str, Any]
    """The figures of `imece drill`."""
    goodput: float | None
    """Steps per second while there were kills, relative to the rate without."""
    difference: float | None
    """Relative difference to the undisturbed run's parameters, in norm. None if the run did not end."""
    compared: int
    """Steps after which parameters are compared."""

    @property
    def steps(self) -> int:
        """Finished steps, as far as a rank could report them."""
        return self.drill["seen"][-1][1] if self.drill["seen"] else 0

    @property
    def wrong(self) -> str:
        """What did not go as it should, if anything."""
        drill = self.drill
        if drill["passed"] and self.difference is not None:
            return ""
        left = f"; left behind: {', '.join(drill['left'])}" if drill["left"] else ""
        return (
            f"{drill['survived']} of {drill['plan']['kills']} kills came and were survived, "
            f"and the run ended with status {drill['status']}{left}"
        )

    @property
    def kills_compared(self) -> int:
        """Kills that came before the parameters were compared."""
        return sum((fault["step"] or 0) < self.compared for fault in self.drill["faults"])


@dataclass
class Results(report.Results):
    """All figures; those that were not measured are empty."""

    plan: Plan
    kills: dict[str, Kills] = field(default_factory=dict)
    cost: dict[str, dict[str, Any]] = field(default_factory=dict)
    torchrun: dict[str, list[TorchKill]] = field(default_factory=dict)
    start: dict[str, list[float]] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        found = self.kills.items()
        return [f"{name}: {why}" for name, each in found if (why := each.wrong)]

    @property
    def slower_start(self) -> float | None:
        """How many times torchrun's time imece needs to start: median of the rounds' ratios."""
        if not self.start:
            return None
        ours, others = self.start.values()
        return ratio(ours, others)
