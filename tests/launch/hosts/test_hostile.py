"""Strangers at an agent's port: none gets in, none costs much, and existing links go on."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.launch.hosts import handshake
from imece.launch.hosts.door import MOST_STRANGERS
from imece.launch.hosts.events import Complaints, Down, Refused, Up
from imece.launch.hosts.frames import FRAME_LIMIT_BYTES
from imece.launch.hosts.handshake import MAGIC
from tests.launch.hosts.agents import TOKEN, Agent, agents, all_that_comes, exactly, is_open, knock


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    """Hosts 0 and 1 with a link between them; a stranger has 0.3 s."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    with agents(0, 1) as both:
        both[1].dial(0, both[0].address, patience_s=10)
        both[0].next(Up), both[1].next(Up)
        yield both


def undisturbed(pair: list[Agent]) -> None:
    """Messages still go both ways."""
    zero, one = pair
    zero.tell(1, {"to": 1})
    one.tell(0, {"to": 0})
    assert one.hears(0) == {"to": 1} and zero.hears(1) == {"to": 0}


def send_all(sock: socket.socket, data: bytes) -> None:
    """... and close that direction, if it is not dropped before."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return


def prove(agent: Agent, token: bytes = TOKEN) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Do what a dialler does; the listener's proof, and a function that sends more and reads to the end."""
    sock = knock(agent)
    own = bytes(32)
    sock.sendall(MAGIC + own)
    assert exactly(sock, 8) == MAGIC
    other = exactly(sock, 32)
    sock.sendall(hmac.digest(token, MAGIC + b"dialler" + own + other, "sha256"))
    proof = exactly(sock, 32)

    def more(data: bytes) -> bytes:
        with sock:
            send_all(sock, data)
            return all_that_comes(sock)

    return proof, more


def test_a_wrong_token_is_told_so_and_learns_nothing(pair: list[Agent]) -> None:
    proof, more = prove(pair[0], b"another token that is long enough")
    assert proof == bytes(32) and more(b"") == b""
    assert pair[0].next(Refused) == Refused("127.0.0.1", "it has another token")
    with agents(2, token=b"another token that is long enough") as (two,):
        two.dial(0, pair[0].address, patience_s=10)
        down = two.next(Down)
        assert down.told and not down.surely and down.why.endswith(": it has another token")
    undisturbed(pair)


@pytest.mark.parametrize("reflects", [False, True])
def test_a_listener_without_the_token_is_not_believed(reflects: bool) -> None:
    """One that has the port of an agent that has gone, and takes any proof."""
    proofs: list[bytes] = []

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            hello = exactly(sock, 40)
            sock.sendall(hello if reflects else MAGIC + bytes(32))
            proofs.append(exactly(sock, 32))
            sock.sendall(proofs[0] if reflects else b"x" * 32)
            proofs.append(all_that_comes(sock))

    with socket.create_server(("127.0.0.1", 0)) as listener, agents(1) as (one,):
        thread = threading.Thread(target=answer)
        thread.start()
        one.dial(0, listener.getsockname(), patience_s=10)
        down = one.next(Down)
        thread.join()
    assert down.told and down.why.endswith("it does not know the token")
    assert len(proofs[0]) == 32 and proofs[1] == b"", "it is told nothing more"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "it is no agent of imece"),
        (b"\x80\x04\x95" + b"pickle" * 50, "it is no agent of imece"),
        (bytes(1 << 20), "it is no agent of imece"),
        (MAGIC[:-1] + b"\x09" + bytes(64), "it runs another version of imece"),
        (b"im", "it closed the connection"),
        (b"", "it closed the connection"),
    ],
)
def test_garbage_is_dropped(pair: list[Agent], data: bytes, why: str) -> None:
    with knock(pair[0]) as sock:
        send_all(sock, data)
        assert all_that_comes(sock) == b""
    assert pair[0].next(Refused) == Refused("127.0.0.1", why)
    undisturbed(pair)


def test_an_agent_that_has_gone_is_nobody_that_was_not_let_in(pair: list[Agent]) -> None:
    """Its connection waits in the kernel while this process is stopped, and is found when that wakes."""
    with knock(pair[0]) as sock:
        send_all(sock, MAGIC + bytes(32))
        assert exactly(sock, 40)[:8] == MAGIC[:8]
    assert pair[0].is_calm(0.3)
    undisturbed(pair)


