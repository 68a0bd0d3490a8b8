"""Strategies by name, and the groups among which they divide a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imece
from imece.axes import Partition
from imece.data_parallel import replicate
from imece.data_parallel.strategy import STRATEGIES, ShardGroups, Strategy, find_strategy, usual_strategy
from imece.mesh import Mesh
from tests.collectives.sent import sent_by
from tests.data_parallel.test_parallelize import (
    EXACT,
    Case,
    first_difference,
    momentum,
    muon_and_adamw,
    plain,
)
from tests.data_parallel.test_parity import replaced
from tests.meshes import FakeGroup, FakeMesh
from tests.ranks import run_ranks

of = ShardGroups.of


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("replicate", "replicate"), ("NO_SHARD", "replicate"), ("ddp", "replicate"), ("DDP", "replicate"),
        ("zero1", "zero1"), ("ZeRO-1", "zero1"),
        ("zero2", "zero2"), ("SHARD_GRAD_OP", "zero2"), ("ZeRO-2", "zero2"),
        ("zero3", "zero3"), ("FULL_SHARD", "zero3"), ("ZeRO-3", "zero3"), ("FSDP", "zero3"),
        ("hybrid", "hybrid"), ("HYBRID_SHARD", "hybrid"),
        ("hybrid_zero2", "hybrid_zero2"), ("_HYBRID_SHARD_ZERO2", "hybrid_zero2"),
    ],
)  # fmt: skip
def test_every_name(name: str, found: str) -> None:
    assert find_strategy(name) is STRATEGIES[found]


def test_what_each_divides() -> None:
    divided = {
        name: [what for what in ("parameters", "gradients", "optimizer", "hybrid") if getattr(each, what)]
        for name, each in STRATEGIES.items()
    }
    assert divided == {
        "replicate": [],
        "zero1": ["optimizer"],
        "zero2": ["gradients", "optimizer"],
        "zero3": ["parameters", "gradients", "optimizer"],
        "hybrid": ["parameters", "gradients", "optimizer", "hybrid"],
        "hybrid_zero2": ["gradients", "optimizer", "hybrid"],
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [("zero4", "; did you mean 'zero3'?"), ("full_shards", "; did you mean 'full_shard'?"), ("x", ".")],
)
def test_a_name_that_is_none(name: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_strategy(name)
    assert str(caught.value) == (
        f"unknown strategy {name!r}{hint} "
        "There are auto, replicate, zero1, zero2, zero3, hybrid, hybrid_zero2"
    )


def test_groups() -> None:
    two = FakeMesh(hosts=((0, 1), (2, 3)), rank=2)
    world, host, cross = (FakeGroup(ranks, 2) for ranks in ((0, 1, 2, 3), (2, 3), (0, 2)))
    for name in ("zero1", "zero2", "zero3"):
        assert ShardGroups.of(find_strategy(name), two) == ShardGroups(world, world, None)  # type: ignore[arg-type]
    for name in ("hybrid", "hybrid_zero2"):
        assert ShardGroups.of(find_strategy(name), two) == ShardGroups(world, host, cross)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hosts", "message"),
    [
        ("hybrid", ((0, 1),), "strategy 'hybrid' shards inside hosts and replicates between them, but all 2 "
         "ranks are on one host: use 'zero3', or say what shards by axes, "
         "imece.init({'replicate': ..., 'shard': ...})"),
        ("hybrid_zero2", ((0,),), "strategy 'hybrid_zero2' shards inside hosts and replicates between them, "
         "but all 1 ranks are on one host: use 'zero2', or say what shards by axes, "
         "imece.init({'replicate': ..., 'shard': ...})"),
        ("hybrid", ((0, 1), (2,)), "strategy 'hybrid' needs the same number of ranks on every host, and they "
         "have 1 to 2"),
    ],
)  # fmt: skip
def test_a_mesh_without_such_groups(name: str, hosts: Partition, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ShardGroups.of(find_strategy(name), FakeMesh(hosts=hosts))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shard": 2}, "strategy 'hybrid' shards along the axis shard and replicates along replicate, and "
         "this mesh has all 2 ranks in shard: use 'zero3'"),
        ({"replicate": 2, "tensor": 2}, "strategy 'hybrid' on a mesh with an axis tensor or pipeline: say "
         "what is shared out by an axis shard, imece.init({..., 'shard': 2})"),
    ],
)  # fmt: skip
def test_axes_without_such_groups(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ShardGroups.of(find_strategy("hybrid"), FakeMesh(sizes))
    assert str(caught.value) == message


def on_axes() -> dict[str, Any]:
    """Hybrid along axes on one host, and gradients that tensor ranks do not mix."""
    with contextlib.closing(imece.init({"replicate": 2, "shard": 2})) as mesh:
        case = replace(CASES["sgd"], mesh=mesh)
        expected = list(case.alone(4))
        wrong = {
            name: first_difference(list(case.together(name, mesh.world_group)), expected, EXACT)
            for name in ("zero3", "hybrid", "hybrid_zero2")
        }
        model, _ = case.wrapped("hybrid", mesh.world_group)
        shard, replicas = model.sharding.groups.shard, model.sharding.groups.replicas
        members = [dist.get_process_group_ranks(each) for each in (shard, replicas)]
    with contextlib.closing(imece.init({"replicate": 2, "tensor": 2})) as mesh:
        own = mesh.coordinate("tensor")
        means = {}
        for name in ("replicate", "zero1"):
            weight = torch.nn.Linear(2, 1, bias=False)
            model, optimizer = imece.parallelize(weight, lambda each: torch.optim.SGD(each, lr=1.0), name)
            before = weight.weight.detach().clone()
            model(torch.full((1, 2), 1.0 + mesh.rank)).sum().backward()
            optimizer.step()
            means[name] = float((before - weight.weight).detach().mean())
    return {"wrong": wrong, "members": members, "means": means, "tensor rank": own}


def test_axes() -> None:
    told = run_ranks(on_axes, 4, backend=None)
    assert [each["wrong"] for each in told] == [{"zero3": None, "hybrid": None, "hybrid_zero2": None}] * 4
    assert [each["members"] for each in told] == [
        [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]],
    ]  # fmt: skip
    assert [each["tensor rank"] for each in told] == [0, 1, 0, 1]
    for each in told:  # ranks 0 and 2 have inputs of 1 and 3, ranks 1 and 3 of 2 and 4
        mean = 2.0 + each["tensor rank"]
        assert each["means"] == pytest.approx({"replicate": mean, "zero1": mean})


CASES = {
    "sgd": Case(make=momentum, micros=2, clip=0.05),
    "muon and adamw": Case(make=muon_and_adamw, schedule=True),
}
TWO_HOSTS = ("replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")


def alone_in_its_host(strategy: Strategy, mesh: Mesh, spread: bool) -> ShardGroups:
    return replace(of(strategy, mesh, spread), replicas=None)


def flat(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Instead of the schedule that is best between hosts."""
    return None


