"""A member's beat, with a store that nobody else uses."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imece import moments, opening
from imece.collectives import pending
from imece.membership import beating, gpu_errors, member
from imece.membership.aborting import Aborting
from imece.membership.roster import Generation, Roster, outcome_of
from imece.system import connections
from tests.meshes import FakeMesh


def test_it_beats_until_all_else_at_the_exit_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' exit handlers (wandb's upload) come between: meanwhile it is no silent rank."""
    store = dist.HashStore()
    roster = Roster(store)
    roster.publish(Generation(0, (0,)))
    monkeypatch.setattr(member, "_connect", lambda where: store)
    monkeypatch.setattr(moments, "ended_last", [])
    asked: list[str] = [""]
    monkeypatch.setattr(gpu_errors, "error_on_gpus", lambda: asked.pop() if asked else "")
    ours = member.Member(FakeMesh(member=0, master_addr="127.0.0.1", master_port=1), 7)
    while (beat := roster.beat(0)) is None or asked:
        time.sleep(0.001)
    assert beat[1] == 7, "the steps of a checkpoint"
    (end,) = moments.ended_last
    assert ours._beating.is_alive()
    end()
    assert not ours._beating.is_alive()


def test_who_cannot_be_replaced_beats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank of a mesh with axes would hold the others up for half an hour, and three deaths in weeks
    would be three in a row."""
    store = dist.HashStore()
    roster = Roster(store)
    monkeypatch.setattr(beating, "reach_launchers_store", lambda: store)
    monkeypatch.setattr(beating, "_shown", None)
    monkeypatch.setattr(moments, "ended_last", [])
    mesh = FakeMesh(member=3)
    model = torch.nn.Linear(1, 1)
    for done in (7, 2):  # a second loop of the script
        beating.show(mesh, lambda done=done: done, model, [])  # type: ignore[misc]
        until = time.monotonic() + 10
        while (beat := roster.beat(3)) is None or beat[1] != done:
            assert time.monotonic() < until
            time.sleep(0.001)
    (end,) = moments.ended_last
    end()


def test_it_asks_for_a_new_generation_when_nobody_is_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network closed its connections."""
    monkeypatch.setattr(member, "_LOST_S", 0.05)
    ours, roster = member_of(Generation(4, (0, 1)))
    assert ours.move(0.04, lambda: None) is None and not roster.has_lost(1, 4)
    monkeypatch.setattr(ours, "_enter", lambda *_: True)

    def answer() -> None:
        until = time.monotonic() + 5
        while not roster.has_lost(1, ours._at) and time.monotonic() < until:
            time.sleep(0.001)
        roster.publish(Generation(ours._at + 1, (0, 1), ("why",)))

    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer)
        assert ours.move(4.0, lambda: None) == Generation(5, (0, 1), ("why",))
        answered.result()
        assert not roster.has_lost(1, 5)
        ours._at = 5
        answered = threads.submit(answer)  # it cannot even meet the others in that one
        assert ours._is_over(Generation(5, (0, 1)), 4.0)
        answered.result()
    assert ours._ask_at(float("inf")) == float("inf"), "it waits for others to leave in order"


def test_it_does_not_wait_where_a_peer_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the loop early, by `break` or sys.exit(0): the launcher says that nothing follows."""
    monkeypatch.setattr(member, "_LOST_S", 0.0)
    ours, roster = member_of(Generation(4, (0, 1)))
    roster.say_last(3)  # another one's last word
    assert ours.move(0.02, lambda: None) is None and roster.has_lost(1, 4)
    roster.say_last(4)
    begin = time.monotonic()
    assert ours.move(60.0, lambda: None) is None
    assert not ours._is_over(Generation(4, (0, 1)), 60.0)
    assert time.monotonic() - begin < 30


def test_who_moves_while_its_beat_asks_is_not_cut_off_when_a_member_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is lost then, and the step under way ends in order."""
    ours, roster = member_of(Generation(4, (0, 1)))
    cuts: list[int] = []
    monkeypatch.setattr(member, "_CUT_S", 0.0)
    monkeypatch.setattr(connections, "cut", lambda: cuts.append(ours._at))
    monkeypatch.setattr(opening, "reform", lambda *_: None)
    monkeypatch.setenv("RANK", "1")  # to be as they were
    monkeypatch.setenv("WORLD_SIZE", "2")

    class Late(Roster):
        def generation(self, number: int) -> Generation:
            found = super().generation(number)
            ours._enter(found, 1.0)
            return found

    def beat(newest: Generation, asked: Roster = roster) -> list[int]:
        cuts.clear()
        roster.publish(newest)
        ours._newest = newest.number
        for _ in range(2):
            ours._cut_off(asked)
            time.sleep(0.002)
        return cuts

    assert beat(Generation(5, (1, 2), ("why",)), Late(ours._store)) == [4], "by the move itself"
    assert beat(Generation(6, (1, 2, 3))) == []
    assert beat(Generation(7, (1, 3), ("why",))) == [5], "a rank of its own generation is gone"


