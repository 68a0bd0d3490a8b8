"""Groups that fail because a rank ended while they were formed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.board import JOINED, Board, meeting_of, words_of
from imece.collectives.shared_memory.segment import Segment
from imece.errors import CollectiveError, CollectiveTimeoutError
from imece.world import host_id


def made(store: dist.Store, rank: int) -> Board:
    return Board(store, rank, 3, timedelta(seconds=10))


def come(store: dist.Store, rank: int) -> Segment:
    """A rank that has introduced itself, in this very process."""
    own = segment.create(1 << 25, "a test")
    note = {"pid": os.getpid(), "fd": own.fd, "serial": own.serial, "host": host_id(), "cores": 2}
    note["name"] = rank
    store.set(f"{meeting_of(store, rank, 3)}/{rank}", json.dumps(note))
    return own


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_nobody_waits_for_one_whose_board_came_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 dies after rank 0 has mapped its segment, and before rank 1 has."""
    store, real, mapped = dist.HashStore(), segment.attach, threading.Event()
    third = come(store, 2)
    words_of(third.memory)[JOINED] = 1  # as far as rank 0 is concerned

    def attach(pid: int, fd: int, serial: int) -> Segment:
        if threading.current_thread() is threading.main_thread() and serial == third.serial:
            assert mapped.wait(10)
            raise CollectiveError("it is gone")
        return real(pid, fd, serial)

    monkeypatch.setattr(segment, "attach", attach)
    boards: list[Board] = []

    def first() -> None:
        boards.append(made(store, 0))
        mapped.set()

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(CollectiveError, match="it is gone"):
        made(store, 1)
    thread.join()
    began = time.monotonic()
    boards[0].close()
    assert time.monotonic() - began < 4  # and not the 5 of a goodbye that is awaited
    third.close()


def _fails_at_mapping(monkeypatch: pytest.MonkeyPatch, one: Segment) -> None:
    one.close()


def _fails_at_watching(monkeypatch: pytest.MonkeyPatch, one: Segment) -> None:
    real, asked = os.pidfd_open, []

    def pidfd_open(pid: int) -> int:
        asked.append(pid)
        if len(asked) == 2:
            raise ProcessLookupError
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (_fails_at_mapping, "cannot be opened|is not segment"),
        (_fails_at_watching, r"rank 2 \(pid \d+\) is gone: it ended while the group was formed"),
    ],
)
def test_a_board_that_comes_to_nothing_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[pytest.MonkeyPatch, Segment], None], said: str
) -> None:
    store = dist.HashStore()
    others = [come(store, rank) for rank in (1, 2)]
    fails(monkeypatch, others[0])
    before = len(descriptors())
    with pytest.raises(CollectiveError, match=said):
        made(store, 0)
    left = len(descriptors())
    for each in others:
        each.close()
    assert left == before


def test_ranks_meet_again_in_the_same_store() -> None:
    """As when a process destroys its groups and makes new ones: a quick rank must not take the note that a
    slower one left at the meeting before for that of this one."""
    store, patience = dist.HashStore(), timedelta(seconds=10)
    slow = Board(store, 0, 1, patience)  # a group of another size has other notes
    with ThreadPoolExecutor(2) as ranks:
        for _ in range(2):
            quick = ranks.submit(Board, store, 0, 2, patience)
            time.sleep(0.05)  # with the notes of the meeting before, it would have met by now
            slow.close()
            slow = Board(store, 1, 2, patience)
            assert [each.serial for each in quick.result().peers] == [each.serial for each in slow.peers]
            quick.result().close()
    slow.close()


def test_one_that_does_not_come_in_time_is_named() -> None:
    with pytest.raises(CollectiveTimeoutError) as late:
        Board(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
    where = "see what it does with `imece doctor --attach`"
    assert str(late.value) == f"rank 1 of 2 did not join the group within 0 s: {where}"


def test_two_threads_look_who_is_dead() -> None:
    """A poll object raises where two use it at once."""
    board, looking, at_once = Board.__new__(Board), threading.Lock(), []

    def poll(_: int) -> list[tuple[int, int]]:
        at_once.append(not looking.acquire(blocking=False))
        time.sleep(0.01)
        if not at_once[-1]:
            looking.release()
        return []

    board._watch, board._looking, board._pidfds = mock.Mock(poll=poll), threading.Lock(), {}
    threads = [threading.Thread(target=board.dead) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [False] * 4