@pytest.mark.parametrize("drips", [True, False])
def test_who_takes_too_long_is_dropped(pair: list[Agent], drips: bool) -> None:
    with knock(pair[0]) as sock:
        for byte in MAGIC:
            with contextlib.suppress(OSError):  # dropped already, on a busy machine
                if drips:
                    sock.send(bytes([byte]))
                    time.sleep(0.02)
        undisturbed(pair)
        all_that_comes(sock)
    assert pair[0].next(Refused).why == "it has not said who it is within 0.3 s"
    undisturbed(pair)


def test_a_frame_of_a_gigabyte_is_not_waited_for(pair: list[Agent]) -> None:
    _, more = prove(pair[0])
    assert more(struct.pack(">I", 1 << 30) + b"x" * 100) == b""
    why = f"it declared a message of 1073741824 bytes, of which {FRAME_LIMIT_BYTES} are allowed"
    assert pair[0].next(Refused).why == why
    undisturbed(pair)


@pytest.mark.parametrize(
    "hello",
    [b"[]", b"{}", b'"x"', b"[" * 60_000, b"\xff\xfe", b'{"purpose":"link","host":NaN}', b"1" * 5000],
    ids=["list", "empty", "string", "deep", "bytes", "NaN", "digits"],
)
def test_who_knows_the_token_and_does_not_say_who_it_is(pair: list[Agent], hello: bytes) -> None:
    _, more = prove(pair[0])
    assert more(struct.pack(">I", len(hello)) + hello) == b""
    assert pair[0].next(Refused).why.startswith(("it sent", "it did not say who it is"))
    undisturbed(pair)


def test_a_peer_that_says_what_is_no_message_loses_its_link(pair: list[Agent]) -> None:
    zero, one = pair
    one._call(one._links._up[0].send, struct.pack(">I", 1 << 31))
    why = f"it declared a message of 2147483648 bytes, of which {FRAME_LIMIT_BYTES} are allowed"
    zero.loses(1, why, surely=False)
    assert one.next(Down).host == 0


def test_a_crowd_of_strangers_does_not_keep_an_agent_out(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = pair[0]
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 30.0)
    crowd = [knock(zero) for _ in range(MOST_STRANGERS)]
    try:
        with agents(2) as (two,):
            two.dial(0, zero.address, patience_s=10)
            assert two.next(Up).host == 0
            assert zero.next(Refused).why == "too many strangers at a time" and zero.next(Up).host == 2
            assert all_that_comes(crowd[0]) == b"", "the oldest had to go"
            assert sum(map(is_open, crowd[1:])) == MOST_STRANGERS - 1
            undisturbed(pair)
    finally:
        for sock in crowd:
            sock.close()


def test_a_crowd_that_waited_in_the_queue_is_met_and_closed(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, as when the agent had no processor for a while: none is turned away unmet."""
    zero, more = pair[0], 3
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 30.0)
    is_there = threading.Event()
    zero._call(is_there.wait)
    try:
        crowd = [knock(zero) for _ in range(MOST_STRANGERS + more)]
    finally:
        is_there.set()
    try:
        assert zero.next(Refused).why == "too many strangers at a time"
        assert [all_that_comes(sock) for sock in crowd[:more]] == [b""] * more
        assert all(map(is_open, crowd[more:]))
        undisturbed(pair)
    finally:
        for sock in crowd:
            sock.close()


@settings(max_examples=20)
@given(st.binary(max_size=200))
def test_nothing_that_comes_in_is_believed(data: bytes) -> None:
    with agents(0) as (zero,):
        with knock(zero) as sock:
            send_all(sock, data)
            assert all_that_comes(sock)[40:] in (b"", bytes(32))
        assert isinstance(zero.next(Refused), Refused) and zero.is_calm(0.0)


def test_one_complaint_in_a_while_counts_the_others() -> None:
    complaints = Complaints(10.0)
    assert complaints.about("a", "x", 0.0) == Refused("a", "x")
    assert [complaints.about("a", "x", now) for now in (0.0, 5.0, 9.9)] == [None] * 3
    assert complaints.about("b", "y", 10.0) == Refused("b", "y (and 3 more since the last one told)")
    assert complaints.about("b", "y", 20.0) == Refused("b", "y")
