"""Fewer bytes on the wire: close to the exact sum, the same bits everywhere."""

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
from imece.collectives.wire import all_reduce_packed
from imece.collectives.wire_formats import BLOCK, FORMATS
from tests.collectives.sent import sent_by
from tests.ranks import run_ranks

BACKENDS = ("gloo", "shm")
HALF_UNIT = 2.0**-8  # of bf16, relative
HALF_STEP = 1 / 254  # of int8, relative to the largest of its block
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", FORMATS)
def test_the_error_does_not_grow_with_the_ranks(wire: str, backend: str) -> None:
    """Against the bound of wire.py at 2 and at 7 ranks; a ring that sums in bf16 is the negative control."""
    few, many = (run_ranks(sum_packed, n, args=(wire,), backend=backend)[0] for n in (2, 7))
    for measured in (few, many):
        assert measured["largest share of the bound"] <= 1.0
    assert many["wire"] < 1.1 * few["wire"]
    assert many["ring"] > 1.25 * few["ring"], "the negative control shows no growth: this test proves nothing"
    assert wire == "int8" or many["ring"] > 1.5 * many["wire"]


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("shm", 1), ("shm", 4), ("gloo", 3)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("shm", 3), ("gloo", 1), ("gloo", 4))],
)
def test_every_way_gives_the_same_bits(backend: str, world_size: int, wire: str) -> None:
    results = run_ranks(many_ways, world_size, args=(wire,), backend=backend)
    assert results[0]["ways"] > 20
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("numel", [0, 1, 3, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_packed_each_by_itself(dtype: torch.dtype, numel: int) -> None:
    """Of memory with gaps too. A number errs by no more than its format says."""
    values = (noise(0, 3, 2 * numel) * torch.tensor([[1e-3], [1.0], [1e3]])).to(dtype)[:, :numel]
    size = torch.stack([each.double().abs() for each in values])
    for name, largest_error in (
        ("bf16", HALF_UNIT * size),
        ("int8", HALF_STEP * torch.stack([largest(each) for each in size])),
    ):
        wire, out = FORMATS[name], torch.empty_like(values)
        packed = wire.pack(values)
        assert packed.is_contiguous()
        for row, of_one in zip(packed, values, strict=True):
            assert torch.equal(row.view(torch.uint8), wire.pack(of_one).view(torch.uint8))
        wire.unpack(packed, out)
        unit = torch.finfo(dtype).eps
        assert ((out.double() - values.double()).abs() <= largest_error * 1.01 + unit * size).all(), name
        total = torch.ones(3, numel)
        wire.add(packed, total)
        exact = torch.empty(3, numel)
        wire.unpack(packed, exact)
        assert torch.equal(total, exact + 1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_arrives(poison: float) -> None:
    """And no further than its block, which none of int8's numbers can leave as they were."""
    for name, spoilt in (("bf16", 1), ("int8", BLOCK)):
        values, out = noise(0, 3 * BLOCK), torch.empty(3 * BLOCK)
        values[BLOCK + 5] = poison
        FORMATS[name].unpack(FORMATS[name].pack(values), out)
        assert (~out.isfinite()).sum() == spoilt
        assert (
            not out[BLOCK + 5].isfinite()
            and out[:BLOCK].isfinite().all()
            and out[2 * BLOCK :].isfinite().all()
        )


def test_nothing_becomes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros stay, and blocks too small for a step become zeros, not infinities, nor are made of what is not
    finite, which a cast to int8 makes anything of."""
    product = torch.mul

    def finite(*factors: torch.Tensor) -> torch.Tensor:
        found = product(*factors)
        assert found.isfinite().all()
        return found

    monkeypatch.setattr(torch, "mul", finite)
    for values in (torch.zeros(BLOCK), torch.full((BLOCK,), 1e-39), torch.full((BLOCK,), -1e-44)):
        out = torch.ones(BLOCK)
        FORMATS["int8"].unpack(FORMATS["int8"].pack(values), out)
        assert torch.equal(out, torch.zeros(BLOCK))
    large = torch.full((BLOCK,), 0.99 * torch.finfo(torch.float32).max)
    FORMATS["int8"].unpack(FORMATS["int8"].pack(large), out)
    torch.testing.assert_close(out, large)


# --- run by each rank


def noise(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1))


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def largest(size: torch.Tensor) -> torch.Tensor:
    """size: [n] >= 0. The largest of each number's block, [n]."""
    return torch.cat([each.max().expand(len(each)) for each in size.split(BLOCK)]) if len(size) else size


def sum_packed(wire: str) -> dict[str, Any]:
    """Root mean square errors relative to the sum's own size, and the worst share of the promised bound."""
    rank, world_size, numel = dist.get_rank(), dist.get_world_size(), 40_001
    parts = torch.stack([noise(each, numel) for each in range(world_size)]).double()
    # All of one sign, so that partial sums grow and the errors of a bf16 sum grow with them.
    parts = parts.abs()
    exact = parts.sum(0)
    got = parts[rank].float()
    all_reduce_packed(got, world(), "sum", wire, collective=True)
    error = (got.double() - exact).abs()
    if wire == "bf16":
        bound = HALF_UNIT * (parts.sum(0) + exact)
    else:
        slices = -(-numel // world_size)  # one a rank, whose blocks begin at its first number
        of_block = [torch.cat([largest(each) for each in row.split(slices)]) for row in (*parts, exact)]
        bound = HALF_STEP * torch.stack(of_block).sum(0)
    bound *= 1.01  # 1 %: terms of second order
    naive = parts[rank].bfloat16()
    run_schedule(build("all_reduce", "ring", rank, world_size, numel), naive, world())
    naive_error = (naive.double() - exact) / exact
    return {
        "bits": bits(got),
        "largest share of the bound": (error / bound).max().item(),
        "wire": (error / exact).square().mean().sqrt().item(),
        "ring": naive_error.square().mean().sqrt().item(),
    }


def many_ways(wire: str) -> dict[str, Any]:
    """Shapes, dtypes, reductions, layouts; by the group's own collectives, by messages, in the background."""
    imece.init()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hashes, ways = [], 0
    for shape in ((), (0,), (1,), (world_size,), (33, 7), (300_001,)):
        for op in ("sum", "avg"):
            for dtype in TYPES:
                exact = torch.stack(
                    [noise(each, *shape).to(dtype).double() for each in range(world_size)]
                ).sum(0)
                exact = exact / world_size if op == "avg" else exact
                tensors = [noise(rank, *shape).to(dtype) for _ in range(4)]
                tensors[1] = torch.stack([tensors[1]] * 2, -1)[..., 0]  # not contiguous
                all_reduce_packed(tensors[0], world(), op, wire, collective=True)
                all_reduce_packed(tensors[1], world(), op, wire, collective=False)
                assert ops.all_reduce(tensors[2], op, wire=wire) is tensors[2]
                assert ops.all_reduce(tensors[3], op, wire=wire, async_op=True).wait(30) is tensors[3]
                for tensor in tensors:
                    what = f"{op} of {dtype} {list(shape)}"
                    limit = 2 * HALF_UNIT * world_size
                    assert (tensor.double() - exact).abs().sum() <= limit * max(1, tensor.numel()), what
                    assert torch.equal(tensor, tensors[0]), what
                    if wire == "bf16":
                        assert torch.equal(tensor, tensor.bfloat16().to(dtype)), f"{what}: not bf16 numbers"
                hashes.append(bits(tensors[0].float()))
                ways += len(tensors)
    with mock.patch.object(
        dist, "all_to_all_single", side_effect=RuntimeError("Backend x does not support alltoall")
    ):
        without = noise(rank, 33, 7)
        all_reduce_packed(without, world(), "sum", wire, collective=True)
        assert bits(without) == hashes[4 * 2 * 4], "a backend without all_to_all gives the same"
    count_bytes(wire)
    return {"ways": ways, "hashes": hashes}


def count_bytes(wire: str) -> None:
    """What one rank really sends: (N−1)/N of the fp32 bytes in bf16, half of a ring's; in int8 half of that,
    and each block's step."""
    world_size, numel = dist.get_world_size(), 1200
    with sent_by("wire") as sent:
        all_reduce_packed(torch.ones(numel), world(), "sum", wire, collective=False)
    steps = 4 * -(-(numel // world_size) // BLOCK)
    packed = {"bf16": 2 * numel // world_size, "int8": numel // world_size + steps}[wire]
    assert sum(sent) == 2 * (world_size - 1) * packed
