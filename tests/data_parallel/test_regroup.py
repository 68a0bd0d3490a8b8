"""A wrapped model goes on with other ranks, bit-equal to one wrapped there with the same values."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import imece
from imece import MixedPrecision, parallelize
from imece.bench.reference_model import Decoder, Shape, batch
from imece.checkpoint import TrainingState
from imece.checkpoint.deal import Slice
from imece.collectives import common_memory, companions
from imece.data_parallel.batch_norm import SyncBatchNorm
from imece.data_parallel.sharding import stores
from imece.errors import PeerLostError
from imece.membership.pieces import Pieces
from imece.mesh import Mesh
from imece.opening import reform
from tests.ranks import run_ranks, start_ranks

SHAPE = Shape(vocabulary=32, width=16, layers=3, heads=2, length=8)
CAP_MB = 0.015  # several buckets
LR, DECAY = 1e-2, 0.9
STEPS = 2  # in each world
GROUP_TIMEOUT = timedelta(seconds=20)

Held = Mapping[str, torch.Tensor | Slice]


def adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [(name, each) for name, each in model.named_parameters() if each.ndim <= 1]
    return [AdamW([{"params": matrices, "weight_decay": 0.1}], LR), AdamW(vectors, LR)]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    return [Muon(matrices, LR), AdamW([each for each in model.parameters() if each.ndim != 2], LR)]


class Normed(nn.Module):
    """The decoder, something that is frozen, and a batch norm over all ranks with its running means."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(SHAPE)
        self.norm = SyncBatchNorm(4, process_group=dist.group.WORLD)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens[:, :4].float() * self.frozen)
        loss: torch.Tensor = self.decoder(tokens) + normed.square().mean()
        return loss


@dataclass(frozen=True)
class Case:
    """One way to train."""

    strategy: str
    gather: bool = False
    precision: MixedPrecision | None = None
    make: Callable[[nn.Module], list[Optimizer]] = adamw
    build: Callable[[], nn.Module] = lambda: Decoder(SHAPE)
    meta: bool = False
    grows: bool = False
    """Whether it also comes to three ranks, in the first test."""

    def wrapped(self, group: dist.ProcessGroup | Mesh, seed: int) -> Training:
        torch.manual_seed(seed)
        with torch.device("meta" if self.meta else "cpu"):
            model = self.build()
        model, optimizers = parallelize(
            model, self.make(model), self.strategy, group,
            bucket_cap_mb=CAP_MB, gather=self.gather, precision=self.precision,
        )  # fmt: skip
        return Training(model, optimizers)


BF16 = MixedPrecision(torch.bfloat16, torch.float32)
CASES = {
    "replicate": Case("replicate", build=Normed, grows=True),
    "zero1": Case("zero1", build=Normed),
    "zero2": Case("zero2", precision=BF16),
    "muon": Case("zero2", make=muon),
    "zero3": Case("zero3", grows=True),
    "gathered": Case("zero3", gather=True, precision=BF16, meta=True, grows=True),
}


