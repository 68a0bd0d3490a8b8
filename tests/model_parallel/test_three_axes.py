"""Data, tensor and pipeline parallelism on one mesh give the losses, norms and parameters of one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import imece
from imece.model_parallel.divided import divided_parameters
from tests.model_parallel.test_tensor import EXACT, STEPS, TIED, batch, check_same_bits, made, ours, sgd
from tests.ranks import run_ranks

CLIP = 0.2  # of norms of about 0.5


def compare(axes: dict[str, int], strategy: str, options: dict[str, Any]) -> float:
    mesh = imece.init(axes)
    config = TIED
    whole = made(ours(config), seed=0)
    optimizer = sgd(whole.parameters())
    expected = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = imece.cross_entropy(whole(tokens), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item()))

    model = imece.tensor_parallel(
        made(ours(config), seed=0), mesh, sequence=options["sequence"], divided_logits=options["logits"]
    )
    pipeline = imece.Pipeline(model, mesh, micro_batches=2, loss=imece.cross_entropy)
    stage, optimizer = imece.parallelize(pipeline.part, sgd, strategy, mesh)
    worst = 0.0
    for step in range(STEPS):
        tokens, targets = (each.chunk(mesh.batch_ranks)[mesh.batch_rank] for each in batch(step))
        loss = pipeline.step(tokens, targets)
        norm = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], CLIP)
        check_same_bits(norm, mesh.world_group, "the norm")
        assert abs(float(stage.gradient_norm()) - CLIP) < 1e-5
        optimizer.step()
        optimizer.zero_grad()
        imece.all_reduce(loss, "sum", group=mesh.data_group)
        found = (loss.item() / mesh.data_group.size(), norm.item())
        worst = max(worst, *(abs(a - b) for a, b in zip(found, expected[step], strict=True)))
    parts, known = divided_parameters(pipeline.part), dict(whole.named_parameters())
    assert parts
    for name, each in pipeline.part.named_parameters():
        same = parts[name].of(known[name]) if name in parts else known[name]
        worst = max(worst, (each - same).abs().max().item())
    return worst


@pytest.mark.parametrize(
    ("axes", "strategy", "options"),
    [
        ({"pipeline": 2, "tensor": 2}, "replicate", {"sequence": False, "logits": True}),
        ({"pipeline": 2, "replicate": 2, "tensor": 2}, "zero1", {"sequence": True, "logits": False}),
    ],
)
def test_trains_as_one_rank(axes: dict[str, int], strategy: str, options: dict[str, Any]) -> None:
    worst = run_ranks(compare, math.prod(axes.values()), args=[axes, strategy, options])
    assert max(worst) < EXACT, worst
