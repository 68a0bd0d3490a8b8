"""Ranks that die, stop, leave or disagree: the others soon learn which, and nothing is left over."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imece
from imece.collectives.shared_memory import SharedMemoryGroup, shared_empty
from imece.collectives.shared_memory.board import FAILED
from imece.collectives.shared_memory.runner import abort_all
from imece.errors import CollectiveError, PeerLostError
from tests.ranks import RankResult, run_ranks, start_ranks

# What takes milliseconds on an idle machine has far more here, and far less than the timeout of a group.
GROUP_S = 60.0
TOLD_S = 20.0  # from a death to the survivors' error
MISMATCH_S = 20.0
LATER_CALL_S = 20.0


def open_store() -> dist.Store:
    """The store of tests/ranks.py, on a connection of its own."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    """What `call` raised (CollectiveError and its kinds only), and how long it took."""
    started = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        at = time.monotonic()
        return {"kind": type(error).__name__, "text": str(error), "at": at, "took_s": at - started}
    return {"kind": "", "text": "nothing was raised", "at": time.monotonic(), "took_s": 0.0}


def wait_until(condition: Callable[[], object], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def repeat(step: Callable[[], object], limit_s: float = 60) -> Callable[[], None]:
    def run() -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            step()

    return run


# One rank dies in the midst of each way through the backend. One start: the survivors go on in a new group.

WAYS = ("small", "direct", "staged", "async", "messages")


def step_of(way: str, group: SharedMemoryGroup) -> Callable[[], object]:
    rank, size = group.rank(), group.size()
    if way in ("small", "direct", "staged"):
        numel = 100 if way == "small" else 500_000
        tensor = shared_empty(numel) if way == "direct" else torch.empty(numel)
        tensor.fill_(1.0)
        return lambda: group.run_now("all_reduce", tensor, tensor, "max")
    if way == "async":
        source, target = torch.ones(300_000), torch.ones(size * 300_000)

        def queue() -> None:
            works = [group.all_gather_single(target, source), group.allreduce([source]), group.barrier()]
            for work in works:
                work.wait()

        return queue
    data, room = torch.ones(300_000), torch.ones(300_000)

    def exchange() -> None:
        with group.inline():
            group.recv([room], (rank - 1) % size, 7)
            group.send([data], (rank + 1) % size, 7)

    return exchange


def survive_kills() -> list[dict[str, Any]]:
    rank, store = int(os.environ["RANK"]), open_store()
    members = list(range(int(os.environ["WORLD_SIZE"])))
    store.set(f"pid/{rank}", str(os.getpid()))
    seen = []
    for at, way in enumerate(WAYS):
        victim = members[at % len(members)]
        place = dist.PrefixStore(f"{way}/", store)
        group = SharedMemoryGroup(place, members.index(rank), len(members), timedelta(seconds=GROUP_S))
        step = step_of(way, group)
        step()
        if rank == victim:
            threading.Thread(target=die_soon, args=(way, 0.1 + 0.05 * at)).start()
        error = error_of(repeat(step))
        error["late_s"] = error["at"] - float(store.get(f"killed/{way}"))
        error["wanted"] = f"rank {members.index(victim)} (pid {int(store.get(f'pid/{victim}'))})"
        again = error_of(step)
        error["again"], error["again_s"] = again["kind"], again["took_s"]
        seen.append(error)
        group.shutdown()
        members.remove(victim)
    return seen


def die_soon(way: str, delay_s: float) -> None:
    store = open_store()
    time.sleep(delay_s)
    store.set(f"killed/{way}", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def after_kills() -> list[RankResult]:
    with start_ranks(survive_kills, len(WAYS) + 1) as ranks:
        return ranks.wait(200)  # kills are no failures here


@pytest.mark.parametrize("way", WAYS)
def test_survivors_learn_who_died(after_kills: list[RankResult], way: str) -> None:
    survivors = [result for result in after_kills if result.ok]
    killed = [result for result in after_kills if result.returncode == -signal.SIGKILL and not result.hung]
    report = "\n".join(result.report() for result in after_kills if not result.ok and result not in killed)
    assert len(survivors) == 1 and len(killed) == len(WAYS), f"not every kill was real:\n{report}"
    (seen,) = [each for result in survivors for each in [result.value[WAYS.index(way)]]]
    assert seen["kind"] == "PeerLostError", seen
    assert seen["wanted"] in seen["text"] and "is dead" in seen["text"], seen
    assert 0 <= seen["late_s"] < TOLD_S, seen
    assert seen["again"] == "CollectiveError" and seen["again_s"] < LATER_CALL_S, seen


# All ranks die: their memory goes with them.


def hold_memory_and_work() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shared, ordinary = shared_empty(2_000_000), torch.ones(400_000)
    shared.fill_(rank)
    while True:
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        dist.all_reduce(ordinary, dist.ReduceOp.MAX)
        assert shared[0] == size - 1


def segments_of(pid: int) -> set[str]:
    """Inodes of the segments that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:imece-segment" in line}


