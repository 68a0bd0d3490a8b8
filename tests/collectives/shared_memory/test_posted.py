"""Sums that ranks make for each other: early ranks work for late ones, each sum is made once, same bits."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imece.collectives.calls import group_or_default
from imece.collectives.shared_memory import SharedMemoryGroup, posted, reducing, shared_empty
from imece.collectives.shared_memory.board import SLEEPERS
from imece.collectives.shared_memory.posted import Posted
from imece.errors import CollectiveError, MismatchError, PeerLostError
from tests.data_parallel.checks import Job, jobs, passed, slow
from tests.ranks import start_ranks

LIMIT_S = 60.0
SIZES = (1, 64, 1000, 70_000, 200_001)


def of(group: dist.ProcessGroup) -> SharedMemoryGroup:
    assert isinstance(group, SharedMemoryGroup)
    return group


def filled(numel: int, dtype: torch.dtype, rank: int, at: int) -> torch.Tensor:
    """Whose sums are rounded, so that another order would be other bits."""
    generator = torch.Generator().manual_seed(1000 * at + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def are_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def wait_until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)
    return bool(condition())


def as_all_reduce_and_reduce_scatter(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), group.size()
    for scatter in (False, True):
        tensors = [
            shared_empty(-(-numel // size) * size if scatter else numel, dtype)
            for numel in SIZES
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ]
        sums = of(group).posted(tensors, scatter=scatter)
        assert sums is not None
        for step in range(3):
            wanted = []
            for at, tensor in enumerate(tensors):
                tensor.copy_(filled(tensor.numel(), tensor.dtype, rank, 100 * step + at))
                whole = shared_empty(tensor.numel(), tensor.dtype).copy_(tensor)
                dist.all_reduce(whole, group=group)
                wanted.append(whole)
            order = list(range(len(tensors)))
            random.Random(step * size + rank).shuffle(order)
            for index in order:
                sums.post(index)
            of(group).sum_posted(sums)
            for tensor, whole in zip(tensors, wanted, strict=True):
                length = tensor.numel() // size
                mine = slice(rank * length, (rank + 1) * length) if scatter else slice(None)
                assert torch.equal(tensor[mine], whole[mine]), (scatter, step, tensor.dtype, tensor.numel())


def the_early_work_for_the_late(group: dist.ProcessGroup) -> None:
    """All of the last rank's sums of which another one is the helper are there before it asks for them."""
    rank, size = dist.get_rank(), group.size()
    numel = 8 * size * reducing.CHUNK_BYTES // 4
    tensors = [shared_empty(numel), shared_empty(numel)]
    sums = of(group).posted(tensors)
    assert sums is not None
    for step in range(3):
        for index, tensor in enumerate(tensors):
            tensor.fill_(rank + 1 + step + index)
            sums.post(index)
        if rank == size - 1:  # all others are in `finish`, and it is not
            for index, tensor in enumerate(tensors):
                total = sum(each + 1 + step + index for each in range(size))
                assert wait_until(partial(are_all, tensor, total))
        of(group).sum_posted(sums)


def some_posted_late(group: dist.ProcessGroup) -> None:
    """What is not posted by all is left alone; sleepers are woken by what is."""
    rank, size = dist.get_rank(), group.size()
    tensors = [shared_empty(1000 * size).fill_(1.0) for _ in range(2)]
    sums = of(group).posted(tensors)
    assert sums is not None
    sums.post(0)
    if rank == size - 1:
        assert wait_until(lambda: bool((tensors[0] == size).all()))
        board = of(group)._board
        assert wait_until(lambda: all(words[SLEEPERS] for words in board.words[:-1])), "not all sleep"
        assert bool((tensors[1] == 1).all()), "summed before it was posted"
        rung = board._rings

        def woke_others() -> bool:
            sums.post(1)
            return board._rings > rung

        assert wait_until(woke_others)
    sums.post(1)
    of(group).sum_posted(sums)
    assert bool((torch.stack(tensors) == size).all())


def again_and_again(group: dist.ProcessGroup) -> None:
    """Many small items, which both of their ranks reach at about the same time: a sum made twice is wrong."""
    rank, size, own = dist.get_rank(), group.size(), random.Random(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducing, "CHUNK_BYTES", 64 * 4)
        tensors = [shared_empty(64 * 12 * size) for _ in range(3)]
        sums = of(group).posted(tensors)
    assert sums is not None
    for step in range(400):
        for index, tensor in enumerate(tensors):
            tensor.fill_(10.0 ** (rank % 3) * (1 + (step + index) % 7))
            sums.post(index)
            if own.random() < 0.1:
                time.sleep(own.random() * 0.0005)
        of(group).sum_posted(sums)
        for index, tensor in enumerate(tensors):
            total = sum(10.0 ** (each % 3) for each in range(size)) * (1 + (step + index) % 7)
            assert bool((tensor == total).all()), (step, index)


