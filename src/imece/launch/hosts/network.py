"""The links of one agent to those of the other hosts, in a thread of their own; what happens becomes events.

    with Network(token, 0, "imece", {}, silent_s=10.0) as network:
        port = network.listen("10.0.0.1", 29400)
        ...                                        # wait until network.wake is readable
        for event in network.events(): ...

A link ends when its peer closes it, sends something that is no message, or is silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

from imece.errors import UserError
from imece.launch.hosts import frames
from imece.launch.hosts.events import Event, Up
from imece.launch.hosts.links import Links
from imece.launch.hosts.tunnel import Target
from imece.store import listen, listen_here
from imece.system.addresses import Address, describe


class Network:
    """Leaving its block closes everything. By then the ranks of this host must have ended: others take the
    closed port for a sign of that.
    """

    def __init__(
        self,
        token: bytes,
        me: int,
        job: str,
        hello: dict[str, Any],
        *,
        silent_s: float,
    ) -> None:
        """me: this host's rank. hello: what a peer learns with its Up. A link that hears nothing for
        `silent_s` ends (0: never). UserError if loopback is down."""
        tunnel = listen_here()
        tunnel.setblocking(False)
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: list[asyncio.Task[None]] = []
        self._links = Links(token, me, job, hello, silent_s, self._emit, self._spawn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="imece-network", daemon=True)
        self.wake, self._waker = socket.socketpair()
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._listeners = [tunnel]
        self.tunnel_port: int = tunnel.getsockname()[1]
        """On this host's loopback, for its ranks; always open."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._spawn, self._links.beat())
        self._call(self._accept, self._links.tunnels.accept(self._listeners[0]))
        return self

    def __exit__(self, *_exception: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._call(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self.wake.close()
            self._waker.close()

    def events(self) -> list[Event]:
        """The events since the last call; never waits."""
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):  # before the events: one that comes in between wakes again
                pass
        if self._error is not None:
            raise self._error
        return [self._events.popleft() for _ in range(len(self._events))]

    def listen(self, address: str, port: int = 0) -> int:
        """Take links at `address` alone, at a free port for port 0; returns the port. Once, and
        before `dial`.

        UserError if that is impossible.
        """
        assert not self._links.port, "an agent has one port"
        try:
            listener = listen(address, port)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"cannot listen on {describe((address, port))} ({why}): choose another port, or an address "
                "of this host"
            ) from None
        listener.setblocking(False)
        self._listeners.append(listener)
        self._links.address, self._links.port = listener.getsockname()[:2]
        self._call(self._accept, self._links.door.accept(listener))
        return self._links.port

    def dial(self, host: int, address: Address, *, patience_s: float) -> None:
        """Make a link to `host`, in the background. Up or Down follows, Down after `patience_s` or when an
        agent there does not want this one. Replaces an earlier dial, unless its link is Up."""
        self._call(self._links.dial, host, address, patience_s)

    def send(self, link: Up, message: dict[str, Any]) -> None:
        """Send JSON of at most 1 MiB, in order; lost if the link has ended. ValueError if it is too long."""
        self._call(self._links.send, link, frames.pack(message))

    def drop(self, link: Up) -> None:
        """Close the link after what was sent; from now on only its earlier events come."""
        self._call(self._links.drop, link)

    def serve_store(self, port: int | None) -> None:
        """Lead tunnels of hosts that are Up to this port of the own loopback; None: they wait."""
        self._call(self._links.tunnels.serve_store, port)

    def lead_to(self, target: Target) -> None:
        """Where `tunnel_port` leads from now on: to an own loopback port, to the store of the agent at an
        address, or nowhere yet (connections wait). Connections that lead elsewhere are closed."""
        self._call(self._links.tunnels.lead_to, target)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the loop. `events` raises its unexpected errors."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _accept(self, work: Coroutine[Any, Any, None]) -> None:
        self._accepting.append(self._spawn(work))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            self._waker.send(b"\0")

    async def _close(self) -> None:
        """End everything; the port first, so that the end of links is a sign."""
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        for listener in self._listeners:
            listener.close()
        await self._links.close()
        left = self._tasks - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
