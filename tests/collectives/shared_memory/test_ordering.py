"""The order of stores between ranks: arm64's fences are executed, and no two ranks write one cache line."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imece.collectives.shared_memory import SharedMemoryGroup, board, futex, shared_empty
from tests.ranks import run_ranks

LINE_WORDS = 8
WORLD_SIZE = 3


def some_of_everything(group: SharedMemoryGroup) -> None:
    """Small, direct and staged collectives, sync and async, and messages; results are checked."""
    rank, size = group.rank(), group.size()
    total = float(sum(range(1, size + 1)))
    for numel in (10, 100_000):
        for tensor in (torch.empty(numel), shared_empty(numel)):
            for _ in range(20):
                tensor.fill_(rank + 1)
                group.run_now("all_reduce", tensor, tensor, "sum")
                assert bool((tensor == total).all())
            works = []
            whole = torch.zeros(size * numel)
            for _ in range(3):
                works = [group.all_gather_single(whole, tensor.fill_(rank)), group.barrier()]
                room = torch.zeros(numel)
                works.append(group.recv([room], (rank - 1) % size, 1))
                works.append(group.send([tensor], (rank + 1) % size, 1))
                for work in works:
                    work.wait()
                assert whole[::numel].tolist() == list(range(size))
                assert bool((room == (rank - 1) % size).all())


def fenced() -> int:
    """With the fences that other machines than x86-64 need."""
    futex.NEEDS_FENCE = True
    calls = 0
    fence = futex.fence

    def counted() -> None:
        nonlocal calls
        calls += 1
        fence()

    futex.fence = counted
    some_of_everything(dist.group.WORLD)  # type: ignore[arg-type]
    return calls


def test_fences() -> None:
    calls = run_ranks(fenced, WORLD_SIZE)
    assert all(count > 300 for count in calls), f"the fences were not used: {calls}"


def test_a_fence_is_two_rounds_of_one_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasoning in futex.py needs release, then acquire, in this order."""
    seen: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            seen.append("acquire")

        def __exit__(self, *_: object) -> None:
            seen.append("release")

    monkeypatch.setattr(futex, "_fence_lock", Lock())
    futex.fence()
    assert seen == ["acquire", "release", "acquire", "release"]


class Recorded:
    """Words of one segment, as one rank sees them; notes which lines that rank writes."""

    def __init__(self, words: memoryview, note: Callable[[int], None]) -> None:
        self._words, self._note = words, note

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._note(at // LINE_WORDS)
        self._words[at] = value


def in_threads(run: Callable[[int], None]) -> None:
    """Three ranks as threads of this process: what is looked at is Python, and the memory is the same."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(WORLD_SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def test_no_two_ranks_write_one_line() -> None:
    store = dist.HashStore()
    writers: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # (whose segment, line) -> ranks

    def run(rank: int) -> None:
        group = SharedMemoryGroup(dist.PrefixStore("g/", store), rank, WORLD_SIZE, timedelta(seconds=30))
        mine = group._board
        views: list[Any] = [
            Recorded(words, lambda line, owner=owner: writers[owner, line].add(rank))  # type: ignore[misc]
            for owner, words in enumerate(mine.words)
        ]
        mine.words, mine.mine = views, views[rank]
        some_of_everything(group)
        if rank == 1:
            time.sleep(0.2)  # so that the others sleep and are woken by the bell
        tensor = torch.ones(3)
        group.run_now("all_reduce", tensor, tensor, "sum")
        group.shutdown()

    in_threads(run)
    bell = board.BELL // LINE_WORDS
    shared = {place: ranks for place, ranks in writers.items() if len(ranks) > 1 and place[1] != bell}
    assert not shared, f"(segment, line) -> ranks that write there: {shared}"
    foreign = {place for place, ranks in writers.items() if ranks != {place[0]} and place[1] != bell}
    assert not foreign, f"lines that another rank than the owner writes: {foreign}"
    assert any(len(ranks) > 1 for place, ranks in writers.items() if place[1] == bell), "nobody rang"
    assert len(writers) > 4 * WORLD_SIZE, "this test saw hardly any line"


def test_a_bell_rings_after_the_word_was_read() -> None:
    """A rank that reads the bell, is rung, and then goes to sleep must not sleep: nothing is missed."""
    store = dist.HashStore()

    def run(rank: int) -> None:
        made = board.Board(dist.PrefixStore("b/", store), rank, WORLD_SIZE, timedelta(seconds=30))
        seen = made.bell()
        store.set(f"seen/{rank}", "")
        store.wait([f"seen/{other}" for other in range(WORLD_SIZE)])
        for other in made.others:
            made.ring(other)
        store.set(f"rung/{rank}", "")
        store.wait([f"rung/{other}" for other in range(WORLD_SIZE)])
        started = time.monotonic()
        made.sleep(seen, 60.0)
        assert time.monotonic() - started < 30, "slept through the bell"
        assert made.sleepers == 0
        made.close()

    in_threads(run)


def one_core() -> float:
    """Three ranks on one core: who waits must give the core away."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tensor = torch.ones(10)
    started = time.monotonic()
    for _ in range(200):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return time.monotonic() - started


def test_more_ranks_than_cores_progress() -> None:
    assert max(run_ranks(one_core, WORLD_SIZE)) < 5.0
