"""Links between agents on one host's loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from imece.errors import UserError
from imece.launch.hosts import handshake, links, reach
from imece.launch.hosts.events import Down, Refused, Up
from imece.launch.hosts.frames import FRAME_LIMIT_BYTES
from imece.launch.hosts.network import Network
from imece.world import LOOPBACK
from tests.launch.hosts.agents import LIMIT_S, TOKEN, Agent, agents

Hear = Callable[[socket.socket, str, reach.Hello], Coroutine[Any, Any, None]]


def link(one: Agent, other: Agent) -> tuple[Up, Up]:
    """Let `one` dial `other`; what each learns."""
    one.dial(other.me, other.address, patience_s=10)
    return one.next(Up), other.next(Up)


def test_two_agents_get_to_know_each_other() -> None:
    with agents(0) as (zero,), agents(1, hello={"ranks": 4}) as (one,):
        at_one, at_zero = link(one, zero)
        assert at_one == Up(0, at_one.link, zero.address, {})
        assert at_zero == Up(1, at_zero.link, one.address, {"ranks": 4})


def test_messages_arrive_in_order_both_ways() -> None:
    with agents(0, 1) as (zero, one):
        link(one, zero)
        for number in range(500):
            zero.tell(1, {"number": number})
            one.tell(0, {"text": "ö" * number})
        assert [one.hears(0) for _ in range(500)] == [{"number": n} for n in range(500)]
        assert [zero.hears(1) for _ in range(500)] == [{"text": "ö" * n} for n in range(500)]


def test_a_message_that_is_too_long_is_the_senders_mistake() -> None:
    with agents(0, 1) as (zero, one):
        link(one, zero)
        with pytest.raises(ValueError, match=f"{FRAME_LIMIT_BYTES} are allowed"):
            zero.tell(1, {"text": "x" * FRAME_LIMIT_BYTES})
        with pytest.raises(ValueError, match="JSON"):
            zero.tell(1, {"number": float("nan")})
        zero.tell(1, {"text": "x" * (FRAME_LIMIT_BYTES - len('{"text":""}'))})
        assert len(one.hears(0)["text"]) > 65_000
        assert zero.is_calm() and one.is_calm()


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_what_is_no_hosts_name_is_not_reached(name: str) -> None:
    """A peer may say that an agent is there."""
    why = f"^'{name}' is not a host that can be found: it is no host's name$"
    with pytest.raises(reach.Unreached, match=why):
        asyncio.run(reach._connect((name, 1)))


def test_what_was_sent_last_arrives_and_then_the_host_is_surely_gone() -> None:
    with agents(0) as (zero,):
        with agents(1) as (one,):
            link(one, zero)
            one.tell(0, {"last": "words"})
        assert zero.hears(1) == {"last": "words"}
        zero.loses(1, "it closed the connection", surely=True)


def test_a_dropped_peer_hears_the_last_message_and_may_come_again() -> None:
    with agents(0, 1) as (zero, one):
        link(one, zero)
        zero.tell(1, {"why": "evicted"})
        zero.drop(zero.links[1])
        zero.tell(1, {"never": "sent"})
        assert one.hears(0) == {"why": "evicted"}
        one.loses(0, "it closed the connection", surely=False)
        link(one, zero)
        one.tell(0, {"back": True})
        assert zero.hears(1) == {"back": True}, "no Down for the one that dropped"


def test_what_is_for_a_link_that_has_ended_does_nothing_to_a_newer_one() -> None:
    with agents(0, 1) as (zero, one):
        _, old = link(one, zero)
        one.drop(one.links[0])
        zero.loses(1, "it closed the connection", surely=False)
        link(one, zero)
        zero.send(old, {"late": True})
        zero.drop(old)
        zero.tell(1, {"in": "time"})
        assert one.hears(0) == {"in": "time"} and zero.is_calm() and one.is_calm()


def test_a_second_link_to_a_host_comes_after_the_end_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer has seen the first one end, and this side has not yet."""
    with agents(0, 1, 1) as (zero, one, again):
        link(one, zero)
        monkeypatch.setattr(zero._links, "_why_not", lambda _peer: None)
        again.dial(0, zero.address, patience_s=10)
        zero.loses(1, "it made another connection", surely=False)
        assert zero.next(Up).address == again.address
        again.next(Up)
        one.loses(0, "it closed the connection", surely=False)
        again.tell(0, {"from": "the second"})
        assert zero.hears(1) == {"from": "the second"} and zero.is_calm()


