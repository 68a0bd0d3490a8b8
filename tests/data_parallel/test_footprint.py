"""Bytes of a rank: the published formulae, compared with counts while a model trains."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import imece
from imece.data_parallel.footprint import LaidOut, counted, expected, optimizer_tensors
from imece.data_parallel.reducing.buckets import Bucket
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.strategy import STRATEGIES, find_strategy
from imece.footprint import Footprint
from imece.layout import Item, build
from tests.ranks import run_ranks

LENGTH = 4096


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_formulae_of_adam_in_fp32(ranks: int) -> None:
    """Bytes a parameter: 16; 8 + 8/N; 4 + 12/N; 16/N; of a model that N divides."""
    items = [Item(f"{n}.weight", (LENGTH,), "float32", 4) for n in range(16)]
    whole = {"replicate": 16.0, "zero1": 8 + 8 / ranks, "zero2": 4 + 12 / ranks, "zero3": 16 / ranks}
    for name, expected_bytes in whole.items():
        strategy = STRATEGIES[name]
        laid = build(items, cap_bytes=3 * 4 * LENGTH, shards=ranks if strategy.optimizer else 1)
        state = dict.fromkeys(range(len(laid.buckets)), 8)
        laid_out = LaidOut(laid, strategy, state, parameter_bytes=4, reduce_bytes=4)
        found = laid_out.footprint(0)
        assert found.total / (16 * LENGTH) == pytest.approx(expected_bytes)
        filled = replace(laid_out, filling=[0], gathered=laid.buckets[1].nbytes).footprint(0)
        assert filled.communication == 2 * 3 * 4 * LENGTH


def test_masters_of_bf16_belong_to_the_optimizer() -> None:
    laid = build([Item("x", (LENGTH,), "bfloat16", 2)], cap_bytes=10**9, shards=2)
    found = LaidOut(laid, find_strategy("ZeRO-2"), {0: 8}, parameter_bytes=2, reduce_bytes=2).footprint(1)
    assert found == Footprint(2 * LENGTH, 2 * LENGTH, 6 * LENGTH, 0)
    assert str(found) == "0.0 parameters + 0.0 gradients + 0.0 optimizer = 0.0 MB"
    assert str(Footprint(10**6, 0, 0, 25 * 10**5)) == "1.0 parameters + 2.5 communication = 3.5 MB"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.as_tensor(self.head(x))


def footprints(strategy: str, gather: bool, bf16: bool, frozen: int = 0) -> list[dict[str, int]]:
    """Predicted before, counted after a backward. frozen: so many layers are not trained."""
    imece.init()
    dtype = torch.bfloat16 if bf16 else None
    precision = imece.MixedPrecision(dtype, dtype) if bf16 else None
    model, optimizer = imece.parallelize(
        *_new(frozen=frozen), strategy, bucket_cap_mb=0.04, gather=gather, precision=precision
    )
    predicted = expected(model, [optimizer])
    assert predicted is not None
    for step in range(3):
        model(torch.ones(2, 64, dtype=dtype or torch.float32)).float().square().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return [asdict(predicted), asdict(counted(model, [optimizer]))]


def _new(device: str = "cpu", frozen: int = 0) -> tuple[nn.Module, Optimizer]:
    with torch.device(device):
        model = Model()
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    return model, AdamW(model.parameters())


@pytest.mark.parametrize(
    ("strategy", "gather", "bf16"),
    [
        ("replicate", False, False),
        *((*each, bf16) for each in (("zero1", False), ("zero2", False)) for bf16 in (False, True)),
        *((*each, bf16) for each in (("zero3", False), ("zero3", True)) for bf16 in (False, True)),
    ],
)
def test_what_is_counted_was_predicted(strategy: str, gather: bool, bf16: bool) -> None:
    for predicted, found in run_ranks(footprints, 2, args=(strategy, gather, bf16), backend=None):
        for name, nbytes in predicted.items():
            # Scalars of the optimizer, and a unit more or less on its way.
            room = 0.01 * nbytes + 300 if name != "communication" else 0.35 * nbytes
            assert found[name] == pytest.approx(nbytes, abs=room), name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("strategy", "gather"), [("zero2", False), ("zero3", False), ("zero3", True)])
def test_what_is_frozen_is_shared_out_with_the_others(strategy: str, gather: bool, bf16: bool) -> None:
    frozen, layer = 5, 4 * (64 * 64 + 64)  # bytes
    trained = layer + 4 * (64 * 32 + 32)
    ranks, size = (2 if strategy == "zero3" else 1), (2 if bf16 else 4)
    for predicted, found in run_ranks(footprints, 2, args=(strategy, gather, bf16, frozen), backend=None):
        held = (frozen * layer + trained) * size / 4 / ranks
        assert found["parameters"] == pytest.approx(held, rel=0.02)
        assert predicted["parameters"] == found["parameters"]
        assert predicted["communication"] == pytest.approx(found["communication"], rel=0.01)
        if bf16:
            continue
        assert found["optimizer"] == pytest.approx(trained, rel=0.05), "two moments, of half of it"


def under_way(device: str) -> tuple[int, int, int]:
    """Most sums that are under way while another bucket fills; its memory, predicted and counted."""
    imece.init()
    model, optimizer = imece.parallelize(*_new(device), "zero2", bucket_cap_mb=0.01)
    predicted = expected(model, [optimizer])
    assert predicted is not None
    most, attach = [0], Sharding.attach

    def noted(self: Sharding, bucket: Bucket) -> None:
        attach(self, bucket)
        most[0] = max(most[0], sum(each.work is not None for each in self.all))

    with mock.patch.object(Sharding, "attach", noted):
        for _ in range(2):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return most[0], predicted.communication, counted(model, [optimizer]).communication


@pytest.mark.parametrize(
    ("where", "device", "expected_most"),
    [("shm", "meta", 0), ("cpu:gloo", "cpu", 1), ("two hosts", "cpu", 2)],
    ids=["shm", "gloo", "hosts"],
)
def test_a_network_has_time_for_the_buckets_under_way(where: str, device: str, expected_most: int) -> None:
    """And what they take was predicted. device: where the model is made."""
    hosts = {"ranks_per_host": 2} if where == "two hosts" else {"env": {"IMECE_BACKEND": where}}
    ranks = 4 if where == "two hosts" else 2
    for most, predicted, found in run_ranks(
        under_way, ranks, args=(device,), backend=None, timeout_s=200, **hosts
    ):
        assert (most, found) == (expected_most, predicted)


def units_there(device: str) -> tuple[int, int, int]:
    """Most units there in a forward, but for the root; bytes of communication, predicted and counted."""
    imece.init()
    model, optimizer = imece.parallelize(*_new(device), "zero3", gather=True)
    assert isinstance(model, ShardedDataParallel)
    predicted, gathering, most = expected(model, [optimizer]), model.sharding.gathering, [0]
    assert predicted is not None and gathering is not None
    for layer in model.module.get_submodule("layers").children():
        layer.register_forward_pre_hook(
            lambda *_: most.append(sum(unit.is_there for unit in gathering.units[1:]))
        )
    for _ in range(2):  # in the first one nothing is known ahead
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(most), predicted.communication, counted(model, [optimizer]).communication


@pytest.mark.parametrize(("hosts", "device", "expected_most"), [(1, "cpu", 2), (2, "meta", 3)])
def test_between_hosts_a_unit_comes_in_each_lane(hosts: int, device: str, expected_most: int) -> None:
    """And what they take was predicted. device: where the model is made."""
    ranks = run_ranks(units_there, 2, args=(device,), backend=None, ranks_per_host=2 // hosts)
    for most, predicted, found in ranks:
        assert (most, found) == (expected_most, predicted)


def other_optimizers() -> list[Any]:
    """Of an optimizer that nobody knows nothing is foretold; SGD keeps what it is told to."""
    imece.init()
    found: list[Any] = []
    for momentum in (0.0, 0.9):
        model = Model()
        wrapped, optimizer = imece.parallelize(model, SGD(model.parameters(), 0.1, momentum), "zero1")
        predicted = expected(wrapped, [optimizer])
        found.append(predicted.optimizer if predicted else None)

    class Unknown(SGD):
        pass

    model = Model()
    wrapped, optimizer = imece.parallelize(model, Unknown(model.parameters(), 0.1), "zero1")
    return [*found, expected(wrapped, [optimizer])]


def test_other_optimizers() -> None:
    numel = sum(each.numel() for each in Model().parameters())
    assert run_ranks(other_optimizers, 1, backend=None) == [[0, 4 * numel, None]]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_keeps_a_third_tensor(kind: type[torch.optim.Adam]) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    for amsgrad in (False, True):
        optimizer = kind([weight], amsgrad=amsgrad)
        weight.grad = torch.ones(8)
        optimizer.step()
        kept = [each for each in optimizer.state[weight].values() if each.numel() == weight.numel()]
        assert optimizer_tensors(optimizer) == len(kept) == (3 if amsgrad else 2)
