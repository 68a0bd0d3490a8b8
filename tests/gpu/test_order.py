"""Without a GPU: whether everything on a step's streams comes after what it needs (cpu_as_gpu.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import imece
from imece import mesh
from imece.collectives.streams import Place, _beside
from imece.data_parallel import shard
from imece.data_parallel.reducing.leaving import Leaving
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding import borrowed
from imece.data_parallel.sharding.coming import Coming
from imece.data_parallel.sharding.offload import Streams
from imece.data_parallel.sharding.units import Flat, Unit
from imece.data_parallel.strategy import ShardGroups
from tests.gpu.cpu_as_gpu import CUDA, Race, cpu_as_gpu, gpu
from tests.gpu.fake_world import enter
from tests.meshes import FakeMesh
from tests.ranks import run_ranks

STEPS, SIDE = 3, 16


@dataclass(frozen=True)
class Way:
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    scaled: bool = False
    accumulate: bool = False
    branches: bool = False
    adds: bool = False  # a second backward to sums that are there
    steps_beside: bool = False  # the optimizer, on another stream than backward
    elsewhere: bool = False  # on another stream than that on which the model was wrapped
    regroups: bool = False  # before the last step
    writes: bool = False  # what the optimizer steps, behind each step
    joins: bool = False  # inside of join()


HOSTED: dict[str, Any] = {"offload": "optimizer"}
WAYS = {
    "replicate": Way("replicate"),
    "replicate, bf16 on the wire": Way("replicate", {"wire": "bf16"}),
    "zero1": Way("zero1"),
    "zero2": Way("zero2"),
    "zero2, offload": Way("zero2", HOSTED),
    "zero1, written": Way("zero1", writes=True),
    "zero1, joined": Way("zero1", joins=True),
    "zero3": Way("zero3"),
    "zero3, offload": Way("zero3", {"offload": "parameters"}),
    "zero3, branches": Way("zero3", branches=True),
    "zero3, stepped beside": Way("zero3", adds=True, steps_beside=True),
    "hybrid": Way("hybrid"),
}
MORE_WAYS = {
    "replicate, tokens": Way("replicate", {"average": "tokens"}, accumulate=True),
    "replicate, scaled": Way("replicate", scaled=True),
    "replicate, elsewhere": Way("replicate", elsewhere=True),
    "replicate, joined": Way("replicate", joins=True),
    "replicate, int8 on the wire": Way("replicate", {"wire": "int8"}),
    "zero1, bf16": Way("zero1", bf16=True),
    "zero1, bf16 on the wire": Way("zero1", {"wire": "bf16"}),
    "zero1, offload": Way("zero1", HOSTED, bf16=True, accumulate=True),
    "zero1, offload, scaled": Way("zero1", HOSTED, scaled=True),
    "zero1, branches": Way("zero1", branches=True),
    "zero2, scaled": Way("zero2", scaled=True),
    "zero2, branches": Way("zero2", branches=True, accumulate=True),
    "zero2, added": Way("zero2", adds=True),
    "zero2, stepped beside": Way("zero2", bf16=True, steps_beside=True),
    "zero2, elsewhere": Way("zero2", elsewhere=True),
    "zero1, bf16, written": Way("zero1", bf16=True, writes=True),
    "zero2, written": Way("zero2", writes=True),
    "zero2, offload, written": Way("zero2", HOSTED, writes=True),
    "zero3, written": Way("zero3", writes=True),
    "zero3, bf16": Way("zero3", bf16=True),
    "zero3, kept": Way("zero3", {"reshard_after_forward": False}),
    "zero3, far ahead": Way("zero3", {"gathers_in_flight": 4}),
    "zero3, accumulated": Way("zero3", accumulate=True),
    "zero3, offload, bf16": Way("zero3", {"offload": "parameters"}, bf16=True),
    "zero3, offload, branches": Way("zero3", {"offload": "parameters"}, branches=True),
    "zero3, elsewhere": Way("zero3", elsewhere=True),
    "hybrid, offload, bf16": Way("hybrid", {"offload": "parameters"}, bf16=True),
    "hybrid, bf16 on the wire": Way("hybrid", {"wire": "bf16"}, accumulate=True),
    "hybrid_zero2": Way("hybrid_zero2", accumulate=True),
    "zero1, regrouped": Way("zero1", regroups=True),
    "zero3, offload, regrouped": Way("zero3", {"offload": "parameters"}, regroups=True),
}


class Branches(nn.Module):
    """Blocks by turns on the stream of the model and on another one, which begin side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.beside = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4)), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            self.beside.wait_stream(here)
            x.record_stream(self.beside)
            with torch.cuda.stream(self.beside):
                there = other(x)
            mine = one(x)
            here.wait_stream(self.beside)
            there.record_stream(here)
            x = mine + there
        return x


