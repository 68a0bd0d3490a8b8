"""Options of `imece bench recovery`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imece.bench.recovery.rank import SEQUENCES
from imece.bench.recovery.record import PARTS, STRATEGIES, Plan
from imece.cli.bench_values import at_least_one, read_choices
from imece.errors import UserError


@dataclass(frozen=True)
class RecoveryOptions:
    """Options of `imece bench recovery`."""

    ranks: int = 4
    """Number of ranks."""
    kills: int = 5
    """Kills for each strategy."""
    every_s: float = 8.0
    """Seconds between two kills, give or take half of it. Each kill waits until the last dead rank is
    replaced."""
    strategies: str = ",".join(STRATEGIES)
    """Which strategies: a list."""
    parts: str = ",".join(PARTS)
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

    def plan(self) -> Plan:
        """What to measure. UserError for options that cannot be met."""
        strategies = tuple(read_choices(self.strategies, STRATEGIES, "--strategies"))
        parts = tuple(read_choices(self.parts, PARTS, "--parts"))
        if not 2 <= self.ranks <= SEQUENCES:
            raise UserError(f"--ranks {self.ranks}: from 2 to {SEQUENCES}, the sequences of a step")
        at_least_one(self.kills, "--kills")
        at_least_one(self.torchrun_runs, "--torchrun-runs")
        at_least_one(self.checkpoint_every, "--checkpoint-every")
        if self.steps < 2:
            raise UserError(f"--steps {self.steps}: at least 2 are needed")
        if not 0 < self.every_s <= 3600:
            raise UserError(f"--every-s {self.every_s:g}: more than 0 and up to 3600 seconds")
        if self.quick:
            return Plan(strategies[:1], ("kills", "cost"), 2, 1, 2.0, 20, 2, 2, seed=self.seed, pause_s=0.02)
        return Plan(
            strategies, parts, self.ranks, self.kills, self.every_s, self.steps,
            torchrun_runs=self.torchrun_runs, checkpoint_every=self.checkpoint_every, seed=self.seed,
        )  # fmt: skip
