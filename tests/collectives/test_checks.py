"""Checked calls over Gloo: each kind of mismatch is the same error on every rank, and right calls pass."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imece
from imece.collectives import checks, recorder
from imece.collectives.companions import companions
from imece.collectives.fingerprint import Announced
from imece.collectives.recording import attach
from imece.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from tests.ranks import run_ranks, start_ranks

WORLD = 3
Call = tuple[str, torch.dtype, tuple[int, ...], str, int]  # op, dtype, shape, reduce op, root

F32, I32 = torch.float32, torch.int32
RIGHT: Call = ("all_reduce", F32, (64, 3), "sum", -1)
# name -> the right call, the odd rank's, and what the error says of each
MISMATCHES: dict[str, tuple[Call, Call, list[str]]] = {
    "smaller": (RIGHT, ("all_reduce", F32, (64,), "sum", -1), ["float32[64, 3]", "float32[64]"]),
    "larger": (RIGHT, ("all_reduce", F32, (1 << 20,), "sum", -1), ["float32[64, 3]", "float32[1048576]"]),
    "same numel": (RIGHT, ("all_reduce", F32, (192,), "sum", -1), ["float32[64, 3]", "float32[192]"]),
    "dtype": (RIGHT, ("all_reduce", I32, (64, 3), "sum", -1), ["float32[64, 3]", "int32[64, 3]"]),
    "reduce op": (RIGHT, ("all_reduce", F32, (64, 3), "max", -1), ["all_reduce(sum)", "all_reduce(max)"]),
    "operation": (RIGHT, ("broadcast", F32, (64, 3), "", 0), ["all_reduce(sum)", "broadcast from 0"]),
    "root": (
        ("broadcast", F32, (8,), "", 0),
        ("broadcast", F32, (8,), "", 1),
        ["broadcast from 0", "broadcast from 1"],
    ),
}


def guarded() -> checks.Checker:
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=30))
    return checks.guard(group, companions(group))


def launch(checker: checks.Checker, call: Call, tensor: torch.Tensor) -> Callable[[], dist.Work | None]:
    """The data's part of a call, asynchronous. torch's work, or None if it was done at once."""
    op, _, _, reduce_op, root = call
    reduce = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "": None}[
        reduce_op
    ]
    group = checker.group
    if op == "all_reduce":
        return lambda: dist.all_reduce(tensor, reduce, group=group, async_op=True)
    if op == "broadcast":
        return lambda: dist.broadcast(tensor, root, group=group, async_op=True)
    assert op == "all_gather"
    parts = [torch.empty_like(tensor) for _ in checker.ranks]
    return lambda: dist.all_gather(parts, tensor, group=group, async_op=True)


def start(checker: checks.Checker, call: Call, tensor: torch.Tensor, label: str = "") -> checks.CheckedWork:
    return checker.call(launch(checker, call, tensor), Announced(*call, label))


def meet_all_mismatches() -> list[list[list[Any]]]:
    return [meet_mismatches(sync) for sync in (True, False)]


def meet_mismatches(sync: bool) -> list[list[Any]]:
    """For each mismatch: seconds until the error came, and its text. The odd rank is another each time."""
    found = []
    rank = dist.get_rank()
    for index, (name, (right, wrong, _)) in enumerate(MISMATCHES.items()):
        checker = guarded()
        mine = wrong if rank == index % WORLD else right
        _, dtype, shape, *_ = mine
        dist.barrier()
        before = torch.full(shape, rank + 1).to(dtype)
        tensor = before.clone()
        start(checker, (*right[:2], (4,), *right[3:]), torch.ones(4)).wait()  # so that numbers are not all 1
        began = time.perf_counter()
        try:
            if sync:
                checker.begin(Announced(*mine, f"{name} of {rank}")).wait()
                launch(checker, mine, tensor)()
            else:
                start(checker, mine, tensor, f"{name} of {rank}").wait()
        except MismatchError as error:
            found.append([time.perf_counter() - began, str(error)])
            assert torch.equal(tensor, before), "data moved before the check"
            with pytest.raises(MismatchError, match="differs between ranks"):
                checker.begin(Announced(*mine))
        checks.release(checker.group)
    return found


def test_every_mismatch_is_an_error_on_every_rank() -> None:
    by_rank = run_ranks(meet_all_mismatches, WORLD, backend="gloo")
    for sync in (0, 1):
        for index, name in enumerate(MISMATCHES):
            told = [found[sync][index] for found in by_rank]
            check_words(name, index % WORLD, {text for _, text in told})
            assert max(took for took, _ in told) < 20  # and not the 30 of the group


def check_words(name: str, odd: int, texts: set[str]) -> None:
    assert len(texts) == 1, f"{name}: ranks tell different stories: {texts}"
    text = texts.pop()
    assert "number 2 differs between ranks" in text, text
    for rank in range(WORLD):
        assert f"({name} of {rank})" in text and f"rank {rank}" in text, text
    right, wrong = MISMATCHES[name][2]
    after_odd = text[text.index(f"rank {odd}") :].partition(f"({name} of {odd})")[0]
    assert wrong in after_odd and right not in after_odd and right in text, text


def swap_order() -> str:
    """Two asynchronous calls of equal size, in another order on the last rank: Gloo sums them crosswise."""
    checker = guarded()
    calls = [("first", torch.ones(16)), ("second", torch.ones(2, 8))]
    if dist.get_rank() == WORLD - 1:
        calls.reverse()
    works, texts = [], []
    for name, tensor in calls:
        try:
            works.append(start(checker, (*RIGHT[:2], tuple(tensor.shape), "sum", -1), tensor, name))
        except MismatchError as error:  # the first check may be back before the second call
            texts.append(str(error))
    for work in works:
        with pytest.raises(MismatchError) as caught:
            work.wait()
        texts.append(str(caught.value))
    assert len(texts) == 2 and texts[0] == texts[1], texts
    assert "number 1" in texts[0]
    assert all(tensor.eq(1).all() for _, tensor in calls), "a wrong sum"
    return texts[0]


def make_right_calls() -> None:
    """200 mixed calls, right on all ranks, sync and async mixed."""
    checker = guarded()
    choice = random.Random(7)
    pending: list[tuple[checks.CheckedWork, torch.Tensor, float]] = []
    done = 0
    for number in range(200):
        dtype = choice.choice([torch.float32, torch.float64, torch.int64])
        shape = choice.choice([(), (1,), (7, 3), (2, 1, 2, 1, 2, 1, 2, 3), (1000,), (0,)])
        op, reduce_op, root = choice.choice(
            [
                ("all_reduce", "sum", -1),
                ("all_reduce", "max", -1),
                ("broadcast", "", number % WORLD),
                ("all_gather", "", -1),
            ]
        )
        call: Call = (op, dtype, shape, reduce_op, root)
        if op == "all_gather" and 0 in shape:
            continue  # Gloo itself refuses those
        tensor = torch.full(shape, dist.get_rank() + 1, dtype=dtype)
        expected = {"sum": 6, "max": 3, "": root + 1 if op == "broadcast" else dist.get_rank() + 1}[reduce_op]
        label = f"{number} of rank {dist.get_rank()}"  # differs by rank, and may
        if choice.random() < 0.5:
            pending.append((start(checker, call, tensor, label), tensor, expected))
        else:
            checker.begin(Announced(*call, label)).wait()
            work = launch(checker, call, tensor)()
            assert work is not None
            work.wait()
            assert tensor.eq(expected).all(), (number, call)
        if choice.random() < 0.2:
            for checked, other, value in pending:
                checked.wait(timedelta(seconds=20))
                assert checked.is_completed() and other.eq(value).all()
            pending.clear()
        done += 1
    for checked, other, value in pending:
        checked.wait()
        assert other.eq(value).all()
    assert done > 150


def test_right_calls_pass() -> None:
    run_ranks(make_right_calls, WORLD, backend="gloo")


def miss_one() -> str:
    """The last rank makes no call: the others time out, and say who is missing."""
    checker = guarded()
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    recorder.leave(recorder.enter("broadcast", group, torch.float32, (4,), "", 0))
    dist.barrier()
    text = ""
    if dist.get_rank() < WORLD - 1:
        token = recorder.enter("all_reduce", group, torch.float32, (4,), "sum")
        (level,) = checker.companions.levels
        level._set_default_timeout(timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeoutError) as caught:
            checker.begin(Announced("all_reduce", torch.float32, (4,), "sum", label="w")).wait()
        text = str(caught.value)
        recorder.fail(token)
    dist.barrier()
    return text


def lose_peer() -> None:
    checker = guarded()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(60)
    with pytest.raises(PeerLostError, match="all_reduce number 1: a rank has gone"):
        checker.begin(Announced("all_reduce", torch.float32, (4,), "sum")).wait()


def test_a_killed_rank_is_an_error() -> None:
    with start_ranks(lose_peer, 2, backend="gloo") as ranks:
        ranks.wait_entered()
        time.sleep(1.0)  # rank 0 waits in the check
        ranks.kill(1)
        zero, one = ranks.wait(30)
    assert zero.entered and zero.finished, zero.report()
    assert one.returncode == -9


def leave_what_an_error_keeps() -> str:
    """Rank 1 leaves and lives on, with the companions where a traceback would keep them."""
    imece.init(backend="gloo")
    checker, store = guarded(), dist.distributed_c10d._get_default_store()
    call = Announced("all_reduce", torch.float32, (4,), "sum")
    checker.begin(call).wait()
    if dist.get_rank() == 1:
        kept = checker.companions
        checks.release(checker.group)
        store.wait(["noticed"], timedelta(seconds=60))
        return type(kept.levels[0]).__name__
    with pytest.raises(PeerLostError) as caught:
        checker.begin(call).wait()
    store.set("noticed", "")
    return str(caught.value)


def test_who_waits_for_a_rank_that_has_left_is_told_whatever_that_one_keeps() -> None:
    told, kept = run_ranks(leave_what_an_error_keeps, 2, backend=None)
    assert "rank 1" in told and "has left the group" in told
    assert kept == "SharedMemoryGroup"


def keep_nothing_of_what_is_over() -> None:
    """The checker keeps its last call, for the next one's check: that may be of all gradients of a model."""
    group = dist.new_group()
    tensor = torch.ones(8)
    known = weakref.ref(tensor.untyped_storage())
    pending = imece.all_reduce(tensor, group=group, async_op=True)
    assert pending.wait() is tensor and pending.done()
    del tensor, pending
    gc.collect()
    assert known() is None