def trained(way: Way) -> list[str]:
    """For what the host waited in the last step. AssertionError: a Race."""
    hybrid = way.strategy.startswith("hybrid")
    enter(4 if hybrid else 2, "cuda")
    try:
        with cpu_as_gpu(), _two_hosts() if hybrid else contextlib.nullcontext():
            return _trained(way)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _two_hosts() -> Iterator[None]:
    """Inside, ranks 0 and 1 share a host, and so do 2 and 3."""
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 2])]
    with mock.patch.object(ShardGroups, "of", lambda *_, **__: ShardGroups(*groups)):
        yield


def _trained(way: Way) -> list[str]:
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(4)))
    inner = (Branches() if way.branches else plain).to(CUDA)
    bf16 = torch.bfloat16
    more: dict[str, Any] = {"precision": imece.MixedPrecision(bf16, bf16)} if way.bf16 else {}
    model, optimizer = imece.parallelize(
        inner, AdamW(inner.parameters(), 1e-2), way.strategy, dist.group.WORLD, bucket_cap_mb=1e-3,
        **way.options, **more,
    )  # fmt: skip
    assert all(each.device == CUDA for each in model.parameters())
    scaler = imece.GradScaler("cuda", init_scale=16.0) if way.scaled else None
    x = torch.ones(4, SIDE, device=CUDA, dtype=bf16 if way.bf16 else torch.float32)
    stream, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    if way.elsewhere:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), model.join(enable=way.joins):
        for step in range(STEPS):
            if way.regroups and step == STEPS - 1:
                model(x).float().mean().backward()  # nobody waits for what it gathers, or sends down
                model.leave()
                model.regroup(dist.new_group([0, 1]))
            gpu.waits.clear()
            for last in (False, True) if way.accumulate or way.adds else (True,):
                with contextlib.nullcontext() if last or way.adds else model.no_sync():
                    loss = model(x).float().square().mean()
                    if "average" in way.options:
                        loss = model.weigh(loss, len(x))
                    (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            else:
                beside.wait_stream(stream)
                with torch.cuda.stream(beside if way.steps_beside else stream):
                    optimizer.step()
                    optimizer.zero_grad()
                stream.wait_stream(beside)
            if way.writes:
                with torch.no_grad():
                    for part in optimizer.param_groups[0]["params"]:
                        part.clamp_(-1.0, 1.0)
                model.take_over_masters()
        waits = list(gpu.waits)
        assert gpu.nccl, "nothing was moved"
        model.state_dict()
    torch.cuda.current_stream().wait_stream(stream)
    assert loss.isfinite()
    return waits


def outcomes(names: list[str]) -> dict[str, list[str]]:
    """By way, for what the host has waited, or the race."""
    found = {}
    for name in names:
        try:
            found[name] = trained((WAYS | MORE_WAYS)[name])
        except Race as race:
            found[name] = [f"race: {race}"]
    return found


def _check(names: list[str]) -> None:
    (found,) = run_ranks(outcomes, 1, args=(names,), backend=None)
    assert list(found) == names
    for name, waits in found.items():
        allowed = {"Event.synchronize"} if "offload" in name else set()  # of what came down, and went up
        allowed |= {"_local_scalar_dense", "copy_"} if "scaled" in name else set()  # whether it overflows
        allowed |= (
            {"equal"} if "regrouped" in name else set()
        )  # whether the first step with new parts moves them
        assert set(waits) <= allowed, f"{name}: {waits}"


def test_all_is_behind_what_it_needs() -> None:
    _check(list(WAYS))


@pytest.mark.slow
def test_all_is_behind_what_it_needs_in_more_ways() -> None:
    _check(list(MORE_WAYS))


def looked_at() -> list[list[Any]]:
    """Of steps with check_finite, in the second of which a NaN comes: who brought it, the host's waits."""
    enter(2, "cuda")
    try:
        with cpu_as_gpu():
            inner: Any = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(4))).to(CUDA)
            model = imece.DistributedDataParallel(inner, check_finite=True, bucket_cap_mb=1e-3)
            factor = [1.0]
            inner[1].bias.register_hook(lambda grad: grad * factor[0])
            found = []
            for factor[0] in (1.0, torch.nan, 1.0):
                gpu.waits.clear()
                model(torch.ones(4, SIDE, device=CUDA)).sum().backward()
                found.append([model.nonfinite, len(gpu.waits)])
                model.zero_grad()
            assert len(model.reducer.buckets) > 1
            return found
    finally:
        dist.destroy_process_group()


