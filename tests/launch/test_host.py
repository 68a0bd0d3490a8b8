"""A host's store does not grow with the generations of a long run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from imece import status
from imece.launch.crew import Crew
from imece.launch.host import Host, Order, Start
from imece.launch.processes import catches, is_stopped
from imece.launch.view import Place
from imece.membership.roster import Generation, Roster, meeting_in
from imece.status import Failure
from imece.store import client


def host(crew: Crew, *command: str, grace_s: float = 30.0) -> Host:
    order: Any = Order(command, False, 0.0, grace_s)
    return Host(order, crew, lambda *_: os.environ)


def test_generations_that_are_over_leave_nothing() -> None:
    with Crew(None) as crew:
        ours = host(crew)
        for number in range(10):
            ours.publish(Generation(number, (0, 1)))
            meeting_in(ours.store, number).set("note/0", "an address")
        left = [key for key in ours.store.list_keys() if key.startswith("imece/generation/")]
        assert sorted(left) == [f"imece/generation/{number}/note/0" for number in (7, 8, 9)]
        assert Roster(ours.store).generation(0).members == (0, 1), "a drill asks for them at its end"


def test_who_is_to_join_is_heard_though_no_generation_was_published_here() -> None:
    """A launcher that was started again: it hears of one only when its ranks are in it."""
    with Crew(None) as crew:
        ours = host(crew, "sleep", "60")
        ours.begin_anew()  # as a seeker does
        ours.start([Start(4, 0, 0, 1, True, 0)])
        deadline = time.monotonic() + 60
        while ours._unserved is not None:
            assert time.monotonic() < deadline, "nobody can speak"
            crew.wait(ours.next_time())
            ours.on_time(time.monotonic())
        Roster(client("127.0.0.1", ours.port, timedelta(seconds=60))).say_ready(4)
        assert ours.ready([4]) == [4]


@pytest.mark.parametrize("because_of_peer", [False, True])
def test_a_rank_that_failed_is_not_said_to_be_killed_by_our_signal(because_of_peer: bool) -> None:
    """Both ranks raise the same; the one that was first leaves slowly, and is ended for the other's sake."""
    with Crew(None) as crew:
        ours = host(crew, "sleep", "60")
        ours.start([Start(0, 0, 0, 2, False, 0)])
        failure = Failure(time.monotonic(), "ValueError", "x", because_of_peer)
        ours.store.set("imece/member/0/failure", json.dumps(asdict(failure)))
        ours.end([0], signal.SIGTERM, 60.0)
        while not crew.ended:
            crew.wait(time.monotonic() + 30)
        ending = ours.ended([0], time.monotonic())[0]
    assert not ending.ended_by_us
    if because_of_peer:
        assert ending.status == -signal.SIGTERM and ending.by_our_signal
    else:
        assert ending.describe() == f"rank 0 (pid {ending.pid}) failed with ValueError: x (exit status 1)"
        assert ending.status == 1


def test_a_rank_that_has_failed_and_does_not_end_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """As Python does not while a thread that is no daemon lives; the other rank has not failed."""
    with Crew(None) as crew:
        ours = host(crew, "sleep", "60", grace_s=0.2)
        ours.start([Start(member, member, member, 2, False, 0) for member in (0, 1)])
        failure = Failure(time.monotonic(), "ValueError", "x", False)
        ours.store.set("imece/member/1/failure", json.dumps(asdict(failure)))
        deadline = time.monotonic() + 20
        while not crew.ended and time.monotonic() < deadline:
            crew.wait(min(deadline, ours.next_time()))
            if not crew.ended:
                ours.on_time(time.monotonic())
        assert [*crew.ended] == [1]
        ending = ours.ended([1], time.monotonic())[1]
    who = f"rank 1 (pid {ending.pid})"
    assert ending.describe() == f"{who} failed with ValueError: x (exit status 1)" and ending.status == 1
    why = f"imece: {who} has failed and not ended within 2 s: it is killed (it may wait for a thread"
    assert capfd.readouterr().err.startswith(why)


def test_members_that_have_ended_leave_nothing_to_be_asked_for() -> None:
    with Crew(None) as crew:
        ours = host(crew, sys.executable, "-c", "")
        ours.start([Start(member, member, member, 2, False, 0) for member in (0, 1)])
        roster = Roster(ours.store)
        for member in (0, 1):
            roster.say_alive(member, 1, 0)
            roster.say_ready(member)
            roster.say_resilient(member)
            status.tell_running(ours.store, member)
            ours.store.set(f"imece/member/{member}/failure", "{}")
        before = set(ours.store.list_keys())
        while 1 not in crew.ended:
            crew.wait(time.monotonic() + 30)
        ours.forget([1])
        gone = before - set(ours.store.list_keys())
        beat = {
            key for key in before if key.endswith("beat/1")
        }  # its name stays, as others may be reading it
        assert {key for key in before if "/1" in key} - beat == gone and len(gone) == 5 and len(beat) == 1
        assert roster.beat(1) is None and roster.beat(0) == (1, 0)


def test_a_rank_behind_a_wrapper(tmp_path: Path) -> None:
    """Signals reach it alone, and the shell tells of its death by 128 + the signal's number."""
    script = tmp_path / "wrap.sh"
    script.write_text('python=$1; shift; "$python" -c "$@"; exit $?')
    counts = (
        "import signal; signal.signal(10, lambda *_: None); print('here', flush=True); sum(range(1 << 60))"
    )
    for state in ("running", "", "closed"):
        closed = state == "closed"
        with Crew(None) as crew:
            ours = host(crew, "sh", str(script), sys.executable, counts)
            ours.start([Start(0, 0, 0, 2, False, 0)])
            shell = psutil.Process(crew.living[0].pid)
            while not (children := shell.children()) or not catches(children[0].pid, signal.SIGUSR1):
                crew.wait(time.monotonic() + 0.01)
            rank = children[0]
            assert ours.pid_of(0) == shell.pid
            ours.store.set("imece/member/0/pid", str(os.getpid()))
            assert ours.pid_of(0) == shell.pid, "of another group"
            ours.store.set("imece/member/0/pid", str(rank.pid))
            if state:
                ours.store.set("imece/member/0/state", state)
            assert ours.pid_of(0) == rank.pid and ours._ask_for_stacks(0)
            assert ours.name(0, 0) == f"rank 0 (pid {rank.pid})"
            assert ours.view().living() == {0: Place(0, rank.pid)}
            assert ours.hit(0, signal.SIGSTOP)
            while not is_stopped(rank.pid):
                time.sleep(0.001)
            assert not is_stopped(shell.pid)
            rank.resume()
            ours.end([0], signal.SIGTERM, 60.0)
            while not crew.ended:
                crew.wait(time.monotonic() + 30)
            ending = ours.ended([0], time.monotonic())[0]
        assert ending.status == (143 if closed else -signal.SIGTERM)
        assert ending.pid == rank.pid
        assert ending.died == ending.by_our_signal == (not closed)