def on_two_hosts() -> dict[str, Any]:
    """What is wrong, and what is when hosts keep their sums for themselves, or go the backend's own way."""
    mesh = imece.init()
    assert len(mesh.hosts) == 2 and mesh.world_size == 4
    group = mesh.world_group

    def differences(case: Case, strategies: Sequence[str]) -> tuple[list[str], list[str]]:
        """From one process, and from the bits of replicate."""
        case = replace(case, mesh=mesh)
        expected = list(case.alone(4))
        got = {name: list(case.together(name, group)) for name in strategies}
        found = {name: first_difference(each, expected, EXACT) for name, each in got.items()}
        bits = {name: first_difference(each, got[strategies[0]]) for name, each in got.items()}
        return [f"{name}: {each}" for name, each in found.items() if each], [
            f"{name}: {each}" for name, each in bits.items() if each
        ]

    wrong = [differences(case, TWO_HOSTS) for case in CASES.values()]
    with replaced(ShardGroups, "of", alone_in_its_host):
        noticed, _ = differences(CASES["sgd"], ["hybrid", "hybrid_zero2"])
    case = replace(CASES["sgd"], mesh=mesh)
    whole = list(case.together("replicate", group))
    with replaced(replicate, "best_schedule", flat):
        other_bits = first_difference(list(case.together("zero1", group)), whole)
    return {
        "wrong": wrong,
        "noticed": noticed,
        "other bits": other_bits,
        "sent": {name: sent_between_hosts(name, mesh) for name in ("zero1", "zero2", "zero3")},
        "auto": usual_strategy(mesh).name,
    }


def sent_between_hosts(strategy: str, mesh: Mesh) -> tuple[int, int]:
    """Bytes that this rank sends to the other host in a step, and what they should be."""
    model, optimizer = Case(mesh=mesh).wrapped(strategy, mesh.world_group)
    with sent_by("hierarchical_chunk") as sent:
        for turn in range(2):
            sent.clear()
            plain(model, turn, mesh.rank).backward()
            optimizer.step()
            model.sharding.settle()
    stores = model.sharding.stores
    nbytes = sum(store.parameters.numel() * store.parameters.itemsize for store in stores)
    moved = 2 * nbytes
    if model.sharding.gathering is not None:
        # Units are gathered twice, but for the root and the last ones, which stay from forward to backward.
        stay = {0, *range(len(model.sharding.gathering.units))[1 - model.sharding.gathering.in_flight :]}
        kept = [store.parameters for store in stores if store.unit in stay]
        moved += nbytes - sum(each.numel() * each.itemsize for each in kept)
    return sum(sent), moved // 2 // 2


def test_two_hosts() -> None:
    for told in run_ranks(on_two_hosts, 4, backend=None, ranks_per_host=2):
        assert told["wrong"] == [[[], []], [[], []]] and len(told["noticed"]) == 2
        assert told["other bits"] is not None
        for name, (sent, expected) in told["sent"].items():
            assert sent == expected > 0, f"{name} sends {sent} bytes instead of {expected}"
        assert told["auto"] == "replicate"  # tests/train/test_faults.py sees what it is on one host