def test_the_agent_of_a_killed_process_is_surely_gone() -> None:
    with agents(0) as (zero,):
        pid = os.fork()
        if pid == 0:
            try:
                with Agent(1) as one:
                    link(one, zero)
                    signal.pause()
            except BaseException:  # noqa: BLE001  (a copy of pytest must never return from here)
                traceback.print_exc()
            finally:
                os._exit(70)
        try:
            zero.next(Up)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        down = zero.next(Down)
        assert down.host == 1 and down.surely
        assert zero.probe(zero.address, 20.0) == "there"


def test_who_closes_a_link_but_listens_on_is_not_surely_gone() -> None:
    with agents(0, 1) as (zero, one):
        link(one, zero)
        one._call(one._links._up[0].end, "broken", False)
        zero.loses(1, "it closed the connection", surely=False)
        one.loses(0, "broken", surely=False)


def test_a_host_that_was_stopped_for_long_takes_nothing_for_a_sign() -> None:
    """It may have been given up meanwhile, by that one too, before that one died."""
    with agents(0) as (zero,):
        with agents(1) as (one,):
            link(one, zero)
            zero._call(setattr, zero._links, "_beat_s", time.monotonic() - 31)
        why = "this launcher had not run for 31 s: was it, or its machine, stopped?"
        zero.loses(1, f"it closed the connection; {why}", surely=False)


def test_who_has_lost_its_own_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(0) as (zero,), agents(1) as (one,):
        link(one, zero)
        monkeypatch.setattr(links, "interface_of", {zero.address[0]: None}.get)
        zero._call(zero._links._up[1].end, "broken", False)
        lost = f"this host has lost its address {LOOPBACK}, where the others look for it"
        zero.loses(1, f"broken; {lost}", surely=False)


def test_a_silent_link_ends_on_both_sides() -> None:
    with agents(0, 1, silent_s=0.4) as (zero, one):
        link(one, zero)
        assert zero.is_calm(0.5), "heartbeats are heard"
        one._call(setattr, one._links._up[0], "send", lambda _frame: None)
        zero.loses(1, "it was silent for 0.4 s", surely=False)
        one.loses(0, "it closed the connection", surely=False)


def test_a_peer_that_takes_nothing_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imece.launch.hosts.link._BACKLOG_BYTES", 1 << 20)
    with agents(0, 1) as (zero, one):
        link(one, zero)
        busy = threading.Event()
        one._call(busy.wait, LIMIT_S)
        try:
            for _ in range(400):  # more than the kernel keeps of it
                zero.tell(1, {"text": "x" * 60_000})
            zero.loses(1, "it takes nothing from its connection", surely=False)
        finally:
            busy.set()


def test_a_dial_waits_for_an_agent_that_comes_later() -> None:
    with agents(1) as (one,):
        with socket.create_server((LOOPBACK, 0)) as placeholder:
            port = placeholder.getsockname()[1]
        one.dial(0, (LOOPBACK, port), patience_s=20)
        assert one.is_calm(0.2)
        with Agent(0, port=port):
            assert one.next(Up).host == 0


def test_a_dial_in_vain_says_what_there_is() -> None:
    with agents(1) as (one,):
        with socket.create_server((LOOPBACK, 0)) as other:
            port = other.getsockname()[1]
        assert one.probe((LOOPBACK, port), 20.0) == "refused"
        one.dial(0, (LOOPBACK, port), patience_s=0.0)
        one.loses(0, f"nothing listens at 127.0.0.1:{port}", surely=False)
        one.dial(0, ("no such host.invalid", 1), patience_s=0.0)
        assert "'no such host.invalid' is not a host that can be found" in one.next(Down).why


def test_a_listener_that_never_answers_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.1)
    with agents(1) as (one,), socket.create_server((LOOPBACK, 0)) as mute:
        address = LOOPBACK, mute.getsockname()[1]
        assert one.probe(address, 0.2) == "silent"
        one.dial(0, address, patience_s=0.0)
        one.loses(0, f"127.0.0.1:{address[1]} does not answer", surely=False)


def test_a_host_that_dials_itself_or_the_wrong_one_is_told() -> None:
    with agents(0, 1, 0) as (zero, one, double):
        double.dial(5, zero.address, patience_s=9)
        why = "host 0 is the one that listens here: two have the same host rank"
        double.loses(5, why, surely=False, told=True)
        assert zero.next(Refused).why == why
        one.dial(5, zero.address, patience_s=9)
        down = one.next(Down)
        assert down.told and down.why.endswith(", not host 5")