def test_nothing_stays_when_all_are_killed() -> None:
    names = set(os.listdir("/dev/shm"))
    with start_ranks(hold_memory_and_work, 3, backend="shm") as ranks:
        inodes: set[str] = set()
        deadline = time.monotonic() + 60
        while len(inodes) < 6:  # 3 groups' segments and 3 arenas
            assert time.monotonic() < deadline, inodes
            time.sleep(0.05)
            inodes = set().union(*(segments_of(pid) for pid in ranks.pids))
        for rank in range(3):
            ranks.kill(rank)
        results = ranks.wait(60)
    assert [result.returncode for result in results] == [-signal.SIGKILL] * 3
    left = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            left |= segments_of(int(process.name)) & inodes
        except OSError:
            continue  # ended meanwhile
    assert not left
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "imece" in name}


# One rank raises; one is stopped.


def abort_what_waits() -> list[dict[str, Any]]:
    """Rank 1 lives and makes no call; a thread of rank 0 ends what waits for it, asynchronous calls too."""
    store, group = open_store(), dist.new_group(timeout=timedelta(seconds=GROUP_S))
    dist.barrier()
    dist.barrier(group=group)
    if dist.get_rank() == 1:
        store.wait(["aborted"])
        dist.barrier(group=group)  # that rank 0 has entered
        return [error_of(lambda: dist.barrier(group=group))]
    work = dist.all_reduce(torch.ones(3), async_op=True)
    threading.Timer(0.5, abort_all, [PeerLostError("given up")]).start()
    errors = [error_of(lambda: dist.barrier(group=group)), error_of(work.wait)]
    store.set("aborted", "")
    return errors


def test_what_waits_is_ended_by_another_thread() -> None:
    for errors in run_ranks(abort_what_waits, 2):
        for error in errors:
            assert error["kind"] and "given up" in error["text"] and error["took_s"] < TOLD_S, error


def raise_on_rank_1() -> None:
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        raise KeyError("the first cause")
    while True:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def test_an_exception_in_one_rank_ends_all() -> None:
    with start_ranks(raise_on_rank_1, 3, backend="shm") as ranks:
        results = ranks.wait(60)  # the group's own timeout is 300 s
        pid = ranks.pids[1]
    assert not any(result.hung for result in results), "\n".join(result.report() for result in results)
    assert "KeyError: 'the first cause'" in results[1].error_text
    for rank in (0, 2):
        assert f"PeerLostError: rank 1 (pid {pid})" in results[rank].error_text, results[rank].report()


def wait_for_stopped() -> dict[str, Any]:
    rank, store = int(os.environ["RANK"]), open_store()
    group = SharedMemoryGroup(dist.PrefixStore("g/", store), rank, 3, timedelta(seconds=1))
    tensor = torch.ones(10)
    group.run_now("all_reduce", tensor, tensor, "max")
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{other}" for other in range(3)])
    if rank == 1:
        store.set("stop me", "")
        store.get("it is over")
        # What the others had sent before they gave up is still right; the one after that is not answered.
        return error_of(repeat(lambda: group.run_now("all_reduce", tensor, tensor, "max")))
    store.wait(["stopped"])
    error = error_of(lambda: group.run_now("all_reduce", tensor, tensor, "max", label="of the weights"))
    error["again"] = error_of(lambda: group.run_now("all_reduce", tensor, tensor, "max"))
    return error


