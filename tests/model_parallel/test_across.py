"""Gradient norms and skipped steps of a model whose parts are on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imece
from imece import GradScaler
from imece.data_parallel.replicate import DistributedDataParallel
from imece.mesh import Mesh
from tests.model_parallel.test_tensor import EXACT, FULL, TIED, batch, by_positions, made, ours, sgd
from tests.ranks import run_ranks

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
CLIP = 0.2  # of norms of about 0.5


def alike(value: float) -> float:
    """AssertionError unless all ranks have it, to the bit."""
    every = torch.empty(dist.get_world_size(), dtype=torch.float64)
    imece.all_gather(every, torch.tensor([value], dtype=torch.float64))
    assert (every == value).all(), every.tolist()
    return value


def backward(model: nn.Module, share: int = 0, shares: int = 1) -> None:
    tokens, targets = (each.chunk(shares)[share] for each in batch(0))
    imece.cross_entropy(model(tokens), targets).backward()


def wrappers(mesh: Mesh) -> Iterator[tuple[DistributedDataParallel, Any, str]]:
    for case, strategy in [(ours(TIED), each) for each in STRATEGIES] + [(by_positions(ours(FULL)), "zero2")]:
        model = imece.tensor_parallel(made(case, 0), mesh, **case.dividing)
        wrapped, optimizer = imece.parallelize(model, sgd, strategy, mesh)
        backward(wrapped, mesh.batch_rank, mesh.batch_ranks)
        yield wrapped, optimizer, "FULL" if case.dividing else "TIED"


def norms(axes: dict[str, int]) -> int:
    mesh, done = imece.init(axes), 0
    expected = {}
    for name, config in (("TIED", TIED), ("FULL", FULL)):
        whole = made(ours(config), 0)
        backward(whole)
        gradients = [each.grad for each in whole.parameters() if each.grad is not None]
        expected[name] = {
            kind: torch.nn.utils.get_total_norm(gradients, kind).item() for kind in (2.0, 1.0, math.inf)
        }
    for wrapped, optimizer, name in wrappers(mesh):
        for kind, norm in expected[name].items():
            found = alike(float(wrapped.gradient_norm(norm_type=kind)))
            assert abs(found - norm) <= EXACT * norm, (wrapped.strategy, name, kind, found, norm)
        # A rank counts what others have not counted, of some of the parameters too: number 0 is divided.
        first = float(wrapped.gradient_norm({0}))
        rest = float(wrapped.gradient_norm(set(range(1, len(wrapped.reducer.slots)))))
        assert abs(math.hypot(alike(first), alike(rest)) - expected[name][2.0]) <= 1e-11
        steps = [each for group in optimizer.param_groups for each in group["params"]]
        torchs = torch.nn.utils.clip_grad_norm_(steps, CLIP)
        assert abs(alike(float(torchs)) - expected[name][2.0]) <= EXACT
        assert abs(alike(float(wrapped.gradient_norm())) - CLIP) < 1e-5
        wrapped.clip_grad_norm_(CLIP / 2)
        assert abs(alike(float(wrapped.gradient_norm())) - CLIP / 2) < EXACT
        given = [each.grad for each in steps if each.grad is not None]
        assert abs(alike(float(torch.nn.utils.get_total_norm(given))) - CLIP / 2) < EXACT
        done += 1
    return done


@pytest.mark.parametrize(
    ("axes", "backend"), [({"tensor": 2}, "gloo"), ({"replicate": 2, "tensor": 2}, "shm")]
)
def test_norm_is_that_of_one_rank(axes: dict[str, int], backend: str) -> None:
    ranks = math.prod(axes.values())
    assert run_ranks(norms, ranks, args=[axes], backend=backend) == [5] * ranks


def overflow() -> int:
    """The gradient of one rank's part is not finite: no rank steps, all halve the scale."""
    mesh, done = imece.init({"replicate": 2, "tensor": 2}), 0
    for strategy in STRATEGIES:
        model = imece.tensor_parallel(made(ours(TIED), 0), mesh)
        wrapped, optimizer = imece.parallelize(model, sgd, strategy, mesh)
        scaler = GradScaler("cpu", init_scale=4.0)
        before = {name: each.clone() for name, each in wrapped.state_dict().items()}
        tokens, targets = (each.chunk(2)[mesh.batch_rank] for each in batch(0))
        loss = imece.cross_entropy(wrapped(tokens), targets)
        if mesh.coordinate("tensor") == 1:
            loss.register_hook(lambda gradient: gradient)  # the graph is the same on all ranks
            query = next(each for name, each in model.named_parameters() if name.endswith("attention.q.bias"))
            query.register_hook(lambda gradient: gradient.fill_(math.inf))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert alike(scaler.get_scale()) == 2.0, strategy
        for name, each in wrapped.state_dict().items():
            assert torch.equal(each, before[name]), (strategy, name)
        done += 1
    return done


def test_what_overflows_in_one_part_stops_all() -> None:
    assert run_ranks(overflow, 4) == [4] * 4


def unknown() -> None:
    mesh = imece.init({"tensor": 2})
    model = imece.tensor_parallel(made(ours(TIED), 0), mesh)
    wrapped = DistributedDataParallel(model, process_group=mesh.data_group)
    backward(wrapped)
    with pytest.raises(RuntimeError, match=r"wrap it by imece\.parallelize"):
        wrapped.clip_grad_norm_(1.0)


def test_a_norm_without_the_mesh_is_refused() -> None:
    run_ranks(unknown, 2)


class Clips(torch.optim.SGD):
    """As LAMB does: by the norm of all that it steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([{"params": list(parameters), "max_grad_norm": 1.0}], lr=0.1)


def of_all() -> None:
    mesh = imece.init({"pipeline": 2})
    for kind, said in (
        (torch.optim.LBFGS, "LBFGS cannot step a part of a model: it searches along one direction of all"),
        (Clips, r"Clips clips by the norm of all that it steps \(max_grad_norm=1.0\)"),
    ):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipeline = imece.Pipeline(model, mesh, micro_batches=2, loss=nn.functional.mse_loss)
        with pytest.raises(ValueError, match=said):
            imece.parallelize(pipeline.part, kind, "replicate", mesh)


def test_an_optimizer_that_wants_all_of_the_model_is_refused() -> None:
    """Each stage would search along a direction of its own, and clip by a norm of its own."""
    run_ranks(of_all, 2, backend="gloo")