class Training:
    """A wrapped model and all that a script has beside it."""

    def __init__(self, model: Any, optimizers: list[Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.state = TrainingState(model, optimizers)
        self.schedulers = [LambdaLR(each, lambda step: DECAY**step) for each in optimizers]
        self.at_step: list[torch.Tensor] = []  # what a hook of the user's sees
        optimizers[-1].register_step_post_hook(lambda *_: self._look())
        self.parameters = list(model.module.parameters())

    def _look(self) -> None:
        if not self.gathers:
            self.at_step = [each.detach().clone() for each in self.parameters]

    @property
    def gathers(self) -> bool:
        return getattr(getattr(self.model, "sharding", None), "gathering", None) is not None

    def loss(self, step: int) -> torch.Tensor:
        tokens = batch(SHAPE, 2 * SHAPE.length, seed=10 * step + dist.get_rank())
        return cast(torch.Tensor, self.model(tokens))

    def step(self, step: int) -> torch.Tensor:
        loss = self.loss(step)
        loss.backward()
        self.model.clip_grad_norm_(0.5)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.gathers:
            assert all(map(torch.equal, self.at_step, self.parameters)), "a hook of the user's came too early"
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()

    def at(self, step: int) -> None:
        """So many steps have been taken, by others."""
        for scheduler in self.schedulers:
            scheduler.last_epoch = step
            for group in scheduler.optimizer.param_groups:
                group["lr"] = LR * DECAY**step


def kept_in(files: Sequence[Path]) -> Pieces:
    """What all ranks had, read as a checkpoint is."""
    pieces = Pieces()
    for file in files:
        for name, (shape, start, flat) in torch.load(file).items():
            pieces.add(name, shape, start, flat)
    return pieces


def keep(own: Held, file: Path) -> None:
    held = {}
    for name, each in own.items():
        tensor, shape, start = (
            (each.tensor, each.shape, each.start) if isinstance(each, Slice) else (each, tuple(each.shape), 0)
        )
        held[name] = shape, start, tensor.reshape(-1).clone()
    torch.save(held, file)


def same(one: Held, other: Held) -> bool:
    def plain(each: torch.Tensor | Slice) -> tuple[torch.Tensor, int]:
        return (each.tensor, each.start) if isinstance(each, Slice) else (each, 0)

    for name in one.keys() | other.keys():
        (mine, start), (theirs, their_start) = plain(one[name]), plain(other[name])
        if start != their_start or not torch.equal(mine, theirs):
            return False
    return True


class Worlds:
    """Opens and closes the worlds that the processes of a test make up."""

    def __init__(self, backend: str, folder: str) -> None:
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self.me, self.backend, self.folder = int(os.environ["RANK"]), backend, Path(folder)

    @contextlib.contextmanager
    def open(self, name: str, members: Sequence[int]) -> Iterator[dist.ProcessGroup]:
        """members: processes in the order of their ranks; this one is among them."""
        companions.forget()
        dist.init_process_group(
            self.backend, store=dist.PrefixStore(name, self.store), timeout=GROUP_TIMEOUT,
            rank=members.index(self.me), world_size=len(members),
        )  # fmt: skip
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        gc.collect()
        dist.destroy_process_group()

    def files(self, name: str, members: Sequence[int]) -> list[Path]:
        return [self.folder / f"{name} {each}" for each in members]

    def keep(self, name: str, training: Training) -> None:
        keep(training.state.own(), self.folder / f"{name} {self.me}")


def go_on_beside_a_new_one(
    case: Case, training: Training, group: dist.ProcessGroup | Mesh, kept: Pieces, steps: range
) -> None:
    """Fill a regrouped model and one that is wrapped in this world, train both, compare all they have."""
    fresh = case.wrapped(group, seed=99)
    fresh.at(steps.start)
    for each in (training, fresh):
        each.state.load(kept, frozen=False)
    assert same(training.state.own(), fresh.state.own())
    for step in steps:
        mine, expected = training.step(step), fresh.step(step)
        assert torch.equal(mine, expected), f"step {step}: the loss is {mine} and not {expected}"
        lrs = [group["lr"] for each in training.optimizers for group in each.param_groups]
        assert lrs == pytest.approx([LR * DECAY ** (step + 1)] * len(lrs))
    assert same(training.state.own(), fresh.state.own())
    assert [*map(id, training.model.module.parameters())] == [*map(id, training.parameters)]
    with contextlib.nullcontext() if case.strategy == "replicate" else training.model.gathered():
        assert all(bool(each.isfinite().all()) for each in training.parameters)


# From 4 ranks to 2, to 3.


def shrink_and_grow(backend: str, folder: str, names: Sequence[str]) -> None:
    """Processes 1 and 3 go on without 0 and 2; then, in some cases, a new model in process 0 joins them."""
    worlds = Worlds(backend, folder)
    for name in names:
        case = CASES[name]
        if backend == "gloo":
            case = replace(case, gather=False)
        training: Training | None = None
        with worlds.open(f"{name} 4", range(4)) as group:
            training = case.wrapped(group, seed=1)
            for step in range(STEPS):
                training.step(step)
            worlds.keep(f"{name} 4", training)
            dist.barrier()
        if worlds.me in (1, 3):
            with worlds.open(f"{name} 2", (1, 3)) as group:
                training.model.regroup(group)
                kept = kept_in(worlds.files(f"{name} 4", range(4)))
                go_on_beside_a_new_one(case, training, group, kept, range(STEPS, 2 * STEPS))
                worlds.keep(f"{name} 2", training)
                dist.barrier()
        if worlds.me == 0 and case.grows:
            with worlds.open(f"{name} 1", (0,)) as group:
                training = case.wrapped(group, seed=5)
                training.step(0)
                training.at(2 * STEPS)
        if worlds.me != 2 and case.grows:
            with worlds.open(f"{name} 3", (3, 0, 1)) as group:
                training.model.regroup(group)
                kept = kept_in(worlds.files(f"{name} 2", (1, 3)))
                go_on_beside_a_new_one(case, training, group, kept, range(2 * STEPS, 3 * STEPS))
                dist.barrier()


def test_shrinks_and_grows_in_shared_memory(tmp_path: Path) -> None:
    run_ranks(shrink_and_grow, 4, args=["shm", str(tmp_path), list(CASES)], backend=None)


@pytest.mark.slow
def test_shrinks_and_grows_on_gloo(tmp_path: Path) -> None:
    names = ["replicate", "zero1", "gathered"]
    run_ranks(shrink_and_grow, 4, args=["gloo", str(tmp_path), names], backend=None)


# After a death in the middle of a backward, and of a regroup.


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_backward(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """When most buckets have left."""
    output.register_hook(die)


def die_in_the_second_bucket() -> None:
    calls = iter((common_memory.common_zeros, die))

    def common_zeros(*args: Any) -> torch.Tensor:
        return next(calls)(*args)  # type: ignore[return-value]

    pytest.MonkeyPatch().setattr(stores, "common_zeros", common_zeros)


def lose_one_each_time(backend: str, folder: str, names: Sequence[str], processes: int) -> list[str]:
    """In each case the last process dies; in the last one, another one in the regroup that follows."""
    worlds = Worlds(backend, folder)
    died = []
    for number, name in enumerate(names):
        case, left = CASES[name], range(processes - number)
        with worlds.open(name, left) as group:
            training = case.wrapped(group, seed=1)
            training.step(0)
            worlds.keep(name, training)
            dist.barrier()
            if worlds.me == left[-1]:
                training.model.module.tokens.register_forward_hook(die_in_backward)
            try:
                training.step(1)
            except PeerLostError:
                died.append(name)
            training.model.leave()  # or those who wait for this one would go on waiting
            del group
        if number + 1 == len(names) and backend == "shm":
            left = left[:-1]
            with worlds.open(f"{name} again", left) as group:
                if worlds.me == left[-1]:
                    die_in_the_second_bucket()
                try:
                    training.model.regroup(group)
                except PeerLostError:
                    died.append("in regroup")
        with worlds.open(f"{name} after", left[:-1]) as group:
            training.model.regroup(group)
            training.at(1)
            kept = kept_in(worlds.files(name, range(processes - number)))
            go_on_beside_a_new_one(case, training, group, kept, range(1, 3))
            dist.barrier()
    return died


@pytest.mark.parametrize(
    ("backend", "names", "lost"),
    [
        ("shm", ["zero2", "gathered", "zero3"], 4),
        pytest.param("gloo", ["zero2", "gathered"], 2, marks=pytest.mark.slow),
    ],
)
def test_goes_on_after_deaths(backend: str, names: list[str], lost: int, tmp_path: Path) -> None:
    processes = lost + 2
    with start_ranks(lose_one_each_time, processes, args=[backend, str(tmp_path), names, processes]) as ranks:
        results = ranks.wait(60, after_failure_s=30)
    assert [each.returncode for each in results] == [0, 0] + [-signal.SIGKILL] * lost, "\n".join(
        each.report() for each in results
    )
    for each in results[:2]:
        assert each.value == [*names, *(["in regroup"] if backend == "shm" else [])]


# What stays, what goes, what is refused.


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:imece-segment")


def keep_nothing_of_old_worlds(folder: str) -> None:
    worlds = Worlds("shm", folder)
    for name in ("replicate", "zero1", "zero3", "gathered"):
        case = CASES[name]
        found: list[int] = []
        training: Training | None = None
        for number in range(4):
            with worlds.open(f"{name} {number}", range(2)) as group:
                if training is None:
                    training = case.wrapped(group, seed=1)
                else:
                    training.model.regroup(group)
                training.step(number)
                del group
                gc.collect()
                found.append(segments())
                dist.barrier()
        assert len(set(found[1:])) == 1, f"{name}: {found} segments are mapped"


def test_memory_of_old_worlds_goes(tmp_path: Path) -> None:
    run_ranks(keep_nothing_of_old_worlds, 2, args=[str(tmp_path)], backend=None)


def keep_options(folder: str) -> None:
    worlds = Worlds("shm", folder)
    with worlds.open("one", range(2)) as group:
        training = CASES["replicate"].wrapped(group, seed=1)
        model = training.model
        model.register_comm_hook(group, default_hooks.allreduce_hook)
        model.record_trace()
        training.step(0)
        values = [each.detach().clone() for each in training.parameters]
        training.loss(1).backward()
        late = training.loss(1)
        broken = training.loss(1)
        broken.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            broken.backward()
    with worlds.open("two", range(2)) as group:
        model.regroup(group)
        assert model.reducer.leaving.hook.call is default_hooks.allreduce_hook
        assert model.reducer.leaving.hook.state is group, "the hook would ask the old group"
        assert model.module.norm.process_group is group
        assert all(map(torch.equal, values, training.parameters)), "a replica's values do not change"
        assert all(each.grad is None for each in training.parameters)
        assert [len(each._post_accumulate_grad_hooks) for _, each in model.trained] == [1] * len(
            model.reducer.slots
        )
        with pytest.raises(RuntimeError, match="before regroup"):
            late.backward()
        before = model.last_trace
        training.step(1)
        assert model.last_trace is not before

        sharded = CASES["gathered"].wrapped(group, seed=1)
        with sharded.model.gathered(), pytest.raises(RuntimeError, match="inside of gathered"):
            sharded.model.regroup(group)
        sharded.model.module.tokens.register_full_backward_hook(lambda *_: sharded.model.regroup(group))
        with pytest.raises(RuntimeError, match="inside of backward"):
            sharded.loss(0).backward()
        frozen = CASES["zero3"].wrapped(group, seed=1)
        frozen.parameters[-1].requires_grad_(False)
        model.leave()
        training.parameters[-1].requires_grad_(group.rank() == 0)  # between a GAN's two updates
    with worlds.open("three", range(2)) as group:
        model.regroup(group)
        assert training.parameters[-1].requires_grad == (group.rank() == 0)
        frozen.model.regroup(group)
        assert not frozen.parameters[-1].requires_grad
        frozen.model.sharding.check_views()
        frozen.step(0)


def test_options_stay_and_misuse_is_refused(tmp_path: Path) -> None:
    run_ranks(keep_options, 2, args=[str(tmp_path)], backend=None)


# Over two hosts.


def regroup_hosts(folder: str) -> None:
    """The same four ranks again; then those of one host."""
    mesh = imece.init()
    case = Case("hybrid", meta=True)
    training = case.wrapped(mesh, seed=1)
    for step in range(STEPS):
        training.step(step)
    file = Path(folder) / str(mesh.rank)
    keep(training.state.own(), file)
    described = [repr(training.model).splitlines()[1]]
    training.model.leave()
    described.append(repr(training.model).splitlines()[1])
    assert described == ["  hybrid, 4 ranks", "  hybrid, 0 ranks"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    companions.forget()
    reform(3 - mesh.rank, 4, dist.PrefixStore("turned", store))
    training.model.regroup(mesh)
    kept = kept_in([Path(folder) / str(rank) for rank in range(4)])
    go_on_beside_a_new_one(case, training, mesh, kept, range(STEPS, 2 * STEPS))

    host, rank = divmod(mesh.rank, 2)
    companions.forget()
    reform(rank, 2, dist.PrefixStore(f"host {host}", store))
    before = training.model.sharding
    with pytest.raises(ValueError, match="all 2 ranks are on one host: use 'zero3'"):
        training.model.regroup(mesh)
    assert training.model.sharding is before
    mesh.world = replace(mesh.world, full_size=4)  # these two started while the job's other host was away
    Case("hybrid").wrapped(mesh, seed=1).step(0)


def test_hybrid_takes_other_ranks_of_two_hosts(tmp_path: Path) -> None:
    run_ranks(regroup_hosts, 4, args=[str(tmp_path)], backend=None, ranks_per_host=2)
