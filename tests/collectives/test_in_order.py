"""torch's own collectives beside asynchronous ones of imece, on one group."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.collectives import checks, execute, in_order, ops, pending
from imece.collectives.shared_memory import other_devices
from imece.collectives.shared_memory.group import SharedMemoryGroup
from tests.ranks import run_ranks

HELD_S = 0.3  # longer than torch's call takes to start, if it does not wait


class Summed(torch.autograd.Function):
    """Whose backward makes a sum over the ranks, as torch's SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(total := torch.ones(4))
        assert total.tolist() == [dist.get_world_size()] * 4
        return gradients[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Summed.apply(layer(x)).expand(4)  # type: ignore[no-untyped-call]
        return x


def beside(background: bool) -> list[list[float]]:
    """A call of torch behind an asynchronous one, which starts late on rank 1."""
    torchs, run, late = threading.Event(), checks.CheckedWork._run, dist.get_rank() == 1
    mine, theirs, works = torch.full((4,), 1.0), torch.full((4,), 10.0), list[Any]()

    def in_checks_thread(*args: Any) -> Any:
        if late:
            torchs.wait(HELD_S)
        return run(*args)

    def in_the_background() -> None:
        if late:
            torchs.wait(HELD_S)
        works.append(dist.all_reduce(mine, async_op=True))

    if background:
        group: Any = dist.group.WORLD
        task = pending.in_background(in_the_background, group)
        if not late:
            task.wait()
    else:
        with mock.patch.object(checks.CheckedWork, "_run", in_checks_thread):
            works.append(ops.all_reduce(mine, async_op=True))
            if not late:
                checks.start_all(HELD_S * 10)
    works.append(dist.all_reduce(theirs, async_op=True))
    torchs.set()
    pending.finish()
    for work in works:
        work.wait()
    return [mine.tolist(), theirs.tolist()]


def in_backward() -> list[float]:
    """The gradients of a model that sums something in backward, while its buckets leave."""
    torch.manual_seed(0)
    model = imece.DistributedDataParallel(Model(), bucket_cap_mb=1e-6)
    model(torch.full((4,), 1.0 + dist.get_rank())).sum().backward()
    assert len(model.reducer.buckets) == 3
    return [float(each.grad.sum()) for each in model.parameters() if each.grad is not None]


def both_ways() -> list[Any]:
    return [beside(False), beside(True), in_backward()]


def test_torchs_calls_come_behind_what_was_begun_before() -> None:
    one, other = run_ranks(both_ways, 2, backend="gloo")
    assert one == other
    assert one[:2] == [[[2.0] * 4, [20.0] * 4]] * 2
    assert len(one[2]) == 3 and all(one[2])


def beside_nccl() -> list[str]:
    """What waits for a call begun on a group of shm, if torch moves a GPU's tensor in it."""
    owner: Any = dist.group.WORLD
    store, told = dist.HashStore(), list[str]()
    nccls = dist.ProcessGroup(store, 0, 1)
    with mock.patch.object(other_devices.OtherDevices, "_make", lambda *_: nccls):
        assert owner._others.on(torch.device("cuda", 0), owner) is nccls
    begun: Any = mock.Mock(group=owner)
    begun.last.started.wait = lambda: told.append("waited")
    with mock.patch.dict(checks._checkers, {"name": begun}):
        in_order.wait_turn(nccls)
    return told


def test_a_gpus_tensors_beside_shm_wait_for_what_was_begun_there() -> None:
    assert run_ranks(beside_nccl, 1, backend="shm") == [["waited"]]


class Written(dist.ProcessGroup):
    """A group written in Python, without methods and without a name."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]


def test_a_group_written_in_python_gets_torchs_own_error() -> None:
    """And not C++ and the method that waits calling each other for ever."""
    group, one = Written(), torch.ones(1)
    name, *_ = (each for each in ("all_to_all_single", "alltoall_base") if hasattr(dist.ProcessGroup, each))
    for call in (
        lambda: group.allreduce([one], dist.AllreduceOptions()),
        lambda: getattr(group, name)(one, one, [], [], dist.AllToAllOptions()),
    ):
        with pytest.raises(RuntimeError, match="No backend type"):
            call()


def test_a_batch_of_messages_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's, with one communicator for both, and imece's own among them."""
    told: list[Any] = []
    monkeypatch.setattr(in_order, "wait_turn", told.append)
    group = Written()
    with pytest.raises(RuntimeError):  # it has no NCCL
        execute._post_batch([], [execute.Message(torch.ones(1), 0, 0)], group)
    assert told == [group]


def test_groups_of_shm_have_their_own_of_all_these() -> None:
    for names in in_order._CALLS:
        there = [name for name in names if hasattr(dist.ProcessGroup, name)]
        assert there, f"torch has another name for {names}"
        for name in there:
            assert getattr(SharedMemoryGroup, name) is not getattr(dist.ProcessGroup, name), name
