"""`imece bench step`: what synchronisation adds to a training step, in every way of training."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from imece.bench import machine, report
from imece.bench.crew import Crew, slowest
from imece.bench.options import Options, check_ranks, counts, names
from imece.bench.reference_model import REFERENCE
from imece.bench.rounds import Taken, alternate, odd_losses, ratio
from imece.bench.step import timeline
from imece.bench.step.ways import (
    ALONE,
    APART,
    ONE_PROCESS,
    OURS,
    OVERLAPPED,
    STRATEGY_WAYS,
    WAYS,
    missing,
)
from imece.data_parallel.reducing.trace import BucketTrace, StepTrace
from imece.errors import UserError
from imece.listing import many

MODULE = "imece.bench.step.rank"
_GLOO, _REPLICATE = "torch-gloo", "replicate"
_BUILD_S = 1200.0  # DeepSpeed's first use compiles C++, for minutes on a busy machine


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    tokens: Annotated[tuple[int, ...], counts("--tokens")] = (128, 512)
    """Tokens of one rank in one step: a list."""
    ways: Annotated[tuple[str, ...], names("--ways", WAYS, or_none=True)] = WAYS
    """Which ways of training: a list. Ways that are not installed are left out; no-sync is always
    measured."""
    #: Compare strategies of imece with torch's instead: a list of replicate, zero1, zero2, zero3,
    #: zero3-gather (as between hosts), torch-zero1 (ZeroRedundancyOptimizer), fully-shard, deepspeed-zero3;
    #: or all.
    strategy: Annotated[tuple[str, ...], names("--strategy", STRATEGY_WAYS, or_none=True, every="all")] = ()
    ranks: int = 2
    """Number of ranks."""
    rounds: int = 7
    """Rounds, in each of which all ways are measured."""
    steps: int = 4
    """Training steps in each round."""
    memory: bool = False
    """Also measure memory, each way in ranks of its own."""
    parameters: Annotated[tuple[int, ...], counts("--parameters", or_none=True)] = ()
    """Measure instead what each parameter costs in backward, in models of so many parameters: a list, for
    instance 1000,10000."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw the timeline of one step to this PNG file; if several ways were traced, one file for each."""
    trace: Path | None = None
    """Write the timeline for ui.perfetto.dev (Chrome trace events) to this file; again one for each way."""
    quick: bool = False
    """2 rounds of 1 step: to see that it works, not to quote."""

    @property
    def every(self) -> tuple[str, ...]:
        """All ways that are measured; first the one that all are compared with."""
        return tuple(dict.fromkeys((ALONE, *(self.strategy or self.ways))))

    @property
    def base(self) -> str:
        """The way to which the table compares the others."""
        return _REPLICATE if _REPLICATE in self.every else _GLOO

    def check(self) -> None:
        check_ranks(self.ranks)
        self.at_least_one("rounds", "steps")
        if self.parameters and (self.plot or self.trace):
            raise UserError("--parameters measures no timeline: leave --plot and --trace out")
        for count in self.tokens:
            if count > REFERENCE.length and count % REFERENCE.length:
                raise UserError(
                    f"--tokens {count}: more than {REFERENCE.length} must be a multiple of {REFERENCE.length}"
                )

    def shortened(self) -> Plan:
        return replace(self, rounds=min(self.rounds, 2), steps=1)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: the largest over the ranks, or their mean where they divide memory."""

    peak_bytes: int
    """The peak of resident memory; memory that ranks share counts for each."""
    shared_bytes: int
    """Shared memory in use after a backward; another rank's part counts once this rank has touched it."""
    parts_bytes: int
    """Resident after a backward, mean over the ranks; memory that two ranks share counts half."""


