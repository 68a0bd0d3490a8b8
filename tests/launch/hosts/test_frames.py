"""Frames: what is sent comes back, and what is no frame is refused before it costs anything."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.launch.hosts import frames
from imece.launch.hosts.frames import FrameError, pack, printable, unpack

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
    with pytest.raises(FrameError, match="65537 bytes, of which 65536"):
        read_all(b"\0\1\0\1")
    with pytest.raises(frames.Goodbye):
        read_all(frames.GOODBYE)
    assert read_all(b"\0\0\1") == [], "half a frame is none"


@given(st.text() | st.integers())
def test_what_a_peer_says_is_one_printable_line(text: object) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown) <= 203


def test_what_is_printable_is_shown_as_it_is() -> None:
    assert printable("host ö, 3 s") == "host ö, 3 s"
    assert printable("a\x1b[31mb\ud800\r\n") == "a?[31mb???"
    assert printable("x" * 300) == "x" * 200 + "..."
