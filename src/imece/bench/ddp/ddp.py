"""`imece bench ddp`: torch's own DistributedDataParallel (or fully_shard) on shm beside Gloo."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from imece.bench.crew import Crew, slowest
from imece.bench.ddp.rank import BACKENDS, WRAP
from imece.bench.rounds import Taken, alternate
from imece.bench.targets import Verdict
from imece.listing import many

_MODULE = "imece.bench.ddp.rank"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    ranks: int
    rounds: int
    steps: int
    """Training steps in each round."""
    wrap: str
    """"ddp" or "fully_shard"."""


@dataclass
class Results:
    """Seconds of one step in each round, on the slowest rank."""

    plan: Plan
    parameters: int
    tokens: int
    """Per rank and step."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Rank 0's loss at the end of each round."""
    taken: Taken = field(default_factory=Taken)
    """Processor time that others took meanwhile."""

    @property
    def ratio(self) -> float:
        """How many times as fast shm is as Gloo."""
        return statistics.median(self.seconds["gloo"]) / statistics.median(self.seconds["shm"])

    @property
    def same_losses(self) -> bool:
        """Whether both backends trained the same model: equal losses up to rounding."""
        pairs = zip(self.losses["shm"], self.losses["gloo"], strict=True)
        return all(abs(ours - other) <= 1e-3 * abs(other) for ours, other in pairs)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self) | {"ratio": self.ratio}


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure and print."""
    extra = [{WRAP: plan.wrap}] * plan.ranks
    with Crew.of_ranks(plan.wrap, _MODULE, plan.ranks, extra=extra) as crew:
        facts = crew.ask("describe")[0]
        results = Results(plan, facts["parameters"], facts["tokens"])
        for backend in BACKENDS:  # the first steps make buckets and optimizer states
            crew.ask("measure", backend=backend, steps=2)
        rounds, results.taken = alternate(
            BACKENDS, plan.rounds, lambda backend: crew.ask("measure", backend=backend, steps=plan.steps)
        )
        for backend in BACKENDS:
            results.seconds[backend] = [slowest(each) for each in rounds[backend]]
            results.losses[backend] = [each[0]["loss"] for each in rounds[backend]]
    for line in lines(results):
        say(line)
    return results


def lines(results: Results) -> list[str]:
    """The result in three lines."""
    plan, size = results.plan, results.parameters / 1e6
    name = {"ddp": "DistributedDataParallel", "fully_shard": "fully_shard"}[plan.wrap]
    shown = [
        f"torch's {name}, a decoder of {size:.1f}M parameters, {results.tokens} tokens a rank, "
        f"{plan.ranks} ranks, 1 thread a rank, medians of {many(plan.rounds, 'alternating round')}",
        *(
            f"  {backend:<6}{statistics.median(results.seconds[backend]) * 1e3:>9.1f} ms/step   "
            f"last loss {results.losses[backend][-1]:.4f}"
            for backend in BACKENDS
        ),
        *results.taken.lines,
    ]
    if not results.same_losses:
        shown.append("  WRONG: the two backends did not train the same model")
    return shown


def judged(results: Results) -> list[Verdict]:
    """The target."""
    ratio = results.ratio
    return [Verdict("shm faster than gloo", ratio > 1, f"{ratio:.3f} x", ratio)]