def leave_groups() -> list[list[int]]:
    """How many checkers and files this rank has, after each of some groups that torch makes and destroys."""
    found = []
    for _ in range(4):
        group = dist.new_group(backend="gloo")
        imece.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        found.append([len(checks._checkers), len(os.listdir("/proc/self/fd"))])
    return found


def test_nothing_is_kept_for_groups_that_torch_has_destroyed() -> None:
    for found in run_ranks(leave_groups, 2, backend="gloo"):
        assert found[0][0] == 1 and found[1:] == found[:1] * 3


def find_checkers() -> None:
    checker = guarded()
    other = dist.new_group(list(range(WORLD)))
    assert checks.checker(checker.group) is checker
    assert checks.checker(other) is None
    checks._checkers[other.group_name] = checker  # as if the name had come again with a new group
    assert checks.checker(other) is None
    del checks._checkers[other.group_name]
    checks.release(checker.group)
    assert checks.checker(checker.group) is None
    with pytest.raises(ZeroDivisionError):
        checker.call(raises, Announced("barrier", None, ())).wait()
    checker.close()


def raises() -> None:
    raise ZeroDivisionError


def go_other_ways() -> list[str]:
    """The last rank gives another schedule, none, another wire, other parts: the same call otherwise."""
    odd = dist.get_rank() == WORLD - 1
    calls: list[Callable[[torch.Tensor, dist.ProcessGroup], object]] = [
        lambda x, group: imece.all_reduce(x, group=group, schedule="tree" if odd else "ring"),
        lambda x, group: imece.all_reduce(x, group=group, wire=None if odd else "bf16", async_op=True).wait(),
        lambda x, group: imece.all_reduce(x, group=group, schedule=None if odd else "ring"),
        lambda x, group: imece.broadcast(x, group=group, schedule="pipelined_ring", parts=2 + odd),
    ]
    said = []
    for call in calls:
        tensor = torch.ones(16)
        with pytest.raises(MismatchError) as caught:
            call(tensor, dist.new_group(timeout=timedelta(seconds=10)))
        assert tensor.eq(1).all(), "data moved before the check"
        said.append(str(caught.value))
    return said