def taken_back_by_all(group: dist.ProcessGroup) -> None:
    """All begin anew, at different times: nobody takes an earlier attempt of another one for the next."""
    rank, size = dist.get_rank(), group.size()
    tensors = [shared_empty(5000) for _ in range(2)]
    sums = of(group).posted(tensors)
    assert sums is not None
    for step in range(4):
        for attempt in range(3):
            if attempt:
                sums.take_back()
            for index, tensor in enumerate(tensors):
                tensor.fill_(float(rank + 10 * attempt))
                sums.post(index)
            if (rank + attempt + step) % size == 0:
                time.sleep(0.02)
        of(group).sum_posted(sums)
        assert bool((torch.stack(tensors) == sum(range(20, 20 + size))).all())


def taken_back_by_one(group: dist.ProcessGroup) -> None:
    """Fine as long as nobody has begun with it, of however many attempts the others are."""
    rank, size = dist.get_rank(), group.size()
    tensor = shared_empty(5000)
    sums = of(group).posted([tensor])
    assert sums is not None
    for _ in range(2):
        for attempt in range(2 if rank == 0 else 1):
            if attempt:
                sums.take_back()
            tensor.fill_(float(rank + 10 * attempt))
            if rank:
                dist.barrier(group=group)
            sums.post(0)
        if not rank:
            dist.barrier(group=group)
        of(group).sum_posted(sums)
        assert bool((tensor == sum(range(size)) + 10).all())


