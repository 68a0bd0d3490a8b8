"""A step whose micro-batches go through a pipeline equals that of one process."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from imece import mesh as meshes
from imece.models.transformer import Transformer
from imece.train.config import MeshSection
from imece.train.evaluate import evaluate
from imece.train.model.precision import Precision
from imece.train.passes import InPipeline
from tests.ranks import run_ranks
from tests.train.test_step import FP32, SEQ, Bench, distance, text

NEAR = 1e-6  # fp32, summed in another order
STAGES = MeshSection(pipeline=2)
LATE_S = 0.3


def alone(bench: Bench) -> Transformer:
    """The model that it was made of, whole."""
    return Transformer(bench.model.config, generator=torch.Generator().manual_seed(1))


def step() -> dict[str, Any]:
    """Of two data ranks with two stages each: a step, and what validation says before it."""
    bench = Bench(micro=2, divide=STAGES)
    own = dict(bench.wrapped.module.named_parameters())
    whole = bench.model = alone(bench)
    loss, expected = bench.whole_batch(3)
    named = dict(zip(dict(whole.named_parameters()), expected, strict=True))
    nats, tokens = evaluate(whole, text(), SEQ, 2, FP32, most_tokens=13 * SEQ)
    rank, passes = meshes.current().batch_rank, bench.step.passes
    share = evaluate(
        bench.wrapped.module, text(), SEQ, bench.plan.at_once, FP32, rank=rank, world_size=2,
        most_tokens=13 * SEQ, nats=passes.nats,
    )  # fmt: skip
    bench.step.run(2, lr=0.0)  # the first one makes the schedule
    bench.clock.lap()
    stage = meshes.current().coordinate("pipeline")
    time.sleep(0.0 if stage else LATE_S)
    outcome = bench.step.run(3, lr=0.0)
    lap = bench.clock.lap()
    gradients = {name: each.grad for name, each in own.items() if each.grad is not None}
    return {
        "plan": bench.plan.describe(),
        "names": list(gradients),
        "apart": distance(list(gradients.values()), [named[name] for name in gradients]),
        "loss": outcome.nats / outcome.tokens,
        "mean": loss,
        "norm": outcome.grad_norm - float(torch.cat([each.flatten() for each in expected]).norm()),
        "validated": share,
        "expected": [nats, tokens],
        "phases": [lap.seconds, lap.phases, lap.own],
        "waits": stage,
    }


def test_a_step_is_that_of_one_process() -> None:
    by_rank = run_ranks(step, 4)
    for found in by_rank:
        assert "micro-batch 2 x 3 in the pipeline x 2 groups of 2 ranks" in found["plan"]
        assert found["apart"] < NEAR and abs(found["norm"]) < NEAR
    first, second = (by_rank[at]["names"] for at in (0, 2))
    assert "blocks.0.mlp.up.weight" in first and "norm.weight" in second and by_rank[1]["names"] == first
    assert set(first) & set(second) == {"embed.weight"}, "tied"
    assert by_rank[0]["loss"] == by_rank[2]["loss"] != by_rank[1]["loss"] == by_rank[3]["loss"]
    assert abs((by_rank[0]["loss"] + by_rank[1]["loss"]) / 2 - by_rank[0]["mean"]) < NEAR


def test_validation_and_phases() -> None:
    by_rank = run_ranks(step, 4)
    (nats, tokens), parts = by_rank[0]["expected"], [each["validated"] for each in by_rank]
    assert parts[0] == parts[2] and parts[1] == parts[3], "all stages know"
    assert parts[0][1] + parts[1][1] == tokens == 13 * SEQ, "what fills a batch up does not count"
    assert abs((parts[0][0] + parts[1][0]) / nats - 1) < NEAR
    for found in by_rank:
        whole, phases, own = found["phases"]
        assert min(phases[name] for name in ("forward", "backward", "exposed")) > 0
        assert sum(phases.values()) <= whole
        if found["waits"]:  # for the first stage, which is late
            assert phases["exposed"] > 0.9 * LATE_S and sum(own.values()) < whole - 0.9 * LATE_S


class InfForWeight(torch.autograd.Function):
    """Passes x on; what comes back for a weight is not finite, and nothing else shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full(ctx.shape, float("inf"))


def blamed() -> dict[str, Any]:
    """Of two data ranks with two stages each: NaN in the loss, Inf in one gradient, NaN in a weight. Each in
    the second micro-batch of the second data rank."""
    bench = Bench(micro=2, optimizers=["adamw"], divide=STAGES)
    mesh, passes = meshes.current(), bench.step.passes
    assert isinstance(passes, InPipeline)
    bench.step.run(0, lr=0.1)  # the first one looks at shapes too
    found: dict[str, Any] = {"documents": ", ".join(map(str, bench.batches.names(1, 8, 10)))}
    forwards = 0

    def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        if mesh.batch_rank != 1 or forwards % 3 != 2:
            return output
        weight = module.weight
        assert isinstance(weight, Tensor)
        return output * float("nan") if name == "norm" else InfForWeight.apply(output, weight)  # type: ignore[no-untyped-call]

    for name in ("norm", "blocks.0.mlp.up"):
        modules = dict(bench.wrapped.module.named_modules())
        hook = modules[name].register_forward_hook(spoil) if name in modules else None
        found[name] = [bench.step.run(1, lr=0.1).skipped, *bench.step.blame(1)]
        if hook is not None:
            hook.remove()
    found["well"] = [bench.step.run(1, lr=0.1).skipped, *bench.step.blame(1)]
    parameters = dict(bench.wrapped.module.named_parameters())
    if mesh.rank == 3:
        with torch.no_grad():
            parameters["norm.weight"][2] = float("nan")
    found["weight"] = bench.step.blame(1)
    return found


def test_who_brought_what_is_not_finite() -> None:
    for found in run_ranks(blamed, 4):
        skipped, line = found["norm"]
        assert skipped == "the gradient is not finite"
        assert line.startswith("ranks 1, 3: loss nan, gradient of embed.weight and ")
        assert line.endswith(f"; documents {found['documents']}")
        skipped, line = found["blocks.0.mlp.up"]
        assert line.startswith("ranks 1, 3: loss 5.") and "gradient of blocks.0.mlp.up.weight; doc" in line
        assert found["well"] == [""]
        assert found["weight"] == ["rank 3: weights that are not finite: norm.weight"]


def overflows() -> list[Any]:
    """fp16 whose scale is too large at first: of each step whether it was skipped, the scale, the loss."""
    bench = Bench(micro=2, optimizers=["muon"], precision=Precision("fp16", "cpu"), clip=1.0, divide=STAGES)
    bench.step.load_scaler(bench.step.scaler_state | {"scale": 2.0**28})
    found = []
    for index in range(10):
        outcome = bench.step.run(index, lr=0.01)
        found.append([bool(outcome.skipped), bench.step.scale, outcome.nats / outcome.tokens])
    return found


def test_fp16_has_one_scale_in_all_stages() -> None:
    first, second = run_ranks(overflows, 2)
    assert first == second
    skips = [skipped for skipped, *_ in first]
    assert skips[0] and not skips[-1] and skips == sorted(skips, reverse=True)
    assert first[-1][1] == 2.0 ** (28 - sum(skips)) and all(5 < loss < 6 for *_, loss in first)