def tell_stories() -> list[Any]:
    find_checkers()
    keep_nothing_of_what_is_over()
    return [miss_one(), swap_order(), go_other_ways()]


def test_missing_rank_swapped_order_other_ways_and_registry() -> None:
    missed, swapped, ways = zip(*run_ranks(tell_stories, WORLD, backend="gloo"), strict=True)
    for first, then, text in zip(
        ["schedule ring", "wire bf16", "schedule ring", "schedule pipelined_ring, parts 2"],
        ["schedule tree", *["neither schedule nor wire"] * 2, "schedule pipelined_ring, parts 3"],
        ways[0],
        strict=True,
    ):
        sides = f"ranks 0, 1 sent float32[16] with {first}, rank 2 float32[16] with {then}."
        assert f"number 1 differs between ranks: {sides} Do all ranks have the same IMECE_SCHEDULE" in text
    assert ways[0] == ways[1] == ways[2]
    for text in missed[:-1]:
        assert "all_reduce number 1 (w): not all ranks came in time" in text
        assert (
            "rank 2 is not in it (pid " in text
            and "its last call was broadcast number 1 on group 0 (left" in text
        )
    sides = "ranks 0, 1 sent float32[16] (first), rank 2 float32[2, 8] (second)"
    assert all(sides in text for text in swapped), swapped


def call_by_turns() -> int:
    """Asynchronous calls, whose fingerprints a thread sends to the other host, before synchronous ones."""
    imece.init(backend="gloo")
    one, other = torch.zeros(8), torch.zeros(8)
    draws = random.Random(dist.get_rank())
    for _ in range(150):
        if draws.random() < 0.3:
            time.sleep(draws.random() * 0.002)
        work = imece.all_reduce(one, async_op=True)
        imece.all_reduce(other)
        work.wait()
    assert dist.group.WORLD is not None
    assert "undefined" not in attach(os.getpid()).groups, "what checks a call is no call of its own"
    found = checks.checker(dist.group.WORLD)
    return len(found.companions.levels) if found is not None else 0


def test_fingerprints_between_hosts_go_in_the_order_of_calls() -> None:
    assert run_ranks(call_by_turns, 4, backend=None, ranks_per_host=2) == [2] * 4
