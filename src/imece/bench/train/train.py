"""`imece bench train`: tokens per second, beside a plain loop and the machine's limit."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from imece.bench import report
from imece.bench.crew import slowest
from imece.bench.rounds import Taken, alternate, odd_losses, ratio
from imece.bench.train.contenders import (
    ALONE,
    ONE_RANK,
    PLAIN,
    Contender,
    Plan,
    batch_of,
    start_all,
    with_text,
)
from imece.listing import many

_WARM_UP = 3  # steps that make buckets and optimizer states


@dataclass
class Save:
    """How saves delayed training, and the memory that one took."""

    delays: list[float] = field(default_factory=list)
    """Steps by which each save delayed training."""
    outlasted: int = 0
    """Saves that were still under way after the measured steps, so that their delay is too small."""
    grown_bytes: int | None = None
    """Growth of resident memory during the first save, on the rank that grew most relative to what it
    wrote."""
    written_bytes: int = 0
    """Bytes that this rank wrote."""


@dataclass
class Results(report.Results):
    """Seconds of one step in each round, on the slowest rank."""

    plan: Plan
    parameters: int = 0
    batch: str = ""
    """The arithmetic of the global batch."""
    tokens: int = 0
    """Per step, of all ranks together: the same in every way."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Way -> a figure for each round."""
    losses: dict[str, float] = field(default_factory=dict)
    """Way -> the last step's mean loss over the ranks."""
    compile_s: dict[str, float] = field(default_factory=dict)
    """Way that compiles -> seconds before the first step, with nothing compiled before."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """For each step of the default: seconds by phase, from rank 0's records."""
    save: Save = field(default_factory=Save)
    taken: Taken = field(default_factory=Taken)
    """Processor time that others took meanwhile."""

    def speed(self, way: str, than: str) -> float:
        """How many times the tokens/s of `than`: median of the rounds' ratios."""
        return ratio(self.seconds[than], self.seconds[way])

    def tokens_per_s(self, way: str) -> float:
        """Median over the rounds."""
        return self.tokens / statistics.median(self.seconds[way])

    @property
    def overhead(self) -> float | None:
        """The share of the default's median step that the loop itself takes; None if no step was made."""
        shares = [(step["data_s"] + step["other_s"]) / step["step_s"] for step in self.phases]
        return statistics.median(shares) if shares else None

    @property
    def wrong(self) -> list[str]:
        return odd_losses({way: loss for way, loss in self.losses.items() if way != ALONE}, 5e-3)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "config": asdict(self.plan.config),
            "default": self.plan.default,
            "tokens_per_s": {way: self.tokens_per_s(way) for way in self.seconds},
        }


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes."""
    results = Results(plan)
    with tempfile.TemporaryDirectory(prefix="imece-bench-") as name, contextlib.ExitStack() as crews:
        config = with_text(plan.config, Path(name), say)
        results.tokens = batch_of(config, plan.ranks).tokens
        contenders = start_all(plan, config, Path(name), crews)
        for way, contender in contenders.items():
            opened = contender.open()
            if opened.get("compile_s"):
                results.compile_s[way] = opened["compile_s"]
            if way == plan.default:
                results.parameters, results.batch = opened["parameters"], opened["batch"]
            contender.ask("measure", steps=_WARM_UP)
        made, results.taken = alternate(
            list(contenders), plan.rounds, lambda way: contenders[way].ask("measure", steps=plan.steps)
        )
        for way, each in made.items():
            results.seconds[way] = [slowest(answers) for answers in each]
            results.losses[way] = statistics.fmean(answer["loss"] for answer in each[-1])
        results.phases = [phases for answers in made[plan.default] for phases in answers[0]["phases"]]
        _measure_saves(contenders[plan.default], results)
    for line in lines(results):
        say(line)
    return results


def lines(results: Results) -> list[str]:
    """The tables."""
    plan, seconds = results.plan, results.seconds
    against = [way for way in (PLAIN["fp32"], PLAIN["bf16"], ALONE) if way in seconds]
    shown = [
        "",
        f"{plan.config.model.preset}, {results.parameters / 1e6:.1f}M parameters, {results.batch}",
        f"1 thread a rank, medians of {many(plan.rounds, 'alternating round')} of "
        f"{many(plan.steps, 'step')}; {plan.default} is what imece train does by default",
        f"  {'':<21}{'ms/step':>9}{'tokens/s':>10}" + "".join(f"{'x ' + way:>14}" for way in against),
    ]
    for way, rounds in seconds.items():
        ratios = "".join(f"{results.speed(way, than):>14.3f}" for than in against)
        milliseconds = statistics.median(rounds) * 1e3
        shown.append(f"  {way:<21}{milliseconds:>9.1f}{results.tokens_per_s(way):>10.0f}{ratios}")
    shown += results.taken.lines
    if ONE_RANK in seconds:
        text = f"from 1 to {plan.ranks} ranks {results.speed(plan.default, ONE_RANK):.3f} x"
        if ALONE in seconds:
            text += f", of {results.speed(ALONE, ONE_RANK):.3f} x that the machine gives"
        shown.append(f"  {text}")
    if results.phases:
        middle = {
            name.removesuffix("_s"): statistics.median(step[name] for step in results.phases) * 1e3
            for name in results.phases[0]
        }
        parts = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in middle.items())
        shown.append(f"  medians of {plan.default} in ms: {parts}")
    shown += [f"  {way}: {each:.0f} s of compiling before" for way, each in results.compile_s.items()]
    if results.save.delays:
        shown.append(f"  {_save_line(results.save)}")
    return shown


def _save_line(save: Save) -> str:
    text = f"{len(save.delays)} saves held it up by {min(save.delays):+.2f} to {max(save.delays):+.2f} steps"
    if save.outlasted:
        text += f", of which {save.outlasted} went on after the steps measured"
    if save.grown_bytes is None:
        return text
    return f"{text}; {save.grown_bytes / 1e6:.1f} MB more resident to write {save.written_bytes / 1e6:.1f} MB"


def _measure_saves(contender: Contender, results: Results) -> None:
    """Measure the memory of the first save, then the delays of some, each beside steps without."""
    save, plan = results.save, results.plan
    taken = contender.ask("save")
    if all(answer["grown_bytes"] is not None for answer in taken):
        worst = max(taken, key=lambda answer: float(answer["grown_bytes"] / answer["written_bytes"]))
        save.grown_bytes, save.written_bytes = worst["grown_bytes"], worst["written_bytes"]
    for _ in range(plan.rounds):
        without = contender.ask("measure", steps=plan.steps)
        around = contender.ask("measure_save", steps=plan.steps)
        typical = statistics.median(step["step_s"] for answer in without for step in answer["phases"])
        longest = max(sum(answer["steps_s"]) for answer in around)
        save.delays.append(longest / typical - plan.steps)
        save.outlasted += not all(answer["whole"] for answer in around)
