"""GPU work that waits for a lost rank is aborted, and its result is not used; the GPU is a stand-in."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from imece import mesh as meshes
from imece import opening
from imece.collectives.shared_memory.other_devices import OtherDevices
from imece.errors import PeerLostError
from imece.membership import aborting, gpu_errors, member
from imece.membership.aborting import Aborting, device_backends
from imece.membership.member import Member, is_peer_gone
from imece.membership.roster import Generation
from imece.system import connections
from tests.clock import Clock
from tests.meshes import FakeMesh

GPU = torch.device("cuda")


class Waiting:
    """A backend of which a call is under way that only an abort ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.said: list[str] = []
        self.error = ErrorType.SUCCESS

    def get_error(self) -> ErrorType:
        return self.error

    def _group_start(self) -> None:
        self.said.append("start")

    def _group_end(self) -> None:
        self.said.append("end")

    def abort(self) -> None:
        self.said.append("abort")
        self.ended.set()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """The only one on a GPU."""
    backend = Waiting()
    monkeypatch.setattr(aborting, "device_backends", lambda: [backend])
    return backend


def test_an_update_is_not_made_with_what_was_aborted(waiting: Waiting) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    came: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: came.append("another"))
    watched = Aborting()
    watched.before_updates([optimizer], GPU, wait=lambda: waiting.ended.wait(10))
    parameter.grad = torch.full((2,), 7.0)  # anything
    threading.Timer(0.05, watched.abort).start()
    with pytest.raises(PeerLostError) as failure:
        optimizer.step()
    assert parameter.tolist() == [1.0, 1.0] and came == [] and is_peer_gone(failure.value)
    watched.abort()
    assert waiting.said == ["start", "abort", "end"], "once in a generation, all communicators together"
    with pytest.raises(PeerLostError):
        watched.finish()  # a loop that has made no update, as for a gradient that is not finite
    watched.begin()
    optimizer.step()
    assert parameter.tolist() == [-6.0, -6.0] and came == ["another"]
    watched.abort()
    watched.finish()  # this one was made, and counts
    with pytest.raises(PeerLostError):
        watched.finish()