def test_a_stopped_rank_is_named_after_the_timeout() -> None:
    with start_ranks(wait_for_stopped, 3) as ranks:
        ranks._store.wait(["stop me"], timedelta(seconds=60))
        ranks.kill(1, signal.SIGSTOP)
        ranks._store.set("stopped", "")
        deadline = time.monotonic() + 60
        while ranks.alive() != [1] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ranks.alive() == [1], "the others wait on for the stopped rank"
        ranks._store.set("it is over", "")
        ranks.kill(1, signal.SIGCONT)
        results = ranks.wait(60)
        pid = ranks.pids[1]
    assert all(result.ok for result in results), "\n".join(result.report() for result in results)
    for rank in (0, 2):
        seen = results[rank].value
        assert seen["kind"] == "CollectiveTimeoutError", seen
        assert "for rank 1 " in seen["text"] and f"pid {pid}" in seen["text"], seen
        assert "all_reduce(max) of float32[10], number 2 (of the weights)" in seen["text"], seen
        assert 0.9 < seen["took_s"] < 1 + TOLD_S, seen
        assert seen["again"]["kind"] == "CollectiveError" and seen["again"]["took_s"] < LATER_CALL_S
    woken = results[1].value
    assert woken["kind"] == "CollectiveTimeoutError", woken  # fenced: it does not go on alone
    assert woken["took_s"] < TOLD_S


# Ranks that disagree. One start: each case has a group of its own, which it ruins.

F = torch.float32
Call = Callable[[int, Any], object]  # rank, group


