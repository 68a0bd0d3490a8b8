"""The ranks' way to the store where they meet, whichever agent serves it.

A rank connects to a port of its own host's loopback, and so need not know anything about hosts. Its
connection leads to a store on this host's loopback, or through another agent to the store on that one's.
Nothing is read from a rank before there is somebody to pass it on to.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NoReturn

from imece.system.addresses import Address
from imece.world import LOOPBACK

Work = Coroutine[Any, Any, None]
Target = int | Address | None
"""A port of the own loopback, the address of another agent, or nowhere yet."""
_RETRY_S = 0.1
_PIECE_BYTES = 1 << 18
_ESTABLISHED = 1  # linux/tcp_states.h


class Tunnels:
    """All tunnels of one host. Runs in the loop's thread only."""

    def __init__(
        self, reach: Callable[[Address], Awaitable[socket.socket]], spawn: Callable[[Work], object]
    ) -> None:
        """reach: makes a connection that the agent at that address passes on to its store, or raises OSError.
        spawn: runs what may take long, and ends it when all is closed."""
        self.store_port: int | None = None
        """The store that tunnels of others lead to."""
        self._reach, self._spawn = reach, spawn
        self._target: Target = None
        self._changed = asyncio.Event()
        self._leading: dict[asyncio.Task[Any], Target] = {}  # where established connections lead
        self._served: dict[asyncio.Task[Any], tuple[int, int]] = {}  # from which host, to which port

    def lead_to(self, target: Target) -> None:
        """Where the ranks' connections lead from now on; those that lead elsewhere are closed."""
        self._target = target
        self._changed.set()
        self._changed = asyncio.Event()
        _cancel(task for task, to in self._leading.items() if to != target)

    def serve_store(self, port: int | None) -> None:
        """Where tunnels of other hosts lead from now on; those that lead elsewhere are closed."""
        self.store_port = port
        _cancel(task for task, (_, to) in self._served.items() if to != port)

    def close_from(self, host: int) -> None:
        """Close the tunnels that come from `host`."""
        _cancel(task for task, (source, _) in self._served.items() if source == host)

    async def accept(self, listener: socket.socket) -> NoReturn:
        """Take the ranks' connections, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor left: the rank waits in the listener's queue
                await asyncio.sleep(_RETRY_S)
                continue
            self._spawn(self._lead(near))

    async def serve(self, sock: socket.socket, host: int) -> None:
        """Carry what comes from `host` through `sock`, which is closed in the end."""
        task, port = asyncio.current_task(), self.store_port
        assert task is not None and port is not None, "nobody is let in before there is a store"
        self._served[task] = host, port
        try:
            await carry(sock, await connect_loopback(port))
        except OSError:
            return  # one end is gone: the rank sees its connection close
        finally:
            del self._served[task]
            sock.close()

    async def _lead(self, near: socket.socket) -> None:
        """One rank's connection: wait for a target, then carry."""
        task = asyncio.current_task()
        assert task is not None
        try:
            target, far = await self._lead_somewhere(near)
            if far is None:
                return
            self._leading[task] = target
            await carry(near, far)
        except OSError:
            return
        finally:
            self._leading.pop(task, None)
            near.close()

    async def _lead_somewhere(self, near: socket.socket) -> tuple[Target, socket.socket | None]:
        """A connection to the present target; None if the rank gives up before there is one."""
        while not has_closed(near):
            target, changed = self._target, self._changed
            if target is not None:
                try:
                    far = await (connect_loopback(target) if isinstance(target, int) else self._reach(target))
                except OSError:
                    far = None
                if far is not None:
                    if target == self._target:
                        return target, far
                    far.close()
                    continue
            try:
                async with asyncio.timeout(_RETRY_S):
                    await changed.wait()
            except TimeoutError:
                continue
        return None, None


async def carry(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes in both directions until both ends have closed; then close both sockets. Raises OSError."""
    ways = [asyncio.create_task(_pass_on(one, other)), asyncio.create_task(_pass_on(other, one))]
    try:
        await asyncio.gather(*ways)
    finally:
        _cancel(ways)
        await asyncio.wait(ways)
        one.close()
        other.close()


async def connect_loopback(port: int) -> socket.socket:
    """A connection to a port of the own loopback; OSError if nothing listens there."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (LOOPBACK, port))
    except BaseException:
        sock.close()
        raise
    return sock


def has_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed its direction, without reading what it has sent."""
    (state,) = struct.unpack("B", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
    return bool(state != _ESTABLISHED)


async def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(source, _PIECE_BYTES):
        await loop.sock_sendall(sink, piece)
    sink.shutdown(socket.SHUT_WR)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in list(tasks):
        task.cancel()
