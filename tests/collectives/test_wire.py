"""bf16 on the wire: close to the exact sum, the same bits everywhere, half the bytes."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import imece
from imece.collectives import ops
from imece.collectives.execute import run_schedule
from imece.collectives.schedules import build
from imece.collectives.wire import all_reduce_bf16
from tests.collectives.sent import sent_by
from tests.ranks import run_ranks

BACKENDS = ("gloo", "shm")
HALF_UNIT = 2.0**-8  # of bf16, relative


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_error_does_not_grow_with_the_ranks(backend: str) -> None:
    """Against the bound of wire.py at 2 and at 7 ranks; a ring that sums in bf16 is the negative control."""
    few, many = (run_ranks(sum_in_bf16, n, backend=backend)[0] for n in (2, 7))
    for measured in (few, many):
        assert measured["largest share of the bound"] <= 1.0
    assert many["wire"] < 1.1 * few["wire"]
    assert many["ring"] > 1.25 * few["ring"], "the negative control shows no growth: this test proves nothing"
    assert many["ring"] > 1.5 * many["wire"]


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("shm", 1), ("shm", 4), ("gloo", 3)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("shm", 3), ("gloo", 1), ("gloo", 4))],
)
def test_every_way_gives_the_same_bits(backend: str, world_size: int) -> None:
    results = run_ranks(many_ways, world_size, backend=backend)
    assert results[0]["ways"] > 20
    assert all(result == results[0] for result in results)


# --- run by each rank


def noise(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1))


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def sum_in_bf16() -> dict[str, Any]:
    """Root mean square errors relative to the sum's own size, and the worst share of the promised bound."""
    rank, world_size, numel = dist.get_rank(), dist.get_world_size(), 40_001
    parts = torch.stack([noise(each, numel) for each in range(world_size)]).double()
    # All of one sign, so that partial sums grow and the errors of a bf16 sum grow with them.
    parts = parts.abs()
    exact = parts.sum(0)
    got = parts[rank].float()
    all_reduce_bf16(got, world())
    error = (got.double() - exact).abs()
    bound = HALF_UNIT * (parts.sum(0) + exact) * 1.01  # 1 %: terms of second order
    naive = parts[rank].bfloat16()
    run_schedule(build("all_reduce", "ring", rank, world_size, numel), naive, world())
    naive_error = (naive.double() - exact) / exact
    return {
        "bits": bits(got),
        "largest share of the bound": (error / bound).max().item(),
        "wire": (error / exact).square().mean().sqrt().item(),
        "ring": naive_error.square().mean().sqrt().item(),
    }


def many_ways() -> dict[str, Any]:
    """Shapes, dtypes, reductions, layouts; by the group's own collectives, by messages, in the background."""
    imece.init()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hashes, ways = [], 0
    for shape in ((), (0,), (1,), (world_size,), (33, 7), (300_001,)):
        for op in ("sum", "avg"):
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
                exact = torch.stack(
                    [noise(each, *shape).to(dtype).double() for each in range(world_size)]
                ).sum(0)
                exact = exact / world_size if op == "avg" else exact
                tensors = [noise(rank, *shape).to(dtype) for _ in range(4)]
                tensors[1] = torch.stack([tensors[1]] * 2, -1)[..., 0]  # not contiguous
                all_reduce_bf16(tensors[0], world(), op)
                all_reduce_bf16(tensors[1], world(), op, collective=False)
                assert ops.all_reduce(tensors[2], op, wire="bf16") is tensors[2]
                assert ops.all_reduce(tensors[3], op, wire="bf16", async_op=True).wait(30) is tensors[3]
                for tensor in tensors:
                    what = f"{op} of {dtype} {list(shape)}"
                    limit = 2 * HALF_UNIT * world_size
                    assert (tensor.double() - exact).abs().sum() <= limit * max(1, tensor.numel()), what
                    assert torch.equal(tensor, tensors[0]), what
                    assert torch.equal(tensor, tensor.bfloat16().to(dtype)), f"{what}: not bf16 numbers"
                hashes.append(bits(tensors[0].float()))
                ways += len(tensors)
    with mock.patch.object(
        dist, "all_to_all_single", side_effect=RuntimeError("Backend x does not support alltoall")
    ):
        without = noise(rank, 33, 7)
        all_reduce_bf16(without, world())
        assert bits(without) == hashes[4 * 2 * 4], "a backend without all_to_all gives the same"
    count_bytes()
    return {"ways": ways, "hashes": hashes}


def count_bytes() -> None:
    """What one rank really sends: (N−1)/N of the fp32 bytes, half of a ring's."""
    world_size, numel = dist.get_world_size(), 1200
    with sent_by("wire") as sent:
        all_reduce_bf16(torch.ones(numel), world(), collective=False)
    assert sum(sent) == (world_size - 1) * numel * 4 // world_size