@dataclass
class Results(report.Results):
    """Seconds of one step in each round, on the slowest rank."""

    plan: Plan
    parameters: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    """Way -> why it was not measured."""
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Tokens -> way -> a figure for each round."""
    losses: dict[str, float] = field(default_factory=dict)
    """The loss over all ranks after the last round."""
    traces: dict[str, dict[int, list[StepTrace]]] = field(default_factory=dict)
    """ "128" or "128-overlap" -> rank -> the steps that imece traced."""
    memory: dict[int, dict[str, Memory]] = field(default_factory=dict)
    """Tokens -> way -> its memory."""
    taken: dict[int, Taken] = field(default_factory=dict)
    """Tokens -> processor time that others took meanwhile."""

    def added_s(self, tokens: int, way: str) -> float:
        """Seconds that `way` adds to a step without synchronisation: median of the rounds' differences."""
        rounds = self.seconds[tokens]
        return statistics.median(ours - alone for ours, alone in zip(rounds[way], rounds[ALONE], strict=True))

    def speed(self, tokens: int, way: str, than: str) -> float:
        """How many times as fast as `than`: median of the rounds' ratios."""
        return ratio(self.seconds[tokens][than], self.seconds[tokens][way])

    def share(self, tokens: int, way: str, of: str) -> float:
        """What `way` adds to a step, over what `of` adds."""
        ours, theirs = self.added_s(tokens, way), self.added_s(tokens, of)
        if theirs <= 0:  # noise: what the other adds cannot be told from 0
            return 0.0 if ours <= theirs else float("inf")
        return ours / theirs

    @property
    def wrong(self) -> list[str]:
        """Of the synchronising ways those that did not train the same model as most."""
        return odd_losses({way: loss for way, loss in self.losses.items() if way not in APART}, 1e-3)


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes."""
    results = Results(plan)
    for way in plan.every:
        why = missing(way)
        if why is not None:
            results.left_out[way] = why
    with Crew.of_ranks("step", MODULE, plan.ranks) as crew:
        _build(crew, results)
        for tokens in plan.tokens:
            _measure(crew, results, tokens)
            for line in lines(results, tokens):
                say(line)
        for way in (OURS, OVERLAPPED):  # after all rounds, because tracing makes more steps in one way only
            for tokens in plan.tokens if way in results.losses else ():
                _trace(crew, results, way, tokens)
    for way, why in results.left_out.items():
        say(f"  {way} is left out: {why}")
    for name, traces in results.traces.items():
        number, _, overlap = name.partition("-")
        say(
            f"\none step of {OVERLAPPED if overlap else OURS} with {number} tokens a rank, as rank 0 saw it; "
            "times in ms from the start of forward"
        )
        for line in timeline.table(typical(traces)[0][0]):
            say(f"  {line}")
    if plan.memory:
        _memory(results)
        for line in memory_lines(results):
            say(line)
    return results


def lines(results: Results, tokens: int) -> list[str]:
    """The table for one number of tokens."""
    plan, rounds = results.plan, results.seconds[tokens]
    base = plan.base
    compared = "of gloo" if base == _GLOO else "x replicate"
    shown = [
        "",
        f"a GPT of {results.parameters / 1e6:.1f}M parameters, {tokens} tokens a rank, {plan.ranks} ranks, "
        f"1 thread a rank, medians of {many(plan.rounds, 'alternating round')} of "
        f"{many(plan.steps, 'step')}",
        f"  {'':<16}{'ms/step':>9}{'added ms':>10}{compared:>13}{'tokens/s':>10}{'x no-sync':>11}",
    ]
    for way in rounds:
        seconds = statistics.median(rounds[way])
        line = f"  {way:<16}{seconds * 1e3:>9.1f}"
        if way == ALONE:
            line += f"{'':>10}{'':>13}{plan.ranks * tokens / seconds:>10.0f}"
        else:
            share = ""
            if base in rounds and base == _GLOO:
                share = f"{results.share(tokens, way, base):.0%}"
            elif base in rounds:
                share = f"{results.speed(tokens, way, base):.3f}"
            line += (
                f"{results.added_s(tokens, way) * 1e3:>10.2f}{share:>13}"
                f"{plan.ranks * tokens / seconds:>10.0f}{results.speed(tokens, way, ALONE):>11.3f}"
            )
        shown.append(line)
    return shown + results.taken.get(tokens, Taken()).lines


def memory_lines(results: Results) -> list[str]:
    """The table of memory."""
    shown = [
        "",
        "resident memory of a rank, MiB, each way in ranks of its own: the peak; and after a backward what",
        "lies in memory that ranks share, and all with that memory divided among them",
        f"  {'tokens':<8}{'':<16}{'peak':>9}{'shared':>9}{'divided':>9}",
    ]
    for tokens, ways in results.memory.items():
        for way, memory in ways.items():
            figures = (memory.peak_bytes, memory.shared_bytes, memory.parts_bytes)
            columns = "".join(f"{figure / 2**20:>9.1f}" for figure in figures)
            shown.append(f"  {tokens:<8}{way:<16}{columns}")
    return shown


def write_timelines(
    results: Results, trace: Path | None, plot: Path | None, say: Callable[[str], None]
) -> None:
    """Write the traced steps for Perfetto to `trace` and a picture to `plot`.

    If several ways were traced, each gets its own files: trace.json -> trace-128-overlap.json.
    """
    if not results.traces and (trace or plot):
        say(f"no timeline: {OURS} was not measured")
    for name, traces in results.traces.items():
        tokens, _, overlap = name.partition("-")
        if trace is not None:
            file = _for_trace(trace, name, results)
            report.write_json(file, timeline.chrome_trace(traces))
            say(f"trace    {file} (open it at ui.perfetto.dev)")
        if plot is not None:
            file = _for_trace(plot, name, results)
            title = (
                f"One step of imece.DistributedDataParallel{' (overlap=True)' if overlap else ''}: a GPT of "
                f"{results.parameters / 1e6:.1f}M parameters, {tokens} tokens a rank\n{machine.describe()}"
            )
            timeline.draw(typical(traces), file, title)
            say(f"plot     {file}")


def typical(traces: dict[int, list[StepTrace]]) -> dict[int, list[StepTrace]]:
    """For each rank the same single step: the one of median length on the slowest rank."""
    lengths = [
        max(step.end_s - step.forward_start_s for step in together)
        for together in zip(*traces.values(), strict=True)
    ]
    chosen = lengths.index(statistics.median_low(lengths))
    return {rank: [steps[chosen]] for rank, steps in traces.items()}


def _build(crew: Crew, results: Results) -> None:
    """Every way that can be built, after its first steps, which make buckets and optimizer states."""
    for way in results.plan.every:
        if way in results.left_out:
            continue
        answers = crew.ask("build", way=way, timeout_s=_BUILD_S)
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:
            results.left_out[way] = refused[0]
            continue
        # DeepSpeed's parameters have no elements between forwards.
        results.parameters = max(results.parameters, answers[0]["parameters"])
        results.losses[way] = float("nan")


def _measure(crew: Crew, results: Results, tokens: int) -> None:
    plan, ways = results.plan, list(results.losses)
    for way in ways:
        crew.ask("measure", way=way, tokens=tokens, steps=2)

    def seconds(way: str) -> float:
        answers = crew.ask("measure", way=way, tokens=tokens, steps=plan.steps)
        results.losses[way] = statistics.mean(answer["loss"] for answer in answers if "loss" in answer)
        return slowest(answers)

    results.seconds[tokens], results.taken[tokens] = alternate(ways, plan.rounds, seconds)


def _trace(crew: Crew, results: Results, way: str, tokens: int) -> None:
    answers = crew.ask("trace", way=way, tokens=tokens, steps=max(3, results.plan.steps))
    results.traces[f"{tokens}-overlap" if way == OVERLAPPED else f"{tokens}"] = {
        rank: [step_trace(facts) for facts in answer["traces"]] for rank, answer in enumerate(answers)
    }


def step_trace(facts: dict[str, Any]) -> StepTrace:
    """The reverse of dataclasses.asdict."""
    return StepTrace(**facts | {"buckets": [BucketTrace(**bucket) for bucket in facts["buckets"]]})


def _memory(results: Results) -> None:
    """Sizes ascend, because a process remembers its peak."""
    plan = results.plan
    for way in results.losses:
        if way == ONE_PROCESS:  # which has no ranks
            continue
        with Crew.of_ranks(f"memory of {way}", MODULE, plan.ranks) as crew:
            crew.ask("build", way=way)
            for tokens in sorted(plan.tokens):
                answers = crew.ask("memory", way=way, tokens=tokens)
                largest = {name: max(answer[name] for answer in answers) for name in answers[0]}
                # It is chance which rank touched a page that both may touch; together they have it once.
                parts = statistics.mean(answer["parts_bytes"] for answer in answers)
                found = Memory(**largest | {"parts_bytes": round(parts)})
                results.memory.setdefault(tokens, {})[way] = found


def _for_trace(path: Path, name: str, results: Results) -> Path:
    return path.with_stem(f"{path.stem}-{name}") if len(results.traces) > 1 else path