def test_connections_that_were_lost_just_before_one_joins_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations between two looks: it would wait in Gloo for the timeout."""
    monkeypatch.setattr(member, "_CUT_S", 0.0)
    ours, roster = member_of(Generation(4, (0, 1)))
    cuts: list[int] = []
    monkeypatch.setattr(connections, "cut", lambda: cuts.append(ours._at))
    roster.publish(Generation(5, (0, 1), ("why",)))
    roster.publish(Generation(6, (0, 1, 2)))
    ours._newest = 6
    for _ in range(2):
        ours._cut_off(roster)
        time.sleep(0.002)
    assert cuts == [4]


def test_a_generation_that_has_met_is_not_left_for_one_who_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that left it in the midst of making groups would leave another one waiting in Gloo."""
    meeting = dist.HashStore()
    monkeypatch.setattr(member, "_connect", lambda _: meeting)
    monkeypatch.setenv("RANK", "1")  # to be as they were
    monkeypatch.setenv("WORLD_SIZE", "2")
    ours, roster = member_of(Generation(4, (0, 1)))

    def enters(number: int, then: Callable[[dist.Store, Callable[[], object]], object]) -> bool:
        generation = Generation(number, (0, 1))
        roster.publish(generation)
        monkeypatch.setattr(opening, "reform", lambda *given: then(*given[2:]))
        return ours._enter(generation, 5.0)

    def joins(store: dist.Store) -> None:
        roster.publish(Generation(ours._at + 1, (0, 1, ours._at)))
        store.check(["note/0"])

    def met_before(store: dist.Store, met: Callable[[], object]) -> None:
        met()
        joins(store)

    def met_too_late(store: dist.Store, met: Callable[[], object]) -> None:
        meeting.set(outcome_of(ours._at), "left")  # by another one
        roster.publish(Generation(ours._at + 1, (0, 1, 2)))
        met()

    def loses_one(store: dist.Store, met: Callable[[], object]) -> None:
        met()
        roster.publish(Generation(ours._at + 1, (1,), ("why",)))
        store.check(["note/0"])

    assert not enters(5, lambda store, _: joins(store)), "nobody knows whether all will come"
    assert not enters(7, met_too_late)
    assert enters(9, met_before)
    assert not enters(11, loses_one)


def test_groups_that_are_never_made_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member was lost before it connected to this one, which waits in Gloo, without a connection."""
    monkeypatch.setattr(member, "_CUT_S", 0.0)
    monkeypatch.setattr(member, "_STUCK_S", 0.01)
    monkeypatch.setattr(pending, "leaves_calls", lambda: True)
    monkeypatch.setattr(member, "_connect", lambda _: dist.HashStore())
    ours, roster = member_of(Generation(4, (0, 1)))
    roster.publish(Generation(5, (0, 1, 2)))
    waits, entered = threading.Event(), threading.Event()

    def reform(*_: Any) -> None:
        roster.publish(Generation(6, (0, 1), ("why",)))
        assert waits.wait(20)

    def beat() -> None:
        while not entered.wait(0.005):
            ours._newest = roster.newest()
            ours._cut_off(roster)

    monkeypatch.setattr(opening, "reform", reform)
    with ThreadPoolExecutor(1) as threads:
        beats = threads.submit(beat)
        try:
            assert not ours._enter(roster.generation(5), 5.0)
            assert not waits.is_set()
        finally:
            entered.set()
            waits.set()
        beats.result()


def member_of(generation: Generation) -> tuple[member.Member, Roster]:
    """Its member 1, which has no thread, and what its launcher sees."""
    ours, store = member.Member.__new__(member.Member), dist.HashStore()
    roster = Roster(store)
    roster.publish(generation)
    ours.number, ours._at, ours._alone, ours._members = 1, generation.number, False, {*generation.members}
    ours._store, ours._roster, ours._meeting = store, roster, ("127.0.0.1", 1)
    ours.mesh = FakeMesh()
    ours._moving, ours._cut_at, ours.aborting, ours._stores = threading.Lock(), math.inf, Aborting(), []
    return ours, roster
