"""One connection between two agents that know each other: messages in order, and heartbeats between them."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any

from imece.launch.hosts import frames
from imece.system.addresses import Address

_BACKLOG_BYTES = 16 << 20  # a peer that lives but takes nothing from its connection is of no use
_TCP_RTO_MAX_MS = 44  # linux/tcp.h, since Linux 6.15
_numbers = itertools.count()


class Link:
    """Runs in the loop's thread only. `run` owns the socket and closes it."""

    def __init__(self, sock: socket.socket, host: int, address: Address, agent: str) -> None:
        """address: where the peer listens, with port 0 if it does not. agent: names its process."""
        self.number = next(_numbers)
        self.host, self.address, self.agent = host, address, agent
        self.heard = 0
        """How many frames have come."""
        self.heard_s = float("-inf")
        """When the last frame came, or the link began."""
        self.doubted_until = float("-inf")
        """Until when the link's end tells nothing about the process at the other end."""
        self.end_said: tuple[str, bool] | None = None
        """Why it ended, and whether the process at the other end surely has; set by whoever says it first."""
        self.ended = asyncio.Event()
        self._sock = sock
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._backlog_bytes = 0

    def send(self, frame: bytes) -> None:
        """Queue a packed frame, or end the link if far too much waits already."""
        self._backlog_bytes += len(frame)
        self._outgoing.put_nowait(frame)
        if self._backlog_bytes > _BACKLOG_BYTES:
            self.end("it takes nothing from its connection", surely=False)

    def end(self, why: str, surely: bool) -> None:
        """End it at once; `run` returns."""
        if self.end_said is None:
            self.end_said = why, surely
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the link has already ended

    def finish(self, *, lives_on: bool) -> None:
        """Close this direction once all is sent; `run` returns when the peer has closed the other."""
        if lives_on:
            self._outgoing.put_nowait(frames.GOODBYE)
        self._outgoing.put_nowait(None)

    async def run(self, said: Callable[[dict[str, Any]], None]) -> str:
        """Take messages until the connection ends; returns why it did."""
        loop = asyncio.get_running_loop()
        self.heard_s = loop.time()
        writer = asyncio.create_task(self._write())
        try:
            while True:
                message = await frames.read(self._sock)
                self.heard, self.heard_s = self.heard + 1, loop.time()
                if message is not None:
                    said(message)
        except frames.Goodbye:
            self.end("it closed the connection", surely=False)
            return "goodbye"
        except (frames.FrameError, EOFError) as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            self._sock.close()
            self.ended.set()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (frame := await self._outgoing.get()) is not None:
                await loop.sock_sendall(self._sock, frame)
                self._backlog_bytes -= len(frame)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the reader meets the error too, after what came in before it


def prepare(sock: socket.socket) -> None:
    """Set the options of every connection between agents."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        # After a cut of seconds, retry each second: by doubling its waits, TCP would stay silent for as long
        # as the cut lasted.
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
    except OSError:
        return  # an older Linux
