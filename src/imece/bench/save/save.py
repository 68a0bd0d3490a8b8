"""`imece bench save`: what a checkpoint in the background costs training: time, bytes written, memory."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from imece.bench import report
from imece.bench.crew import Crew, slowest
from imece.bench.options import Options, names
from imece.bench.targets import Verdict, at_most
from imece.data_parallel.strategy import STRATEGIES as BY_NAME
from imece.errors import UserError
from imece.listing import many

MODULE = "imece.bench.save.rank"
STRATEGIES = tuple(BY_NAME)
DELAY_STEPS = 1.0  # most steps by which a save may delay training
FIXED_BYTES = 16 * 2**20  # what a rank may write and hold beyond its part of the state
_TOKENS = 128  # of a rank and step
_WARM_UP = 2
_LONGEST = 100  # most steps during one save


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    strategies: Annotated[tuple[str, ...], names("--strategies", STRATEGIES)] = STRATEGIES
    """Which strategies: a list. For hybrid ones the ranks pretend to be on two hosts."""
    model: Literal["10.9M", "97M"] = "97M"
    """Which model."""
    ranks: int = 4
    """Number of ranks."""
    rounds: int = 5
    """Saves with each strategy."""
    folder: Path | None = None
    """Write checkpoints below this folder and remove them afterwards. Default: the folder for temporary
    files."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """The small model on 2 ranks, one save: to see that it works, not to quote."""

    @property
    def steps(self) -> int:
        """Undisturbed steps per round; steps during a save are as many as it takes."""
        return 1 if self.quick else 3

    def check(self) -> None:
        if not 2 <= self.ranks <= 64 or self.ranks % 2:
            raise UserError(f"--ranks {self.ranks}: an even number from 2 to 64 can be measured")
        self.at_least_one("rounds")
        if self.folder is not None and not (os.path.isdir(self.folder) and os.access(self.folder, os.W_OK)):
            raise UserError(
                f"--folder {self.folder}: no folder that can be written to: make it, or name another"
            )

    def shortened(self) -> Plan:
        return replace(self, model="10.9M", ranks=2, rounds=1)


@dataclass
class Row:
    """One strategy. Bytes are of the rank with most."""

    strategy: str
    parameters: int
    """In the model."""
    state_bytes: int
    """Of the whole checkpoint."""
    share_bytes: int
    """A rank's part of it."""
    written_bytes: int
    grown_bytes: int | None
    """Growth of resident memory during a save; None if the kernel does not tell."""
    step_s: list[float] = field(default_factory=list)
    """For each round, the median of undisturbed steps."""
    copy_s: list[float] = field(default_factory=list)
    """In which training stood still."""
    save_s: list[float] = field(default_factory=list)
    """From the beginning of a save to the end of the step in which it reached the disk."""
    delays: list[float] = field(default_factory=list)
    """Delay of training in undisturbed steps."""

    @property
    def delay(self) -> float:
        return statistics.median(self.delays)


@dataclass
class Results(report.Results):
    """All rows, in the order of measurement."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes: each strategy in ranks of its own."""
    results = Results(plan)
    for strategy in plan.strategies:
        with (
            tempfile.TemporaryDirectory(prefix="imece-bench-save-", dir=plan.folder) as folder,
            Crew.of_ranks(
                f"saves of {strategy}", MODULE, plan.ranks, extra=_hosts(strategy, plan.ranks)
            ) as crew,
        ):
            results.rows.append(_measure(crew, strategy, plan, folder))
        if strategy == plan.strategies[0]:
            for line in _heads(results):
                say(line)
        say(_line(results.rows[-1]))
    return results


def judged(results: Results) -> list[Verdict]:
    shown = []
    for row in results.rows:
        low, high = min(row.delays), max(row.delays)
        shown.append(
            at_most(
                f"{row.strategy}: a save holds training up for at most {DELAY_STEPS:g} step",
                row.delay,
                DELAY_STEPS,
                f"{{:.2f}} ({low:.2f} to {high:.2f})",
            )
        )
        for what, nbytes in (("writes", row.written_bytes), ("holds", row.grown_bytes)):
            more = None if nbytes is None else (nbytes - row.share_bytes) / 2**20
            text = f"{row.strategy}: a rank {what} at most its share and {FIXED_BYTES >> 20} MiB"
            shown.append(at_most(text, more, FIXED_BYTES / 2**20, "{:+.2f} MiB"))
    return shown


def _measure(crew: Crew, strategy: str, plan: Plan, folder: str) -> Row:
    built = crew.ask("build", strategy=strategy, model=plan.model, tokens=_TOKENS, folder=folder)
    for _ in range(_WARM_UP):
        crew.ask("step")
    first = crew.ask("memory")
    written = [int(answer["written_bytes"]) for answer in first]
    grown = [answer["grown_bytes"] for answer in first]
    row = Row(
        strategy, int(built[0]["parameters"]), sum(written), -(-sum(written) // plan.ranks), max(written),
        None if None in grown else max(grown),
    )  # fmt: skip
    for _ in range(plan.rounds):
        typical = statistics.median(slowest(crew.ask("step")) for _ in range(plan.steps))
        copying = slowest(crew.ask("save"))
        beside: list[float] = []
        saving = True
        while saving and len(beside) < _LONGEST:
            answers = crew.ask("step")
            beside.append(slowest(answers))
            saving = any(answer["saving"] for answer in answers)
        crew.ask("finish")
        row.step_s.append(typical)
        row.copy_s.append(copying)
        row.save_s.append(copying + sum(beside))
        row.delays.append((copying + sum(beside)) / typical - len(beside))
    return row


def _hosts(strategy: str, ranks: int) -> list[dict[str, str]] | None:
    """For hybrid strategies: variables with which ranks pretend to be on two hosts."""
    if not BY_NAME[strategy].hybrid:
        return None
    per_host = ranks // 2
    return [
        {
            "IMECE_HOST": f"host{rank // per_host}", "GROUP_RANK": str(rank // per_host),
            "LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host),
        }
        for rank in range(ranks)
    ]  # fmt: skip


def _heads(results: Results) -> list[str]:
    plan, row = results.plan, results.rows[0]
    return [
        "",
        f"saves of a GPT of {row.parameters / 1e6:.1f}M parameters, AdamW, {plan.ranks} ranks, "
        f"{_TOKENS} tokens a rank, 1 thread a rank,",
        f"medians of {many(plan.rounds, 'round')}; MB of the rank with most; share: of the checkpoint's "
        f"{row.state_bytes / 1e6:.0f} MB a rank's part",
        f"  {'':<14}{'ms/step':>9}{'copy ms':>9}{'on disk s':>11}{'later by steps':>16}"
        f"{'share':>9}{'written':>9}{'resident':>10}",
    ]


def _line(row: Row) -> str:
    step, copying, saving = (statistics.median(each) for each in (row.step_s, row.copy_s, row.save_s))
    grown = "" if row.grown_bytes is None else f"{row.grown_bytes / 1e6:.1f}"
    return (
        f"  {row.strategy:<14}{step * 1e3:>9.0f}{copying * 1e3:>9.0f}{saving:>11.2f}{row.delay:>+16.2f}"
        f"{row.share_bytes / 1e6:>9.1f}{row.written_bytes / 1e6:>9.1f}{grown:>10}"
    )