def reduce_of(shape: tuple[int, ...], dtype: torch.dtype = F, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda rank, group: dist.all_reduce(torch.ones(shape, dtype=dtype), op, group=group)


def shared_reduce_of(shape: tuple[int, ...]) -> Call:
    return lambda rank, group: dist.all_reduce(shared_empty(shape).fill_(1), group=group)


def broadcast_from(root: int, numel: int = 4) -> Call:
    return lambda rank, group: dist.broadcast(torch.ones(numel), root, group=group)


def reduce_to(root: int) -> Call:
    return lambda rank, group: dist.reduce(torch.ones(4), root, group=group)


def gather_of(numel: int) -> Call:
    return lambda rank, group: dist.all_gather([torch.ones(numel)] * 3, torch.ones(numel), group=group)


def barrier() -> Call:
    return lambda rank, group: dist.barrier(group=group)


def waited(shape: tuple[int, ...], between_s: float = 0) -> Call:
    def call(rank: int, group: Any) -> None:
        works = []
        for _ in range(3):
            works.append(dist.all_reduce(torch.ones(shape), group=group, async_op=True))
            time.sleep(between_s)
        for work in works:
            work.wait()

    return call


def in_turn(*calls: Call) -> Call:
    def call(rank: int, group: Any) -> None:
        for each in calls:
            each(rank, group)

    return call


def ours(op: str = "sum", **way: Any) -> Call:
    """imece's all_reduce, which knows other ways than torch's."""

    def call(rank: int, group: Any) -> None:
        tensor = torch.ones(4)
        try:
            found = imece.all_reduce(tensor, op, group=group, **way)
            if isinstance(found, imece.Pending):
                found.wait()
        finally:
            assert tensor.eq(1).all(), "data moved before the check"

    return call


def ours_from(root: int, **way: Any) -> Call:
    return lambda rank, group: imece.broadcast(torch.ones(4), root, group=group, **way)


def splits(given: list[int], taken: list[int]) -> Call:
    def call(rank: int, group: Any) -> None:
        source, target = torch.ones(sum(given)), torch.ones(sum(taken))
        dist.all_to_all_single(target, source, taken, given, group=group)

    return call


# name: what rank 1 does, what ranks 0 and 2 do, the message (on all ranks). Each begins as number 3.
DISAGREEMENTS: dict[str, tuple[Call, Call, str]] = {
    "shape": (
        reduce_of((5, 6)), reduce_of((5, 7)),
        "all_reduce number 3 differs between ranks: ranks 0, 2 sent float32[5, 7], rank 1 float32[5, 6]",
    ),
    "same number of elements": (
        reduce_of((5, 6)), reduce_of((6, 5)),
        "all_reduce number 3 differs between ranks: ranks 0, 2 sent float32[6, 5], rank 1 float32[5, 6]",
    ),
    "staged shape": (
        reduce_of((300, 200)), reduce_of((300, 201)),
        "all_reduce number 3 differs between ranks: "
        "ranks 0, 2 sent float32[300, 201], rank 1 float32[300, 200]",
    ),
    "direct shape": (
        shared_reduce_of((300, 200)), shared_reduce_of((300, 201)),
        "ranks 0, 2 sent float32[300, 201], rank 1 float32[300, 200]",
    ),
    "small against large": (
        reduce_of((8,)), reduce_of((80_000,)), "ranks 0, 2 sent float32[80000], rank 1 float32[8]",
    ),
    "dtype": (
        reduce_of((4,), torch.float64), reduce_of((4,)), "ranks 0, 2 sent float32[4], rank 1 float64[4]",
    ),
    "float against int of one size": (
        reduce_of((4,), torch.int32), reduce_of((4,)), "ranks 0, 2 sent float32[4], rank 1 int32[4]",
    ),
    "reduction": (
        reduce_of((4,), F, dist.ReduceOp.MAX), reduce_of((4,)),
        "ranks 0, 2 called all_reduce(sum) of float32[4], rank 1 all_reduce(max) of float32[4]",
    ),
    "operation": (
        broadcast_from(0), reduce_of((4,)),
        "ranks 0, 2 called all_reduce(sum) of float32[4], rank 1 broadcast from 0 of float32[4]",
    ),
    "beside torch's": (
        lambda _, group: imece.all_reduce(torch.ones(6), group=group, async_op=True, label="0.bias").wait(),
        gather_of(4),
        "ranks 0, 2 called all_gather_list of float32[4], rank 1 all_reduce(sum) of float32[6] (0.bias)",
    ),
    "barrier": (barrier(), reduce_of((4,)), "0, 2 called all_reduce(sum) of float32[4], rank 1 barrier"),
    "root": (
        broadcast_from(1), broadcast_from(2),
        "broadcast number 3 differs between ranks: "
        "ranks 0, 2 called broadcast from 2 of float32[4], rank 1 broadcast from 1 of float32[4]",
    ),
    "large broadcast": (
        broadcast_from(0, 90_000), broadcast_from(0, 90_001), "float32[90001], rank 1 float32[90000]",
    ),
    "root of reduce": (
        reduce_to(0), reduce_to(2), "reduce(sum) to 2 of float32[4], rank 1 reduce(sum) to 0 of float32[4]",
    ),
    "order": (
        in_turn(reduce_of((4,)), reduce_of((9,))), in_turn(reduce_of((9,)), reduce_of((4,))),
        "all_reduce number 3 differs between ranks: ranks 0, 2 sent float32[9], rank 1 float32[4]",
    ),
    "order of operations": (
        in_turn(barrier(), gather_of(4)), in_turn(gather_of(4), barrier()),
        "collective number 3 differs between ranks: "
        "ranks 0, 2 called all_gather_list of float32[4], rank 1 barrier",
    ),
    "one call more": (
        in_turn(reduce_of((4,)), reduce_of((4,))), in_turn(reduce_of((4,)), gather_of(4)),
        "number 4 differs between ranks: ranks 0, 2 called all_gather_list of float32[4], "
        "rank 1 all_reduce(sum)",
    ),
    "async": (waited((7,)), waited((8,)), "ranks 0, 2 sent float32[8], rank 1 float32[7]"),
    # The first has failed before the second is called.
    "async, slowly": (
        waited((7,), 0.05), waited((8,), 0.05), "ranks 0, 2 sent float32[8], rank 1 float32[7]",
    ),
    "reduction of a schedule": (
        ours("max", schedule="ring"), ours(schedule="ring"),
        "ranks 0, 2 called all_reduce(sum) of float32[4], rank 1 all_reduce(max) of float32[4]",
    ),
    "reduction in bf16": (
        ours("avg", wire="bf16", async_op=True), ours(wire="bf16", async_op=True),
        "ranks 0, 2 called all_reduce(sum) of float32[4], rank 1 all_reduce(avg) of float32[4]",
    ),
    "root of a schedule": (
        ours_from(1, schedule="tree"), ours_from(0, schedule="tree"),
        "ranks 0, 2 called broadcast from 0 of float32[4], rank 1 broadcast from 1 of float32[4]",
    ),
    "schedule": (
        ours(schedule="ring"), ours(schedule="tree"),
        "ranks 0, 2 sent float32[4] with schedule tree, rank 1 float32[4] with schedule ring. Do all ranks "
        "have the same IMECE_SCHEDULE, and give the same schedule, wire and parts?",
    ),
    "wire": (
        ours(wire="bf16"), reduce_of((4,)),
        "ranks 0, 2 sent float32[4] with neither schedule nor wire, rank 1 float32[4] with wire bf16",
    ),
    "parts": (
        ours_from(0, schedule="pipelined_ring", parts=3), ours_from(0, schedule="pipelined_ring"),
        "4] with schedule pipelined_ring, parts 8, rank 1 float32[4] with schedule pipelined_ring, parts 3",
    ),
    "splits": (
        splits([1, 1, 1], [1, 1, 1]), splits([1, 2, 1], [1, 1, 1]),
        "sends 8 bytes to rank 1, which expects 4",
    ),
}  # fmt: skip
# So often that a race between the first rank to fail and the last one to read would show.
REPEATED = {"shape": 12, "staged shape": 4}


def disagree() -> dict[str, list[dict[str, Any]]]:
    rank = dist.get_rank()
    seen: dict[str, list[dict[str, Any]]] = {}
    for name, (odd, usual, _) in DISAGREEMENTS.items():
        for _ in range(REPEATED.get(name, 1)):
            group = dist.new_group(backend="shm", timeout=timedelta(seconds=GROUP_S))
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            dist.barrier(group=group)
            call = odd if rank == 1 else usual
            error = error_of(lambda call=call, group=group: call(rank, group))  # type: ignore[misc]
            error["again"] = error_of(lambda group=group: dist.barrier(group=group))  # type: ignore[misc]
            seen.setdefault(name, []).append(error)
            dist.barrier()
            dist.destroy_process_group(group)
    return seen


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(disagree, 3, timeout_s=200)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_every_rank_hears_of_a_mismatch(
    disagreements: list[dict[str, list[dict[str, Any]]]], name: str
) -> None:
    wanted = DISAGREEMENTS[name][2]
    for rank, seen in enumerate(disagreements):
        assert len(seen[name]) == REPEATED.get(name, 1)
        for error in seen[name]:
            assert error["kind"] == "MismatchError", (rank, error)
            assert wanted in error["text"], (rank, error["text"])
            assert error["took_s"] < MISMATCH_S, (rank, error)
            again = error["again"]
            assert again["kind"] == "CollectiveError" and again["took_s"] < LATER_CALL_S, (rank, again)


# Messages that do not fit, ranks that leave, errors that are not ours. One start, a group each.


def message_too_long(group: Any, numel: int) -> dict[str, Any]:
    """Rank 0 sends, rank 1 receives another size, rank 2 is in a barrier."""
    rank = dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(torch.ones(numel), 1, group=group, tag=3)
        elif rank == 1:
            dist.recv(torch.ones(numel - 1), 0, group=group, tag=3)
        dist.barrier(group=group)

    return error_of(call)


def message_set_aside(group: Any) -> dict[str, Any]:
    """The message with the wrong size had come before anybody asked for it."""
    rank = dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(torch.ones(5), 1, group=group, tag=3)
            dist.send(torch.ones(1), 1, group=group, tag=4)
        elif rank == 1:
            dist.recv(torch.ones(1), 0, group=group, tag=4)
            dist.recv(torch.ones(6), 0, group=group, tag=3)
        dist.barrier(group=group)

    return error_of(call)


def leave_in_order(group: Any) -> dict[str, Any]:
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        return {}
    return error_of(lambda: dist.all_reduce(torch.ones(3), group=group))


def failed_after_this(group: Any) -> dict[str, Any]:
    """Rank 2 sleeps until the barrier it waits in is over and rank 0 has failed since."""
    rank, board, store = dist.get_rank(), group._board, open_store()
    if rank == 0:
        store.wait(["asleep"])
        dist.barrier(group=group)
        group._runner.fail(RuntimeError("later"))
        return {}
    if rank == 2:

        def sleep(seen: int, limit_s: float) -> None:
            store.set("asleep", "")
            wait_until(lambda: board.words[0][FAILED])

        board.sleep = sleep
    error = error_of(lambda: dist.barrier(group=group))
    return error | {"again": error_of(lambda: dist.all_reduce(torch.ones(3), group=group))["kind"]}


def any_source_but_one_left(group: Any) -> dict[str, Any]:
    """Rank 2 has left; rank 1 still sends."""
    rank = dist.get_rank()
    if rank == 2:
        dist.destroy_process_group(group)
        return {"received": 1.0}
    if rank == 1:
        time.sleep(0.5)
        dist.send(torch.ones(3), 0, group=group)
        return {"received": 1.0}
    target = torch.zeros(3)
    error = error_of(lambda: dist.recv(target, group=group))
    return error | {"received": target[0].item()}


def interrupted(group: Any) -> dict[str, Any]:
    """Ctrl-C in one rank while it waits in a collective: an error that is not of ours."""
    rank, store = dist.get_rank(), open_store()
    if rank == 0:
        store.wait(["interrupted"])
        return error_of(lambda: dist.all_reduce(torch.ones(100_000), group=group))
    if rank == 1:
        signal.signal(signal.SIGALRM, raise_interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            dist.all_reduce(torch.ones(100_000), group=group)
        except KeyboardInterrupt:
            store.set("interrupted", "")
            return error_of(lambda: dist.barrier(group=group)) | {"kind": "KeyboardInterrupt"}
    return error_of(lambda: dist.all_reduce(torch.ones(100_000), group=group))


def forked(group: Any) -> dict[str, Any]:
    """Rank 1 forks: the copy's calls, torch's and ours, raise there, and the ranks hear nothing of it."""
    small, large = torch.full((3,), 100.0), torch.full((100_000,), 100.0)
    calls = (
        lambda: dist.all_reduce(small, group=group),
        lambda: dist.all_reduce(large, group=group, async_op=True).wait(),
        lambda: dist.send(small, 0, group=group),
        lambda: imece.all_reduce(small, group=group),
        lambda: imece.all_reduce(large, group=group),
    )
    seen: dict[str, Any] = {}
    if dist.get_rank() == 1:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            errors = [error_of(call) | {"at": 0.0} for call in calls]
            group.shutdown()
            os.write(theirs, json.dumps(errors).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as end:
            seen = {"child": child, "errors": json.loads(end.read())}
        os.waitpid(child, 0)
    total = torch.ones(3)
    return seen | error_of(lambda: dist.all_reduce(total, group=group)) | {"total": total.tolist()}


def in_a_part_of_the_world(_: Any) -> dict[str, Any]:
    """Ranks 1 and 2 have groups of two, where they are 0 and 1."""
    rank = dist.get_rank()
    first, second = (dist.new_group([1, 2], backend="shm") for _ in range(2))
    if rank == 0:
        return {}
    unlike = error_of(lambda: dist.all_reduce(torch.ones(rank), group=first))
    target = torch.zeros(3)
    if rank == 2:
        dist.send(target, 1, group=second)
        dist.destroy_process_group(second)
        return {"unlike": unlike["text"]}
    dist.recv(target, 2, group=second)
    return {"unlike": unlike["text"], **error_of(lambda: dist.recv(target, 2, group=second))}


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def other_faults() -> dict[str, dict[str, Any]]:
    cases: dict[str, Callable[[Any], dict[str, Any]]] = {
        "small message": lambda group: message_too_long(group, 10),
        "large message": lambda group: message_too_long(group, 500_000),
        "set aside": message_set_aside,
        "left": leave_in_order,
        "failed later": failed_after_this,
        "any source": any_source_but_one_left,
        "interrupted": interrupted,
        "forked": forked,
        "part": in_a_part_of_the_world,
    }
    seen = {}
    for name, case in cases.items():
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=GROUP_S))
        dist.barrier(group=group)
        seen[name] = case(group)
        dist.barrier()
    seen["pid"] = {"text": str(os.getpid())}
    return seen


@pytest.fixture(scope="module")
def others_seen() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(other_faults, 3, timeout_s=200)


@pytest.mark.parametrize("name", ["small message", "large message", "set aside"])
def test_a_message_of_another_size(others_seen: list[dict[str, dict[str, Any]]], name: str) -> None:
    numel = {"small message": 10, "large message": 500_000, "set aside": 5}[name]
    other = 6 if name == "set aside" else numel - 1
    words = f"rank 0 sent float32[{numel}], rank 1 receives float32[{other}]"
    for rank, seen in enumerate(others_seen):
        assert seen[name]["kind"] == "MismatchError" and words in seen[name]["text"], (rank, seen[name])
        assert seen[name]["took_s"] < MISMATCH_S, (rank, seen[name])


def test_a_rank_that_leaves_in_order_is_named(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    pid = others_seen[1]["pid"]["text"]
    for rank in (0, 2):
        seen = others_seen[rank]["left"]
        assert seen["kind"] == "PeerLostError" and seen["took_s"] < TOLD_S, seen
        assert f"rank 1 (pid {pid}) has left the group" in seen["text"], seen


def test_what_is_over_does_not_fail(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    """However late a rank wakes: the next call raises."""
    for seen in others_seen[1:]:
        assert seen["failed later"]["kind"] == "" and seen["failed later"]["again"], seen


def test_any_source_goes_on_while_somebody_can_send(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    seen = others_seen[0]["any source"]
    assert seen["received"] == 1.0, seen


def test_a_forked_copy_is_no_rank(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    forked = others_seen[1]["forked"]
    words = (
        f"this group cannot be used any more, since: this process (pid {forked['child']}) is a forked copy "
        f"of rank 1 (pid {others_seen[1]['pid']['text']}), and only that one can make calls on its groups"
    )
    assert [(error["kind"], error["text"]) for error in forked["errors"]] == 5 * [("CollectiveError", words)]
    for seen in others_seen:
        assert (seen["forked"]["kind"], seen["forked"]["total"]) == ("", [3.0] * 3), seen


def test_ranks_are_named_as_in_the_world(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    pid, said = others_seen[2]["pid"]["text"], others_seen[1]["part"]["text"]
    assert f"rank 2 (pid {pid}) has left the group, and rank 1 waits for it in recv from 2" in said
    for rank in (1, 2):
        assert "rank 1 sent float32[1], rank 2 float32[2]" in others_seen[rank]["part"]["unlike"]


def test_an_error_that_is_not_ours_names_its_rank(others_seen: list[dict[str, dict[str, Any]]]) -> None:
    own = others_seen[1]["interrupted"]
    assert own["kind"] == "KeyboardInterrupt", "the fault did not fire"
    assert own["text"] == "this group cannot be used any more, since: KeyboardInterrupt"
    for rank in (0, 2):
        seen = others_seen[rank]["interrupted"]
        assert seen["kind"] and "rank 1" in seen["text"] and "KeyboardInterrupt" in seen["text"], (rank, seen)


def test_the_pattern_of_issue_and_glossary() -> None:
    """The sentence that users are promised, as a pattern: number, both sides, what each sent."""
    pattern = r"^all_reduce number \d+ differs between ranks: ranks [\d, ]+ sent \w+\[.*\], rank 1 \w+\[.*\]$"
    sentences = [wanted for _, _, wanted in DISAGREEMENTS.values() if wanted.startswith("all_reduce")]
    assert sentences and all(re.match(pattern, sentence) for sentence in sentences)