def taken_back_too_late(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    tensor = shared_empty(5000).fill_(1.0)
    sums = of(group).posted([tensor])
    assert sums is not None
    sums.post(0)
    with pytest.raises(CollectiveError, match=r"rank 0 was to sum anew .* rank 1 had summed some of it"):
        if rank == 0:
            assert wait_until(lambda: bool((tensor == 2).any()))
            sums.take_back()
        else:
            of(group).sum_posted(sums)


def another_call(group: dist.ProcessGroup) -> None:
    """One rank sums what is posted, the other one reduces as many elements of its own."""
    tensor = shared_empty(100_000).fill_(1.0)
    sums = of(group).posted([tensor])
    assert sums is not None
    with pytest.raises(MismatchError, match="with 1 posted tensors"):
        if dist.get_rank() == 0:
            sums.post(0)
            of(group).sum_posted(sums, "weights")
        else:
            of(group).run_now("all_reduce", tensor, tensor, "sum")


def none_of_ordinary_memory(group: dist.ProcessGroup) -> None:
    """All ranks know, though one of them alone has such a tensor."""
    own = torch.zeros(1000) if dist.get_rank() == 0 else shared_empty(1000)
    assert of(group).posted([shared_empty(10), own]) is None
    dist.barrier(group=group)


EVERYWHERE = {
    "as all_reduce and reduce_scatter": as_all_reduce_and_reduce_scatter,
    "the early work for the late": the_early_work_for_the_late,
    "some posted late": some_posted_late,
    "again and again": again_and_again,
    "taken back by all": taken_back_by_all,
    "taken back by one": taken_back_by_one,
    "none of ordinary memory": none_of_ordinary_memory,
}
PAIRS = {"taken back too late": taken_back_too_late, "another call": another_call}
CHECKS = EVERYWHERE | PAIRS


@pytest.mark.parametrize(
    "job",
    [
        *slow(jobs(__name__, EVERYWHERE, (2, "shm"))),
        *jobs(__name__, EVERYWHERE, (3, "shm")),
        *jobs(__name__, PAIRS, (2, "shm")),
    ],
)
def test_posted(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


# A rank that dies after it has posted, or in the midst of taking an item over.


def post_and_die() -> str:
    group, rank = of(group_or_default(None)), dist.get_rank()
    tensors = [shared_empty(1_000_000).fill_(1.0) for _ in range(2)]
    sums = group.posted(tensors)
    assert sums is not None
    sums.post(0)
    if rank == 1:
        assert wait_until(lambda: bool((tensors[0] == 3).any())), "nobody has begun"
        os.kill(os.getpid(), signal.SIGKILL)
    sums.post(1)
    with pytest.raises(PeerLostError) as raised:
        group.sum_posted(sums, "weights")
    return str(raised.value)


def try_and_die() -> str:
    group, rank = of(group_or_default(None)), dist.get_rank()
    sums = group.posted([shared_empty(1000)])
    assert sums is not None
    sums.post(0)
    ((item, *_),) = sums._helped if rank == 1 else sums._own
    if rank == 1:
        sums._mine[item.word] = sums._stamp + 1  # TRIED, and no more
    dist.barrier()
    if rank == 1:
        sums._coming.clear()
        next(sums.finish())  # it comes as far as any, and decides nothing
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as raised:
        group.sum_posted(sums, "weights")
    return str(raised.value)


@pytest.mark.parametrize(("dies", "size"), [(post_and_die, 3), (try_and_die, 2)])
def test_a_rank_that_dies_is_named(dies: Callable[[], str], size: int) -> None:
    with start_ranks(dies, size, backend="shm") as ranks:
        results = ranks.wait()
    assert results[1].returncode == -signal.SIGKILL
    for result in (results[0], *results[2:]):
        assert result.ok, result.report()
        assert result.value.startswith(f"rank 1 (pid {ranks.pids[1]}) is dead"), result.value


# Every order in which an owner and a helper may read and write their words.


class Turns:
    """Lets two threads go on one access at a time, in an order that is said."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._at, self._changed = list(order), 0, threading.Condition()
        self._ended: set[int] = set()
        self.who = threading.local()

    def take(self) -> None:
        with self._changed:
            while self._next() != self.who.number:
                assert self._changed.wait(LIMIT_S)
            self._at += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended.add(self.who.number)
            self._changed.notify_all()

    def _next(self) -> int:
        while self._at < len(self._order) and self._order[self._at] in self._ended:
            self._at += 1
        if self._at < len(self._order):
            return self._order[self._at]
        return next(number for number in (0, 1) if number not in self._ended)


class Words(list[int]):
    """A sheet of which each access waits for its turn."""

    turns: Turns

    def __getitem__(self, at: Any) -> Any:
        self.turns.take()
        return super().__getitem__(at)

    def __setitem__(self, at: Any, value: Any) -> None:
        self.turns.take()
        super().__setitem__(at, value)


class Engine:
    """As far as `Posted` needs one to settle who makes an item."""

    def __init__(self, rank: int) -> None:
        self.rank, self.board = rank, SimpleNamespace(names=range(2))

    def shape_word(self, *_: Any) -> int:
        return 0

    def scratch(self, *_: Any) -> None:
        return None


def orders(each: int) -> Iterator[list[int]]:
    for places in itertools.combinations(range(2 * each), each):
        yield [0 if at in places else 1 for at in range(2 * each)]


def made_by(order: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, takes_back: bool) -> list[int]:
    """Who has made one item that rank 0 owns and rank 1 may make. takes_back: rank 0, which makes nothing."""
    turns = Turns(order)
    sheets = [Words([0, 0]) for _ in range(2)]
    made: list[int] = []
    tensors = [torch.zeros(1), torch.zeros(1)]
    monkeypatch.setattr(posted, "words_of", lambda sheet: sheet)
    monkeypatch.setattr(posted, "sum_chunk", lambda *_: made.append(turns.who.number))
    monkeypatch.setattr(Words, "view", lambda self, _: self, raising=False)
    how: Any = type("How", (), {"dtype": torch.float32, "within": torch.float32})
    ends: list[Posted] = []

    def opened(_: object) -> Any:
        return sheets

    errors: list[BaseException] = []
    for rank in range(2):
        engine: Any = Engine(rank)
        ends.append(Posted(engine, [tensors], [how], scatter=False, open_sheet=opened, fail=errors.append))
    stamp = ends[0]._posted
    for sheet in sheets:
        list.__setitem__(sheet, 0, stamp)
        sheet.turns = turns

    def run(number: int) -> None:
        turns.who.number = number
        try:
            if number == 0 and takes_back:
                with_error(ends[0].take_back)
            else:
                for _ in range(50):  # until it is decided: nothing is left, or it was taken back
                    ends[number]._does_one()
                    if not (ends[number]._to_do or ends[number]._to_help):
                        break
        finally:
            turns.end()

    def with_error(call: Callable[[], None]) -> None:
        try:
            call()
        except CollectiveError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"stands still in {order}"
    if takes_back:
        assert not made or errors, f"{order}: made, and taken back without a word"
    return made


ACCESSES = 7  # of each rank, enough for the first decision


def test_each_item_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = set()
    for order in orders(ACCESSES):
        made = made_by(order, monkeypatch, takes_back=False)
        assert len(made) == 1, f"{order}: made by {made}"
        makers.update(made)
    assert makers == {0, 1}, "both ways are to be seen"


def test_what_was_made_is_never_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {len(made_by(order, monkeypatch, takes_back=True)) for order in orders(ACCESSES)}
    assert seen == {0, 1}, "both ends are to be seen"