def test_whether_gradients_are_finite_is_asked_once() -> None:
    """Not of each bucket: backward would wait for it. All ranks are taken to be as this one."""
    (found,) = run_ranks(looked_at, 1, backend=None)
    first, second, third = found
    assert first == third == [{}, 1]
    assert second[0] == {"0": ["1.bias"], "1": ["1.bias"]}


# What is taken away is missed.


def _nothing(*_: object) -> None:
    pass


@contextlib.contextmanager
def _not_behind(place: Place) -> Iterator[None]:
    """As Place.behind, but not behind."""
    with torch.cuda.stream(_beside(CUDA)):
        yield
        place._end = torch.cuda.current_stream().record_event()


def _not_waiting(leaving: Leaving) -> None:
    for bucket in leaving._gradients.all:
        if bucket.work is not None:
            bucket.work = None
            leaving._gradients.reduced(bucket)


TAKEN: list[tuple[Any, str, Any, str]] = [
    (Coming, "wait", _nothing, "zero1"),
    (Leaving, "wait_for_all", _not_waiting, "zero2"),
    (Place, "behind", _not_behind, "replicate"),
    (Place, "join", _nothing, "replicate, bf16 on the wire"),
    (Place, "join", _nothing, "hybrid"),
    (Unit, "settle", lambda unit: unit._works.clear(), "zero3"),
    (Flat, "come", _nothing, "zero3, branches"),
    (shard, "behind_this_stream", _nothing, "zero3, stepped beside"),
    (Streams, "within", lambda _: contextlib.nullcontext(), "zero3, offload"),
    (Streams, "reuse", _nothing, "zero2, offload"),
    (Streams, "wait", _nothing, "zero2, offload"),
]


def without_each() -> list[list[str]]:
    """What was taken away, and what came of it."""
    found = []
    for owner, name, instead, way in TAKEN:
        with mock.patch.object(owner, name, instead):
            (came,) = outcomes([way]).values()
        found.append([f"{owner.__name__}.{name}", *came[-1:]])
    return found


def test_what_is_taken_away_is_missed() -> None:
    (found,) = run_ranks(without_each, 1, backend=None)
    assert len(found) == len(TAKEN)
    for taken, came in found:
        assert came.startswith("race: "), f"nobody misses {taken}"


def taken_back_elsewhere(recorded: bool) -> str:
    """The race when a bucket's memory is given back on another stream than the one on which it was lent."""
    enter(2, "cuda")
    try:
        with cpu_as_gpu(), contextlib.ExitStack() as inside:
            inner = nn.Linear(SIDE, SIDE).to(CUDA)
            model, _ = imece.parallelize(inner, AdamW(inner.parameters()), "zero2", dist.group.WORLD)
            assert isinstance(model, ShardedDataParallel)
            memory, (bucket, *_) = model.sharding.memory, model.sharding.all
            if not recorded:
                inside.enter_context(mock.patch.object(borrowed, "behind_this_stream", _nothing))
            memory.lend(bucket)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                bucket.flat.add_(1)
                memory.take_back(bucket)
            gpu.look_for_what_went()
            return ""
    except Race as race:
        return str(race)
    finally:
        dist.destroy_process_group()


def taken_back_elsewhere_either_way() -> list[str]:
    return [taken_back_elsewhere(recorded) for recorded in (True, False)]


def test_a_bucket_may_be_given_back_on_another_stream() -> None:
    (found,) = run_ranks(taken_back_elsewhere_either_way, 1, backend=None)
    assert not found[0] and "goes back while stream" in found[1]


# Beside calls along `tensor` NCCL wants one order of all calls.


