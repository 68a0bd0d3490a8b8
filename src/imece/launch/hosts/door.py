"""The door for others: nobody enters without proving, quickly and briefly, that they know the token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from imece.launch.hosts import frames, handshake
from imece.launch.hosts.events import Complaints, Refused
from imece.launch.hosts.handshake import GoneError, HandshakeError, demand
from imece.launch.hosts.link import prepare
from imece.launch.hosts.reach import Hello

MOST_STRANGERS = 64
_NO_DESCRIPTOR_S = 0.1
Work = Coroutine[Any, Any, None]
Task = asyncio.Task[None]


class Door:
    """Runs in the loop's thread only."""

    def __init__(
        self,
        token: bytes,
        incoming: Callable[[socket.socket, str, Hello], Work],
        emit: Callable[[Refused], None],
        spawn: Callable[[Work], Task],
    ) -> None:
        """incoming: gets the connection of whoever has come in within HANDSHAKE_S; the connection is closed
        when it returns. spawn: runs what may take long, and ends it when all is closed."""
        self._token, self._incoming, self._emit, self._spawn = token, incoming, emit, spawn
        self._complaints = Complaints()
        self._strangers: dict[Task, str] = {}  # their addresses, the oldest first

    async def accept(self, listener: socket.socket) -> NoReturn:
        """Meet everyone who comes, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor left, or the stranger has gone again
                await asyncio.sleep(_NO_DESCRIPTOR_S)
                continue
            self._strangers[self._spawn(self._meet(sock, address[0]))] = address[0]
            if len(self._strangers) > MOST_STRANGERS:
                # Whoever knows the token needs milliseconds, so the oldest stranger is the least likely to
                # know it.
                oldest = next(iter(self._strangers))
                self.complain(self._strangers.pop(oldest), "too many strangers at a time")
                oldest.cancel()
            # Begin each one in the listener's queue before the next comes: a task that is cancelled before it
            # has begun closes nothing.
            await asyncio.sleep(0)

    def complain(self, address: str, why: str) -> None:
        """Report that somebody was not let in, unless too much was reported lately."""
        refused = self._complaints.about(address, why, asyncio.get_running_loop().time())
        if refused is not None:
            self._emit(refused)

    async def refuse(self, sock: socket.socket, address: str, why: str, again_s: float) -> None:
        """Say why, and for how long it is worth trying again."""
        if not again_s:
            self.complain(address, why)
        await self.answer(sock, {"no": why, "again_s": again_s})

    async def answer(self, sock: socket.socket, message: dict[str, Any]) -> None:
        """Answer an introduction; it does not matter whether the answer arrives."""
        try:
            async with asyncio.timeout(handshake.HANDSHAKE_S):
                await frames.write(sock, message)
        except OSError:  # TimeoutError too
            return

    async def _meet(self, sock: socket.socket, address: str) -> None:
        """Handle one stranger, and everything it does if it is let in."""
        with sock:
            peer = await self._introduced(sock, address)
            if peer is not None:
                await self._incoming(sock, address, peer)

    async def _introduced(self, sock: socket.socket, address: str) -> Hello | None:
        """Who is coming in; None, with a complaint, if it does not prove that it may, or does not say who
        it is."""
        task = asyncio.current_task()
        assert task is not None
        try:
            prepare(sock)
            async with asyncio.timeout(handshake.HANDSHAKE_S):
                await demand(sock, self._token)
                self._strangers.pop(task, None)
                return Hello.of(await frames.read(sock))
        except GoneError:  # this process was stopped for a while, say, and its peers have dialled in vain
            return None
        except TimeoutError:
            self.complain(address, f"it has not said who it is within {handshake.HANDSHAKE_S:g} s")
        except EOFError as error:
            if task in self._strangers:  # or it has learned that it need not come in
                self.complain(address, str(error))
        except (HandshakeError, frames.FrameError) as error:
            self.complain(address, str(error))
        except OSError as error:
            self.complain(address, error.strerror or str(error))
        finally:
            self._strangers.pop(task, None)
        return None
