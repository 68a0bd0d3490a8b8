"""A member's beat, with a store that nobody else uses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from imece import mesh as meshes
from imece.membership import gpu_errors, member
from imece.membership.roster import Generation, Roster


def test_it_beats_until_all_else_at_the_exit_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' exit handlers (wandb's upload) come between: meanwhile it is no silent rank."""
    store = dist.HashStore()
    roster = Roster(store)
    roster.publish(Generation(0, (0,)))
    monkeypatch.setattr(member, "_connect", lambda where: store)
    monkeypatch.setattr(meshes, "ended_last", [])
    asked: list[str] = [""]
    monkeypatch.setattr(gpu_errors, "error_on_gpus", lambda: asked.pop() if asked else "")
    world = SimpleNamespace(member=0, master_addr="127.0.0.1", master_port=1, agent_port=None, joining=False)
    mesh: Any = SimpleNamespace(world=world)
    ours = member.Member(mesh)
    while roster.beat(0) is None or asked:
        time.sleep(0.001)
    (end,) = meshes.ended_last
    assert ours._beating.is_alive()
    end()
    assert not ours._beating.is_alive()


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


def member_of(generation: Generation) -> tuple[member.Member, Roster]:
    """Its member 1, which has no thread, and what its launcher sees."""
    ours, store = member.Member.__new__(member.Member), dist.HashStore()
    roster = Roster(store)
    roster.publish(generation)
    ours.number, ours._at, ours._alone, ours._members = 1, generation.number, False, {*generation.members}
    ours._store, ours._roster = store, roster
    return ours, roster
