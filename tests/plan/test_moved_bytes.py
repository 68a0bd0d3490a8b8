"""The planner's bytes of collectives, compared with the schedules and with the recorder of a real run."""

from __future__ import annotations

import math
import os

import pytest
import torch

import imece
from imece.bench.reference_model import REFERENCE, batch, new_decoder, optimizer_of
from imece.collectives.recording import attach
from imece.collectives.schedules import Schedule, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from imece.collectives.wire_formats import FORMATS
from imece.plan.models.from_code import of_module
from imece.plan.setup import WIRE_BYTES, Parallel, Precision, Recipe, Setup, Strategy
from imece.plan.speed.communication import Op, sent_bytes
from imece.plan.speed.manner import IMECE, Manner
from imece.plan.speed.synchronise import _gathers, _gradient_bytes, reductions, trained_parameters
from tests.collectives.test_schedules import sent_elements
from tests.ranks import run_ranks

RANKS = 2
STRATEGIES: tuple[Strategy, ...] = ("replicate", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rings_send_what_is_predicted(ranks: int) -> None:
    numel = 8 * 3 * 1000
    rings: dict[Op, Schedule] = {
        "all_reduce": ring_all_reduce(1, ranks, numel),
        "all_gather": ring_all_gather(1, ranks, numel),
        "reduce_scatter": ring_reduce_scatter(1, ranks, numel),
    }
    for op, schedule in rings.items():
        assert 4 * sent_elements(schedule) == sent_bytes(op, 4 * numel, ranks), op


def moved_bytes(setup: Setup, manner: Manner) -> dict[Op, float]:
    """Of one step: bytes of the larger of input and output, summed over the collectives of a kind."""
    strategy = setup.parallel.strategy
    reduced = _gradient_bytes(setup, manner)
    stepped = trained_parameters(setup, manner) * setup.recipe.precision.parameters
    if strategy == "replicate":
        return {"all_reduce": reduced}
    if strategy in ("zero1", "zero2"):
        return {"reduce_scatter": reduced * reductions(setup), "all_gather": stepped}
    gathered = sum(each.units * each.unit_bytes for each in _gathers(setup, manner))
    moved: dict[Op, float] = {
        "reduce_scatter": reduced * reductions(setup),
        "all_gather": stepped if strategy == "hybrid_zero2" else gathered * setup.recipe.accumulation,
    }
    if strategy != "zero3":
        moved["all_reduce"] = reduced / setup.parallel.shard * reductions(setup)
    return moved


def test_a_wire_is_as_wide_as_what_is_packed() -> None:
    assert {name: wire.pack(torch.zeros(1024)).nbytes / 1024 for name, wire in FORMATS.items()} == WIRE_BYTES


def recorded_bytes() -> list[dict[str, int]]:
    """Of the second step, for each strategy."""
    imece.init()
    found = []
    for strategy in STRATEGIES:
        model = new_decoder(REFERENCE)
        wrapped, optimizer = imece.parallelize(
            model, optimizer_of(model), strategy, bucket_cap_mb=5, gather=strategy == "zero3"
        )
        before = 0
        for step in range(2):
            calls = attach(os.getpid()).calls
            before = calls[-1].token if calls else 0
            wrapped(batch(REFERENCE, 64, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved: dict[str, int] = {}
        for call in attach(os.getpid()).calls:
            if call.token > before:
                size = math.prod(call.shape) * getattr(torch, call.dtype).itemsize if call.dtype else 0
                size *= RANKS if call.op == "all_gather" else 1  # the recorder has what goes in
                moved[call.op] = moved.get(call.op, 0) + size
        found.append(moved)
    return found


@pytest.mark.slow
def test_a_real_run_moves_what_is_predicted() -> None:
    with torch.device("meta"):
        model = of_module(new_decoder(REFERENCE), "reference")
    recipe = Recipe(64, precision=Precision(4, 4, 0, 0, 4, 4))
    for rank in run_ranks(recorded_bytes, RANKS, backend="gloo"):
        for strategy, found in zip(STRATEGIES, rank, strict=True):
            setup = Setup(model, Parallel(strategy, RANKS, RANKS), recipe)
            predicted = moved_bytes(setup, IMECE)
            for op, size in predicted.items():
                assert found.get(op, 0) == pytest.approx(size, rel=0.001), (strategy, op)
