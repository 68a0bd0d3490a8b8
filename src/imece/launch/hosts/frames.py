"""What a connection carries: JSON objects, each behind its length. Nothing that comes in is trusted.

4 bytes, big-endian: the length of what follows; 0 is a heartbeat
a JSON object in UTF-8 of at most FRAME_LIMIT_BYTES
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any, NoReturn

FRAME_LIMIT_BYTES = 1 << 20  # fits what is said about all ranks, for the most ranks that can be started
HEARTBEAT = b"\0\0\0\0"
GOODBYE = b"\xff\xff\xff\xff"
"""Sent last by an agent that closes a connection and lives on."""
_LENGTH = struct.Struct(">I")
_PRINTED = 200  # characters


class FrameError(Exception):
    """What came is no frame; the connection cannot be used any more."""


class Goodbye(Exception):
    """The other side closes the connection and lives on."""


def pack(message: dict[str, Any]) -> bytes:
    """`message` as it travels. ValueError if it is too long, or no JSON."""
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > FRAME_LIMIT_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, of which {FRAME_LIMIT_BYTES} are allowed")
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, which a peer sent; FrameError if it is none."""
    try:
        message = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise FrameError(f"it sent {len(data)} bytes that are no JSON object")
    return message


async def read(sock: socket.socket) -> dict[str, Any] | None:
    """The next message; None for a heartbeat. Raises Goodbye, FrameError, EOFError or OSError."""
    head = await read_exactly(sock, _LENGTH.size)
    if head == GOODBYE:
        raise Goodbye
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_LIMIT_BYTES:  # before anything is allocated for it
        raise FrameError(f"it declared a message of {length} bytes, of which {FRAME_LIMIT_BYTES} are allowed")
    return unpack(await read_exactly(sock, length)) if length else None


async def write(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises ValueError or OSError."""
    await asyncio.get_running_loop().sock_sendall(sock, pack(message))


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes of the connection, no more. Raises EOFError or OSError."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise EOFError("it closed the connection")
        data += piece
    return bytes(data)


def printable(text: object) -> str:
    """A peer's text, safe for a terminal: one line of about 200 characters without control characters."""
    text = text if isinstance(text, str) else str(text)
    shown = "".join(c if c.isprintable() else "?" for c in text[:_PRINTED])
    return shown + ("..." if len(text) > _PRINTED else "")


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
