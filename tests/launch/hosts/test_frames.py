"""Frames arrive as sent, and anything else is refused before it costs anything."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.cli.launch.options import MOST_HOSTS, MOST_RANKS
from imece.launch.endings import Ending
from imece.launch.environment import MOST_RANKS_PER_HOST
from imece.launch.generations import Limits
from imece.launch.hosts import frames
from imece.launch.hosts.frames import FrameError, pack, printable, unpack
from imece.launch.hosts.wide_generations import WideGenerations
from imece.launch.hosts.words import Report, Seen, of_report
from imece.status import Failure

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def read_all(data: bytes, pieces: int = 1) -> list[dict[str, Any] | None]:
    """What arrives of `data`, sent in some pieces."""

    async def both() -> list[dict[str, Any] | None]:
        loop, got = asyncio.get_running_loop(), []
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)

            async def send() -> None:
                size = len(data) // pieces + 1
                for start in range(0, len(data), size):
                    await loop.sock_sendall(near, data[start : start + size])
                near.close()

            sending = asyncio.create_task(send())
            try:
                while True:
                    got.append(await frames.read(far))
            except EOFError:
                await sending
                return got

    return asyncio.run(both())


@settings(max_examples=15)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4))
def test_messages_come_back_as_they_were(messages: list[dict[str, Any]]) -> None:
    data = b"".join(frames.HEARTBEAT + pack(message) for message in messages)
    assert read_all(data, pieces=3) == [m for message in messages for m in (None, message)]


@given(st.binary(max_size=300))
def test_what_is_no_object_is_refused(data: bytes) -> None:
    try:
        assert isinstance(unpack(data), dict)
    except FrameError as error:
        assert str(error) == f"it sent {len(data)} bytes that are no JSON object"


def test_too_deep_and_too_many_digits_are_refused() -> None:
    for data in (b'{"a":' * 10_000, b'{"a":' + b"9" * 9000 + b"}", b'{"a":Infinity}', b"null", b"[]", b"1"):
        with pytest.raises(FrameError):
            unpack(data)


def test_too_long_a_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameError, match="1048577 bytes, of which 1048576"):
        read_all(b"\0\x10\0\1")
    with pytest.raises(frames.Goodbye):
        read_all(frames.GOODBYE)
    assert read_all(b"\0\0\1") == [], "half a frame is none"


def test_what_agents_say_of_the_most_ranks_fits() -> None:
    generations = WideGenerations(Limits(MOST_RANKS))
    generations.follow_up(None, 1_000_000)  # so many were replaced
    first = generations.start_all(0.0)
    joined = [generations.start_one(slot, 0.0) for slot in range(MOST_RANKS // 2)]
    for member in first.members[: MOST_RANKS // 2]:
        generations.remove(member)
    newest = generations.take_in(joined, dict.fromkeys(joined, 1_000_000), bool)
    assert newest is not None and len(newest.members) == MOST_RANKS
    book = [[host, "fe80::ffff:ffff:ffff:ffff%eth0", 65_535] for host in range(MOST_HOSTS)]
    assert pack({"do": "know", "snapshot": generations.snapshot(), "book": book})
    members = newest.members[:MOST_RANKS_PER_HOST]
    gone_on = tuple((number, 1e6 / 7, 1_000_000) for number in range(10_000, 10_003))
    seen = Seen(MOST_RANKS, 4_000_000, 1_000_000, 1_000_000, True, True, gone_on)
    failure = Failure(1e6 / 7, "ValueError", "木" * 30_000, False)
    ending = Ending(MOST_RANKS, 4_000_000, 1, 1e6 / 7, failure, where="in backward of step 1,000,000")
    report = Report(dict.fromkeys(members, seen), dict.fromkeys(members, ending), newest)
    assert pack({"say": "yes", "report": of_report(report, 2e6 / 7)})


@given(st.text() | st.integers())
def test_what_a_peer_says_is_one_printable_line(text: object) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown) <= 203


def test_what_is_printable_is_shown_as_it_is() -> None:
    assert printable("host ö, 3 s") == "host ö, 3 s"
    assert printable("a\x1b[31mb\ud800\r\n") == "a?[31mb???"
    assert printable("x" * 300) == "x" * 200 + "..."