def launchers(axes: dict[str, int]) -> set[str]:
    """The threads that begin collectives on a mesh with these axes."""
    fake = FakeMesh(axes, device="cuda", backend="nccl")
    found: set[str] = set()
    with mock.patch.object(mesh, "current", lambda: fake):
        for way in ("replicate, bf16 on the wire", "zero1"):
            trained(WAYS[way])
            found |= gpu.launchers
    return found


def launchers_by_axes() -> list[list[str]]:
    meshes = ({"tensor": 2}, {"replicate": 2}, {"tensor": 2, "context": 2})
    return [sorted(launchers(axes)) for axes in meshes]


def test_one_thread_begins_all_collectives_beside_those_along_tensor() -> None:
    (found,) = run_ranks(launchers_by_axes, 1, backend=None)
    tensor, replicate, with_context = found
    assert tensor == ["MainThread"]
    assert {"imece-check", "imece-collectives"} <= set(replicate) and replicate == with_context


# The checks themselves.


def small_races() -> list[str]:
    """By what each of them ends with; "" for one that is none."""

    def unwaited(side: Any, x: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            x.add_(1)

    def waited(side: Any, x: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        unwaited(side, x)
        torch.cuda.current_stream().wait_stream(side)
        x.mul_(2)

    def other_bytes(side: Any, x: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        unwaited(side, x[:2])
        x[2:].mul_(2)

    def gone(side: Any, x: torch.Tensor, told: bool = False) -> None:
        x = x + 1
        side.wait_stream(torch.cuda.current_stream())
        unwaited(side, x)
        if told:
            x.record_stream(side)
        del x
        gpu.look_for_what_went()

    def read_early(side: Any, x: torch.Tensor) -> None:
        here = torch.empty(4, pin_memory=True)
        here.copy_(x, non_blocking=True)
        here + 1

    def two_devices(side: Any, x: torch.Tensor) -> None:
        x + torch.ones(4)

    def blocking(side: Any, x: torch.Tensor) -> None:
        x.cpu() + 1
        x + 1.0 + torch.tensor(1.0)

    def unheard(side: Any, x: torch.Tensor) -> None:
        with contextlib.suppress(Race):  # as in a thread that keeps its errors for whoever waits for it
            unwaited(side, x)
        raise FloatingPointError("the loss is NaN")

    cases: list[Any] = [
        unwaited, waited, other_bytes, gone, lambda side, x: gone(side, x, True), read_early, two_devices,
        blocking, unheard,
    ]  # fmt: skip
    found = []
    for case in cases:
        try:
            with cpu_as_gpu():
                case(torch.cuda.Stream(), torch.ones(4, device=CUDA))
            found.append("")
        except Race as race:
            found.append(str(race))
    return found


def small_waits() -> list[list[str]]:
    """For what the host waits in each of them."""
    cases: list[Any] = [
        lambda x, at: x[at], lambda x, at: x.where(x > 0, 0), lambda x, at: x[:2].fill_(1.0),
        lambda x, at: x[x > 0], lambda x, at: x[at.cpu()], lambda x, at: torch.tensor(1.0, device=CUDA),
        lambda x, at: x[0].copy_(torch.tensor(1.0)),
    ]  # fmt: skip
    found = []
    for case in cases:
        with cpu_as_gpu():
            given = torch.ones(4, device=CUDA), torch.zeros(2, device=CUDA, dtype=torch.int64)
            case(*given)
            found.append(list(gpu.waits))
    return found


def test_what_the_host_waits_for() -> None:
    """How many are chosen; an index or a number of the host's, as its memory is not pinned."""
    (found,) = run_ranks(small_waits, 1, backend=None)
    assert found == [[], [], [], ["index"], ["copy_", "index"], ["tensor"], ["copy_"]]


def test_a_race_is_one() -> None:
    (found,) = run_ranks(small_races, 1, backend=None)
    unwaited, waited, other_bytes, gone, recorded, read_early, two_devices, blocking, unheard = found
    assert "stream 2 writes in add_ what the default stream writes" in unwaited and unheard == unwaited
    assert "goes back while stream 2 may still be in add_" in gone
    assert "the host reads in add what the default stream writes in copy_" in read_early
    assert "two devices" in two_devices
    assert [waited, other_bytes, recorded, blocking] == [""] * 4
