"""What `imece bench recovery` measures, and its results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from imece.bench.recovery.runs import TorchKill
from imece.bench.rounds import ratio

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
PARTS = ("kills", "cost", "torchrun", "start")


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    strategies: tuple[str, ...] = STRATEGIES
    parts: tuple[str, ...] = PARTS
    ranks: int = 4
    kills: int = 5
    every_s: float = 8.0
    steps: int = 200
    """Steps after which parameters are compared; the run goes on until some time after the last kill."""
    cost_rounds: int = 15
    cost_steps: int = 10
    torchrun_runs: int = 3
    checkpoint_every: int = 10
    """In steps, under torchrun."""
    seed: int = 0
    pause_s: float = 0.0
    """Added to each step: for tests."""


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
    def kills_compared(self) -> int:
        """Kills that came before the parameters were compared."""
        return sum((fault["step"] or 0) < self.compared for fault in self.drill["faults"])


@dataclass
class Results:
    """All figures; those that were not measured are empty."""

    plan: Plan
    kills: dict[str, Kills] = field(default_factory=dict)
    cost: dict[str, dict[str, Any]] = field(default_factory=dict)
    torchrun: dict[str, list[TorchKill]] = field(default_factory=dict)
    start: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_survived(self) -> bool:
        """Whether every kill came and was survived, and every run ended and left nothing over."""
        return all(each.drill["passed"] and each.difference is not None for each in self.kills.values())

    @property
    def slower_start(self) -> float | None:
        """How many times torchrun's time imece needs to start: median of the rounds' ratios."""
        if not self.start:
            return None
        ours, others = self.start.values()
        return ratio(ours, others)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)
