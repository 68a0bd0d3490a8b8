"""The threads that run collectives in the background."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import imece
from imece.collectives import given_up, pending
from imece.collectives.calls import Call
from imece.collectives.given_up import Sliced, value_of
from imece.collectives.pending import in_background, wait_for
from imece.errors import PeerLostError
from tests.ranks import run_ranks


class Group:
    """Stands for what the frames of a call know."""


def fail(group: Group) -> None:
    raise ZeroDivisionError(str(group))


def test_how_a_call_is_shown() -> None:
    go_on = threading.Event()
    call = imece.Pending("all_reduce", torch.ones(1), [in_background(go_on.wait)])
    shown = [repr(call)]
    go_on.set()
    call.wait()
    shown.append(repr(call))
    assert shown == ["<imece.Pending all_reduce, under way>", "<imece.Pending all_reduce, done>"]


@pytest.mark.parametrize("recorded", [True, False])
def test_what_runs_in_the_background_records_no_gradients(recorded: bool) -> None:
    """Its thread would, whether the one that calls does or not."""
    found: list[bool] = []
    with torch.set_grad_enabled(recorded):
        in_background(lambda: found.append(torch.is_grad_enabled())).wait()
    assert found == [False]


@pytest.mark.parametrize("lane", [0, 1])
def test_nothing_keeps_what_failed_once_it_was_waited_for(lane: int) -> None:
    """A group ends with its last reference, and others wait for that."""
    group = Group()
    known = weakref.ref(group)
    task = in_background(partial(fail, group), lane=lane)
    with pytest.raises(ZeroDivisionError):
        task.wait()
    del task, group
    deadline = time.monotonic() + 5  # the thread lets go a moment after it has told
    while known() is not None and time.monotonic() < deadline:
        gc.collect()
    assert known() is None


class Work:
    """Gloo's, as torch lets one wait for it: it does not end before `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        if not self.ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


@pytest.mark.parametrize("lane", [0, 1])
def test_what_is_stuck_is_left(lane: int) -> None:
    """Whoever waits is told, the lane goes on in another thread, and the stuck one writes nothing more."""
    work, written, came = Work(), [], threading.Event()

    def stuck() -> None:
        came.set()
        try:
            wait_for(work, "a message")
            written.append("late")
        finally:
            written.append("over")

    first = in_background(stuck, lane=lane)
    behind = in_background(partial(written.append, "behind"), lane=lane)
    assert came.wait(10)
    pending.give_up("rank 3 is gone", 0.05)
    for task in (first, behind):
        with pytest.raises(PeerLostError, match="rank 3 is gone"):
            task.wait()
    in_background(partial(written.append, "next"), lane=lane).wait()
    work.ended.set()
    deadline = time.monotonic() + 10
    while "over" not in written and time.monotonic() < deadline:
        time.sleep(0.01)
    assert written == ["next", "over"]


def test_a_call_begins_while_others_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, just when this one lets go of the lock."""
    lock, stuck = pending._lock, threading.Event()

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            monkeypatch.setattr(pending, "_lock", lock)
            pending.give_up("rank 3 is gone", 0.0)

    monkeypatch.setattr(pending, "_lock", Lock())
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        in_background(stuck.wait).wait()
    stuck.set()


def test_what_ends_in_time_is_not_given_up() -> None:
    task = in_background(partial(time.sleep, 0.2))
    pending.give_up("rank 3 is gone", 10)
    assert task.wait()


def test_who_waits_for_gloo_looks_whether_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_up, "_SLICE", timedelta(seconds=0.05))
    group, work = Group(), Work()
    others = sys.getrefcount(group)
    sliced = Sliced(cast(Any, work), cast(Any, group))
    threading.Timer(0.2, partial(pending.give_up, "rank 3 is gone", 0.0)).start()
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        sliced.wait()
    del sliced
    assert sys.getrefcount(group) > others, "to destroy it would be to wait for its thread"
    work.ended.set()
    assert Sliced(cast(Any, work), cast(Any, group)).wait(), "one that begins later is not given up"


def test_who_waits_for_a_future_looks_whether_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a communication hook that calls torch.distributed."""
    monkeypatch.setattr(given_up, "_SLICE", timedelta(seconds=0.05))
    future: torch.futures.Future[int] = torch.futures.Future()
    threading.Timer(0.2, partial(pending.give_up, "rank 3 is gone", 0.0)).start()
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        value_of(future)
    future.set_result(5)
    assert value_of(future) == 5
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ZeroDivisionError("of the hook"))
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        value_of(failed)


def wait_in_main() -> list[str]:
    """The names of the threads that carry out a call of messages, before and once it may be given up."""
    names: list[str] = []
    tensor, stuck = torch.zeros(4), threading.Event()
    assert dist.group.WORLD is not None
    call = Call("all_reduce", dist.group.WORLD, tensor, "sum", way="schedule ring")

    def note() -> None:
        names.append(threading.current_thread().name)

    call.scheduled(note, tensor, False)
    pending.expect_giving_up()
    call.scheduled(note, tensor, False)
    threading.Timer(0.3, partial(pending.give_up, "rank 3 is gone", 0.1)).start()
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        call.scheduled(stuck.wait, tensor, False)
    stuck.set()
    return names


def test_the_main_thread_is_not_where_it_cannot_be_told() -> None:
    for names in run_ranks(wait_in_main, 2, backend="gloo"):
        assert names == ["MainThread", "imece-calls"]


def messages_that_never_come() -> list[str]:
    """What rank 0 is told that waits for messages of rank 1, and what came of those that it had sent."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    pending.expect_giving_up()
    place, told = torch.zeros(2), []
    if rank == 1:
        imece.recv(place, 0)
        imece.exchange([imece.Recv(place, 0), imece.Send(torch.ones(2), 0)])
        told.append(str(place.tolist()))
        dist.distributed_c10d._get_default_store().get("told")  # a process that ends tells its peers
        return told
    imece.send(torch.full((2,), 3.0), 1)
    imece.exchange([imece.Send(torch.full((2,), 5.0), 1), imece.Recv(place, 1)])
    told.append(str(place.tolist()))
    for wait in (
        lambda: imece.recv(place, 1),
        lambda: imece.exchange([imece.Recv(place, 1)]),
        imece.exchange([imece.Recv(place, 1)], async_op=True).wait,
    ):
        threading.Timer(0.3, partial(pending.give_up, "rank 1 is gone", 0.1)).start()
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            wait()
        told.append("told")
    dist.distributed_c10d._get_default_store().set("told", "")
    return told


def test_messages_that_never_come_are_given_up() -> None:
    first, second = run_ranks(messages_that_never_come, 2, backend="gloo")
    assert first == ["[1.0, 1.0]", "told", "told", "told"] and second == ["[5.0, 5.0]"]


def destroy_under_way() -> list[float]:
    """torch destroys the groups of a call that waits for a rank of another host."""
    imece.init(timeout=timedelta(seconds=20))
    found = torch.zeros(2)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    under_way = imece.all_gather(found, torch.ones(1), async_op=True, schedule="hierarchical")
    dist.destroy_process_group()
    under_way.wait()
    return found.tolist()


def test_what_is_under_way_ends_before_torch_destroys_its_group() -> None:
    assert run_ranks(destroy_under_way, 2, backend=None, ranks_per_host=1) == [[1.0, 1.0]] * 2