def test_another_job_and_another_version_are_told_so_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(0) as (zero,), agents(1, job="else\x1b[2J") as (one,), agents(2) as (two,):
        one.dial(0, zero.address, patience_s=9)
        assert one.next(Down).why == r"this port belongs to the job 'job', not to 'else\x1b[2J'"
        assert zero.next(Refused).why.startswith("this port belongs")
        hello = two._links._hello
        monkeypatch.setattr(two._links, "_hello", lambda purpose: replace(hello(purpose), version="9.9"))
        two.dial(0, zero.address, patience_s=9)
        down = two.next(Down)
        assert down.told and down.why == f"host 0 runs imece {reach.VERSION}, the other side 9.9"


def test_a_second_one_with_the_same_host_rank_is_told_that_the_first_is_here() -> None:
    with agents(0, silent_s=2.0) as (zero,), agents(1, 1) as (one, double):
        link(one, zero)
        double.dial(0, zero.address, patience_s=60)
        double.loses(0, "host 1 is here already", surely=False, told=True)
        one.tell(0, {"still": "here"})
        assert zero.hears(1) == {"still": "here"}


def test_an_agent_that_was_started_again_takes_the_place_of_the_one_before() -> None:
    """Though the end of that one was not noticed: its machine lost power, say."""
    with agents(0) as (zero,), agents(1) as (again,):
        first = Agent(1)
        with first:
            first._links.port = again.address[1]  # as if both had listened at one port, one after the other
            link(first, zero)
            again.dial(0, zero.address, patience_s=60)
            zero.loses(1, "its agent has been started again", surely=True)
            zero.next(Up), again.next(Up)
            again.tell(0, {"again": True})
            assert zero.hears(1) == {"again": True}


def test_a_host_that_turned_away_and_then_died_is_not_surely_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gone on with others in between."""
    with agents(0) as (zero,), agents(1) as (one,):
        link(one, zero)

        async def refused(*_: object) -> tuple[str, None]:
            return "refused", None

        monkeypatch.setattr(zero._links, "probe", refused)
        one.drop(one.links[0])
        zero.loses(1, "it closed the connection", surely=False)


@pytest.mark.parametrize("first", [None, 0, 1])
def test_two_that_dial_each_other_get_one_link(first: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have said who they are before either has heard it; then they hear it together, or one first."""
    with agents(0, 1) as (zero, one):
        heard: set[int] = set()
        together = threading.Barrier(2)
        for agent in (zero, one):
            late_s = None if first is None else 0.05 * (agent.me != first)
            hear = hear_later(agent, heard, together, late_s)
            monkeypatch.setattr(agent._links.door, "_incoming", hear)
        zero.dial(1, one.address, patience_s=10)
        one.dial(0, zero.address, patience_s=10)
        zero.next(Up), one.next(Up)
        zero.tell(1, {"from": 0})
        one.tell(0, {"from": 1})
        assert one.hears(0) == {"from": 0} and zero.hears(1) == {"from": 1}
        assert zero.is_calm(0.2) and one.is_calm()


def hear_later(agent: Agent, heard: set[int], together: threading.Barrier, late_s: float | None) -> Hear:
    """Hear who comes in only when both have spoken: so much later, or (None) both at the same instant."""
    hear = agent._links._incoming

    async def incoming(sock: socket.socket, address: str, peer: reach.Hello) -> None:
        if agent.me not in heard:
            heard.add(agent.me)
            while len(heard) < 2:
                await asyncio.sleep(0.001)
            if late_s is None:
                together.wait(LIMIT_S)
            else:
                await asyncio.sleep(late_s)
        await hear(sock, address, peer)

    return incoming


def test_a_port_that_is_taken_is_one_line() -> None:
    with agents(0) as (zero,), Network(TOKEN, 1, "job", {}, silent_s=1.0) as other:
        with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1:\d+ \(Address already in use\)"):
            other.listen(*zero.address)
        with pytest.raises(UserError, match=r"cannot listen on 203.0.113.1:0"):
            other.listen("203.0.113.1")


def test_a_bug_in_the_thread_is_raised_to_the_user() -> None:
    with agents(0) as (zero,):

        async def broken() -> None:
            raise ZeroDivisionError

        zero._call(zero._spawn, broken())
        with pytest.raises(ZeroDivisionError):
            zero.next(Up)
