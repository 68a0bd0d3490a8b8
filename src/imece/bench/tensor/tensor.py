"""`imece bench tensor`: a step of ranks that divide matrices, beside one rank and torch's own way."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from imece.bench import report
from imece.bench.crew import Crew, slowest
from imece.bench.options import Options, counts
from imece.bench.reference_model import REFERENCE
from imece.bench.rounds import Taken, alternate
from imece.bench.tensor.ways import ALONE, WAYS, shape
from imece.errors import UserError
from imece.listing import many, size_text
from imece.model_parallel.plan import check_counts

_MODULE = "imece.bench.tensor.rank"
_FIRST = 2  # steps: the second loss depends on the first gradients
_NEAR = 1e-3  # relative difference of that loss between ways of training the same model


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    ranks: int = 2
    """Number of ranks that divide the matrices."""
    tokens: Annotated[tuple[int, ...], counts("--tokens")] = (128, 512)
    """Tokens per step: a list."""
    vocabularies: Annotated[tuple[int, ...], counts("--vocabularies")] = (512, 16384)
    """Entries of the vocabulary: a list."""
    rounds: int = 7
    """Rounds, in each of which all ways are measured."""
    steps: int = 4
    """Training steps in each round."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """128 tokens, 512 entries, 2 rounds of 1 step: to see that it works, not to quote."""

    def check(self) -> None:
        self.at_least_one("rounds", "steps")
        if self.ranks < 2:
            raise UserError(f"--ranks {self.ranks}: at least 2 are needed to divide a matrix")
        model = shape(self.vocabularies[0])
        check_counts({"heads": model.heads, "mlp_width": model.mlp_width}, self.ranks)
        for each in self.vocabularies:
            check_counts({"--vocabularies": each}, self.ranks)
        for each in self.tokens:
            length = min(each, REFERENCE.length)
            if each % length or length % self.ranks:
                raise UserError(
                    f"--tokens {each}: up to {REFERENCE.length}, or a multiple of it, and for {self.ranks} "
                    "ranks to divide"
                )

    def shortened(self) -> Plan:
        return replace(self, tokens=(128,), vocabularies=(512,), rounds=2, steps=1)


@dataclass(frozen=True)
class Row:
    """One way with one vocabulary and number of tokens."""

    way: str
    vocabulary: int
    tokens: int
    seconds: list[float]
    """Per step in each round, on the slowest rank."""
    loss: float
    """Of the second step."""
    memory_bytes: int
    """Peak of forward and backward beyond parameters, gradients and optimizer, on the rank that has most."""

    @property
    def step_s(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds)


@dataclass
class Results(report.Results):
    """Results for all ways."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    """Processor time that others took meanwhile, for each vocabulary and number of tokens."""

    @property
    def wrong(self) -> list[str]:
        """Ways that did not train the same model as one rank did."""
        known = {(each.vocabulary, each.tokens): each.loss for each in self.rows if each.way == ALONE}
        return [
            f"{each.way}: a loss of {each.loss:g}, and {expected:g} on one rank"
            for each in self.rows
            if not abs(each.loss - (expected := known[each.vocabulary, each.tokens])) <= _NEAR * expected
        ]


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    results = Results(plan)
    with Crew.of_ranks(f"{plan.ranks} ranks", _MODULE, plan.ranks) as crew:
        for vocabulary in plan.vocabularies:
            for tokens in plan.tokens:
                rows, taken = _measure(crew, plan, vocabulary, tokens)
                results.rows += rows
                results.taken.append(taken)
                for line in [*_table(plan, rows), *taken.lines]:
                    say(line)
    return results


def _measure(crew: Crew, plan: Plan, vocabulary: int, tokens: int) -> tuple[list[Row], Taken]:
    losses: dict[str, float] = {}

    def measure(way: str) -> float:
        return slowest(crew.ask("measure", way=way, tokens=tokens, steps=plan.steps))

    for way in WAYS:
        # New models, whose first steps prepare what the later ones use. Later losses say nothing: rounding
        # grows from step to step when the same batch is learnt again and again.
        crew.ask("build", way=way, vocabulary=vocabulary)
        losses[way] = crew.ask("measure", way=way, tokens=tokens, steps=_FIRST)[0]["loss"]
    seconds, taken = alternate(WAYS, plan.rounds, measure)
    rows = [
        Row(
            way, vocabulary, tokens, seconds[way], losses[way],
            max(int(each["bytes"]) for each in crew.ask("memory", way=way, tokens=tokens)),
        )
        for way in WAYS
    ]  # fmt: skip
    return rows, taken


def _table(plan: Plan, rows: list[Row]) -> list[str]:
    alone = next(row for row in rows if row.way == ALONE)
    return [
        f"\n{plan.ranks} ranks, {alone.tokens} tokens a step, a vocabulary of {alone.vocabulary:,}; "
        f"1 thread a rank, medians of {many(plan.rounds, 'round')}",
        "  way                     step      one rank / it   forward and backward need",
        *(
            f"  {row.way:<20}{row.step_s * 1e3:>8.1f} ms{alone.step_s / row.step_s:>12.2f}"
            f"          {size_text(row.memory_bytes)}"
            for row in rows
        ),
    ]