def test_updates_wait_for_sums_that_nobody_has_seen(waiting: Waiting) -> None:
    """Of two optimizers the second would wait for the update of the first."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) for _ in range(2)]
    watched, waits = Aborting(), list[int]()
    watched.before_updates(optimizers, GPU, wait=lambda: waits.append(step))
    for step in range(4):
        if step in (1, 2):
            watched.came()
        if step == 2:
            watched.begin()
        for each in optimizers:
            each.step()
        watched.finish()
    assert waits == [0, 0, 2, 2, 3, 3]
    watched.abort()
    with pytest.raises(PeerLostError):
        watched.came()


def test_on_cpus_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a call that does not come to its end raises."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    watched = Aborting()
    watched.before_updates([optimizer], torch.device("cpu"))
    assert not optimizer._optimizer_step_pre_hooks
    monkeypatch.setattr(aborting, "device_backends", list)
    watched.abort()
    watched.check()


@pytest.mark.parametrize(
    ("before", "members", "lost", "gone"),
    [
        ({0, 1}, (0,), (), True),
        ({0, 1}, (0, 1), ("why",), True),
        ({0, 1}, (0, 1, 2), (), False),
        ({0}, (0,), ("one that was taken in while 0 was in a step, and died",), False),
    ],
)
def test_a_member_aborts_when_others_are_given_up(
    before: set[int],
    members: tuple[int, ...],
    lost: tuple[str, ...],
    gone: bool,
    waiting: Waiting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or cannot be reached; and not when one is taken in: all come to the border between two steps then."""
    clock = Clock(100.0)
    monkeypatch.setattr(member, "time", clock)
    monkeypatch.setattr(connections, "cut", lambda: 0)
    roster = SimpleNamespace(since=lambda number: [Generation(number + 1, members, lost)])
    own = SimpleNamespace(
        _newest=1, _at=0, _members=before, _cut_at=math.inf, _moving=threading.Lock(), aborting=Aborting()
    )
    for _ in range(3):
        Member._cut_off(cast(Member, own), cast(Any, roster))
        clock.sleep(0.9)
    assert waiting.ended.wait(10 if gone else 0.05) is gone
    if gone:
        with pytest.raises(PeerLostError):
            own.aborting.check()
    else:
        own.aborting.check()


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_that_torch_leaves_to_us_ends_the_call_or_the_process(
    goes_on: bool, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network between two hosts, or a timeout: nobody has ended, and no generation comes."""
    ended: list[str] = []
    monkeypatch.setattr(gpu_errors, "end_process", ended.append)
    own = SimpleNamespace(_moving=threading.Lock(), _has_groups=True, _goes_on=goes_on, aborting=Aborting())
    Member._end_failed(cast(Member, own))
    waiting.error = ErrorType.TIMEOUT
    own._has_groups = False  # it is of groups that are about to be destroyed
    Member._end_failed(cast(Member, own))
    own.aborting.check()
    assert ended == []
    own._has_groups = True
    Member._end_failed(cast(Member, own))
    assert ended == ([] if goes_on else ["TIMEOUT"])
    assert waiting.ended.wait(10 if goes_on else 0) is goes_on is own.aborting.has_aborted


@pytest.mark.parametrize(
    ("device", "member", "handling", "watches"),
    [("cuda", 3, "0", True), ("cpu", 3, "0", False), ("cuda", None, "0", False), ("cuda", 3, "3", False)],
)
def test_a_process_that_is_no_member_ends_at_such_an_error(
    device: str, member: int | None, handling: str, watches: bool, waiting: Waiting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ended = threading.Event()
    mesh = FakeMesh(device=device, member=member)
    monkeypatch.setattr(meshes, "current", lambda: mesh)
    monkeypatch.setattr(gpu_errors, "_watching", None)
    monkeypatch.setattr(gpu_errors, "_LOOK_S", 0.001)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set() if status else None)
    gpu_errors.watch({"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling})
    waiting.error = ErrorType.COMM_ERROR
    assert ended.wait(10 if watches else 0.02) is watches
    gpu_errors.leave_to_member()
    for thread in threading.enumerate():
        if thread.name == "imece-gpu-errors":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, whose groups have a backend on the GPU beside Gloo."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if "PLAYED" not in dist.Backend._plugins:
        dist.Backend.register_backend("played", create, devices=["cuda"])
    dist.init_process_group("cpu:gloo,cuda:played", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_backends_of_all_groups_on_gpus_are_found(alone: None) -> None:
    world = dist.group.WORLD
    other = dist.new_group([0])
    dist.new_group([0], backend="gloo")
    assert world is not None and other is not None
    found = device_backends()
    assert {id(each) for each in found} == {id(group._get_backend(GPU)) for group in (world, other)}


def test_what_a_group_in_shared_memory_has_on_gpus_is_found_and_aborted(
    monkeypatch: pytest.MonkeyPatch, waiting_of_shm: Waiting
) -> None:
    """torch knows of no backend of such a group, which NCCL's lies behind."""
    world: Any = dist.group.WORLD
    assert device_backends() == []
    world._others.on(GPU, world)  # as its first tensor does
    assert device_backends() == [waiting_of_shm]
    world.abort()
    assert waiting_of_shm.said == ["abort"], "and nothing that waits for what is under way"


@pytest.fixture
def waiting_of_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    """Stands for NCCL in a world of one rank in shared memory."""
    backend = Waiting()
    group = mock.Mock(
        _get_backend=lambda device: {"cuda": backend}[device.type],
        abort=backend.abort,
        shutdown=lambda: backend.said.append("shutdown"),
    )
    monkeypatch.setattr(OtherDevices, "_make", lambda *_: group)
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    yield backend
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("newest", "aborts"),
    [
        (Generation(1, (0,), ("rank 1 was killed",)), True),
        (Generation(1, (0, 1), ("ranks lost the connection",)), True),
        (Generation(2, (0, 2)), True),  # this member was in none of those between, which tells why
        (Generation(1, (0, 1, 2)), False),
    ],
)
def test_who_hears_of_a_death_by_an_error_aborts_before_the_groups_are_destroyed(
    newest: Generation, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's own end of a group waits for what is under way. Between two steps there is nothing to abort."""
    said: list[str] = []

    def abort() -> None:
        time.sleep(0.05)
        said.append("aborted")

    own = Member.__new__(Member)
    own.number = own._at = 0
    own.mesh = FakeMesh(device="cuda")
    own._members, own._cut_at, own._moving = {0, 1}, math.inf, threading.Lock()
    own._stores, own._alone, own.aborting = [], False, Aborting()
    own._roster = cast(Any, SimpleNamespace(since=lambda number: [newest]))
    monkeypatch.setattr(aborting, "device_backends", lambda: [SimpleNamespace(abort=abort)])
    monkeypatch.setattr(member, "GuardedStore", lambda *_: dist.HashStore())
    monkeypatch.setattr(opening, "reform", lambda *_: said.append("destroyed"))
    monkeypatch.setattr(connections, "cut", lambda: said.append("cut"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert own._enter(newest, 1.0)
    assert said == (["cut", "aborted", "destroyed"] if aborts else ["destroyed"])
    own.aborting.check()  # it was of the generation before
