"""`imece bench gpu`: what imece costs on one GPU, beside the bare model and torch's own wrapper."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from imece.bench import report
from imece.bench.gpu.loop import loops_own
from imece.bench.gpu.ways import COMPILED, OPTIMIZERS, OURS, STRATEGIES, WAYS, Rank, Timed
from imece.bench.options import Options, names
from imece.bench.rounds import odd_losses, ratio, turned
from imece.errors import UserError
from imece.launch.spawn import spawn
from imece.listing import many
from imece.models.presets import preset
from imece.observe.environment import cpu_model
from imece.train.watch.peak import flops_per_token, measured_peak

PARTS = ("wrapper", "compile", "strategies", "loop", "optimizer")


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    parts: Annotated[tuple[str, ...], names("--parts", PARTS)] = PARTS
    """Which parts: a step with and without wrappers, compiled, in sharded strategies, the loop of imece
    train, the optimizer alone."""
    model: Literal["tiny", "small", "medium", "1.3b"] = "1.3b"
    """A preset of the model, in bf16."""
    sequences: int = 4
    """Sequences per step, each as long as the model's context."""
    rounds: int = 5
    """Rounds, in each of which all ways are measured."""
    steps: int = 5
    """Training steps in each round."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: only with --model tiny, to see that it works, not to quote."""
    json: Path | None = None
    """Write all figures to this file."""
    trace: Path | None = None
    """Write what torch's profiler saw of some steps of imece to this file (open it in Perfetto)."""

    def check(self) -> None:
        self.at_least_one("sequences", "rounds", "steps")
        if self.device == "cpu" and self.model != "tiny":
            raise UserError(f"--device cpu --model {self.model}: on a CPU only --model tiny is measured")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "imece bench gpu needs a CUDA device, and torch sees none here: install a CUDA build of "
                "torch, or try it with --device cpu --model tiny"
            )
        if self.trace is not None and (self.device == "cpu" or "wrapper" not in self.parts):
            raise UserError("--trace: it is of steps on a GPU, of --parts wrapper")


@dataclass
class Results(report.Results):
    """The figures of one rank on one device."""

    plan: Plan
    device: str = ""
    """The device's name."""
    parameters: int = 0
    tokens: int = 0
    """Per step."""
    flops: float = 0.0
    """Per step, counted by flops_per_token."""
    peak_rate: float = 0.0
    """Operations per second in products of large bf16 matrices."""
    ways: dict[str, list[Timed]] = field(default_factory=dict)
    """Way -> a figure for each round."""
    optimizers: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of an optimizer step alone, for each round."""
    loop: float | None = None
    """Share of a step that the loop itself takes."""

    def time(self, way: str, than: str) -> float:
        """Time relative to `than`: median of the rounds' ratios."""
        ours, theirs = ([each.seconds for each in self.ways[name]] for name in (way, than))
        return ratio(ours, theirs)

    def rate(self, way: str) -> float:
        """The share of the matrix rate that the median step reaches."""
        return self.flops / statistics.median(each.seconds for each in self.ways[way]) / self.peak_rate

    def peak_bytes(self, way: str) -> int | None:
        """Allocated at most; None if that was not measured, or not counted.

        The smallest of the rounds: torch may still hold memory of an earlier way, which adds to it.
        """
        timed = self.ways.get(way, ())
        return min((each.peak_bytes for each in timed if each.peak_bytes is not None), default=None)

    @property
    def syncs(self) -> float | None:
        """How often the host waited for the GPU in a step of OURS, in the worst round."""
        timed = self.ways.get(OURS, ())
        return max((each.syncs for each in timed if each.syncs is not None), default=None)

    @property
    def wrong(self) -> list[str]:
        return odd_losses({way: timed[-1].loss for way, timed in self.ways.items()}, 1e-2)


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure in a separate process, which prints as it goes; then print the tables."""
    trace = "" if plan.trace is None else str(plan.trace.absolute())
    (told,) = spawn(_measure, (asdict(replace(plan, json=None, trace=None)), trace), 1)
    results = Results(
        plan, **{key: value for key, value in told.items() if key != "ways"},
        ways={way: [Timed(**each) for each in timed] for way, timed in told["ways"].items()},
    )  # fmt: skip
    for line in lines(results):
        say(line)
    if trace:
        say(f"trace    {trace} (open it at ui.perfetto.dev)")
    return results


def _measure(asked: dict[str, Any], trace: str) -> dict[str, Any]:
    plan = Plan(**asked)
    shape = preset(plan.model)
    rank = Rank(plan.device, shape, plan.sequences)
    tokens = plan.sequences * shape.max_seq
    ways: dict[str, list[Timed]] = {}
    optimizers: dict[str, list[float]] = {}
    for turn in range(plan.rounds):
        print(f"round {turn + 1} of {plan.rounds}", flush=True)
        if "wrapper" in plan.parts:
            for way in turned(WAYS, turn):
                timed = rank.train(way, plan.steps, count_syncs=way == OURS, trace=trace)
                ways.setdefault(way, []).append(timed)
        if "compile" in plan.parts:
            ways.setdefault(COMPILED, []).append(rank.train(COMPILED, plan.steps))
        if "strategies" in plan.parts:
            for way in turned(STRATEGIES, turn):
                ways.setdefault(way, []).append(rank.train(way, plan.steps))
        if "optimizer" in plan.parts:
            for way in turned(OPTIMIZERS, turn):
                optimizers.setdefault(way, []).append(rank.step_alone(way, plan.steps))
    loop = None
    if "loop" in plan.parts:
        print("imece train", flush=True)
        loop = loops_own(rank.mesh, plan.model, plan.sequences, plan.rounds * plan.steps)
    return {
        "device": torch.cuda.get_device_name(rank.device) if rank.on_gpu else cpu_model(),
        "parameters": shape.parameter_count,
        "tokens": tokens,
        "flops": flops_per_token(shape) * tokens,
        "peak_rate": measured_peak(rank.device, torch.bfloat16),
        "ways": {way: [asdict(each) for each in timed] for way, timed in ways.items()},
        "optimizers": optimizers,
        "loop": loop,
    }


def lines(results: Results) -> list[str]:
    """The tables."""
    plan = results.plan
    shown = [
        "",
        f"{results.device}: {plan.model}, {results.parameters / 1e6:.1f}M parameters in bf16, "
        f"{plan.sequences} sequences, {results.tokens:,} tokens a step",
        f"medians of {many(plan.rounds, 'alternating round')} of {many(plan.steps, 'step')}; large "
        f"matrix products: {results.peak_rate / 1e12:.1f} Tflop/s",
    ]
    if results.ways:
        heads = f"{'ms/step':>10}{'tokens/s':>11}{'of products':>13}{'peak GB':>9}{'syncs':>7}"
        shown.append(f"  {'':<18}{heads}")
    for way, timed in results.ways.items():
        seconds = statistics.median(each.seconds for each in timed)
        peak, syncs = results.peak_bytes(way), timed[-1].syncs
        shown.append(
            f"  {way:<18}{seconds * 1e3:>10.2f}{results.tokens / seconds:>11,.0f}{results.rate(way):>13.1%}"
            f"{'-' if peak is None else f'{peak / 1e9:.2f}':>9}{'-' if syncs is None else f'{syncs:.1f}':>7}"
        )
    for way, rounds in results.optimizers.items():
        shown.append(f"  AdamW {way:<12}{statistics.median(rounds) * 1e3:>10.3f}")
    if results.loop is not None:
        shown.append(f"  imece train: {results.loop:.2%} of a step is the loop's own")
    return shown
