"""The third part of `imece bench hosts`: training steps whose gradients pass the slow cable."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import imece
from imece.bench.crew import Crew, slowest
from imece.bench.reference_model import REFERENCE, batch, new_decoder, optimizer_of
from imece.bench.rounds import Taken, alternate
from imece.bench.targets import Verdict, at_least

TOKENS = (128, 512)
STEPS = 5  # per round
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no-sync": lambda model: model,
    "torch-gloo": DistributedDataParallel,
    "imece": imece.DistributedDataParallel,
    "imece bf16": lambda model: imece.DistributedDataParallel(model, wire="bf16"),
    "imece int8": lambda model: imece.DistributedDataParallel(model, wire="int8"),
}
STRATEGIES = ("zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")
_CLOSE = 0.2
TARGETS = ((128, "imece", 1.45), (128, "imece bf16", 2.0), (512, "imece", 1.35))
"""(tokens, way, at least this many times the speed of torch-gloo)."""
SENT = (("zero1", 1.0), ("zero2", 1.0), ("zero3", 1.5))
"""(strategy, this many times the bytes that imece sends, within a few headers)."""
_HEADERS = 1.03


@dataclass
class StepResults:
    """Seconds of one step, on the slowest rank."""

    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Tokens -> way -> a figure for each round."""
    losses: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, float] = field(default_factory=dict)
    """Way -> bytes that the busier host sends to the other in a step."""
    taken: dict[int, Taken] = field(default_factory=dict)
    """Tokens -> processor time that others took meanwhile."""

    def saved_s(self, tokens: int, bytes_per_s: float) -> tuple[float, float]:
        """(seconds by which a step of hybrid is shorter than one of zero3, seconds that its spared bytes
        would take)."""
        rounds = self.seconds[tokens]
        saved = [theirs - ours for ours, theirs in zip(rounds["hybrid"], rounds["zero3"], strict=True)]
        return statistics.median(saved), (self.sent_bytes["zero3"] - self.sent_bytes["hybrid"]) / bytes_per_s

    def speed(self, tokens: int, way: str) -> float:
        """How many times as fast as torch-gloo."""
        rounds = self.seconds[tokens]
        return statistics.median(rounds["torch-gloo"]) / statistics.median(rounds[way])


def build(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The reference model in one of WAYS or STRATEGIES."""
    model: nn.Module = new_decoder(REFERENCE)
    if way in STRATEGIES:
        wrapped, optimizer = imece.parallelize(model, optimizer_of(model), way)
        return wrapped, optimizer
    model = WAYS[way](model)
    return model, optimizer_of(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int, seeds: list[int]) -> float:
    """Train a step for each seed; returns the last loss."""
    for seed in seeds:
        loss: torch.Tensor = model(batch(REFERENCE, tokens, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def settle(model: nn.Module) -> None:
    """Wait until none of the model's communication is under way."""
    if isinstance(model, imece.DistributedDataParallel):
        model.settle()


def sent_bytes() -> int:
    """Bytes that this host has sent to others: Linux counts them for each interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): figures.split() for name, _, figures in (line.partition(":") for line in lines)}
    return sum(int(figures[8]) for name, figures in counts.items() if name != "lo")


def measure(crew: Crew, rounds: int) -> StepResults:
    """Measure all ways, in turn."""
    results = StepResults()
    every = [*WAYS, *STRATEGIES]
    for tokens in TOKENS:

        def seconds(way: str, tokens: int = tokens) -> float:
            answers = crew.ask("train", way=way, tokens=tokens, steps=STEPS)
            results.losses[way] = float(answers[0]["loss"])
            results.sent_bytes[way] = max(float(answer["sent_bytes"]) for answer in answers)
            return slowest(answers)

        for way in every:
            seconds(way)
        results.seconds[tokens], results.taken[tokens] = alternate(every, rounds, seconds)
    return results


def lines(results: StepResults) -> list[str]:
    """The tables."""
    shown = []
    for tokens, rounds in results.seconds.items():
        shown += [
            "",
            f"a training step of a GPT of 10.9M parameters, {tokens} tokens a rank, 2 ranks on each host",
            f"  {'':<14}{'ms/step':>9}{'x torch-gloo':>14}{'last loss':>11}{'MB sent':>9}",
        ]
        for way, seconds in rounds.items():
            shown.append(
                f"  {way:<14}{statistics.median(seconds) * 1e3:>9.1f}{results.speed(tokens, way):>14.2f}"
                f"{results.losses[way]:>11.4f}{results.sent_bytes.get(way, 0.0) / 1e6:>9.1f}"
            )
        shown += results.taken.get(tokens, Taken()).lines
    return shown


def judged(results: StepResults, bytes_per_s: float) -> list[Verdict]:
    """The targets. bytes_per_s: the cable's rate by plain TCP."""
    shown = []
    for tokens, way, least in TARGETS:
        text = f"{tokens} tokens a rank, {way}: at least {least:g} x torch-gloo"
        shown.append(at_least(text, results.speed(tokens, way), least))
    for way, most in SENT:
        if way in results.sent_bytes:
            share = results.sent_bytes[way] / results.sent_bytes["imece"]
            text = f"{way}: sends at most {most:g} x what imece sends, within 3%"
            shown.append(Verdict(text, share <= most * _HEADERS, f"{share:.3g} x", share))
    for tokens, rounds in results.seconds.items():
        if "hybrid" in rounds:
            saved, bytes_say = results.saved_s(tokens, bytes_per_s)
            text = f"{tokens} tokens a rank, hybrid: faster than zero3 by what its bytes say, within 20%"
            figures = f"{saved * 1e3:.0f} ms of {bytes_say * 1e3:.0f} ms"
            shown.append(
                Verdict(text, abs(saved - bytes_say) <= _CLOSE * bytes_say, figures, saved / bytes_say)
            )
    return shown
