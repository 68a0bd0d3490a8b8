"""The links of one agent to those of the other hosts, in a thread of their own; what happens are events.

    with Network(token, me=0, job="imece", silent_s=10.0) as network:
        port = network.listen("10.0.0.1", 29400)
        ...                                        # wait until network.wake is readable
        for event in network.events(): ...

A link ends when its peer closes it, says what is no message, or is silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self

from imece.errors import UserError
from imece.launch.hosts import frames
from imece.launch.hosts.addresses import Address, describe
from imece.launch.hosts.door import Door
from imece.launch.hosts.events import Down, Event, Said, Up
from imece.launch.hosts.link import Link
from imece.launch.hosts.reach import VERSION, Hello, Purpose, Unreached, reach
from imece.launch.hosts.tunnel import Target, Tunnels
from imece.launch.silence import Silence
from imece.world import LOOPBACK

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 0.5
_PROBE_S = 1.0
_CLOSE_S = 1.0  # for what was sent last to arrive
_CROSSING_S = 5.0


class Network:
    """Leaving its block closes all, so the ranks of this host must have ended by then: others take the
    closed port for a sign of that.
    """

    def __init__(self, token: bytes, me: int, job: str, *, silent_s: float, handshake_s: float = 5.0) -> None:
        """`me`: this host's rank. A link that hears nothing for `silent_s` ends (0: never); a stranger has
        `handshake_s` to prove who he is."""
        self.me, self.job = me, job
        self.agent = secrets.token_hex(8)
        """Names this process among those that were this host's agent."""
        self.hello: dict[str, Any] = {}
        """What a peer gets to know with its Up; may be replaced at any time."""
        self._token, self._handshake_s = token, handshake_s
        self._silence = Silence(silent_s)
        self._port = 0
        self._links: dict[int, Link] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._speaking: set[int] = set()  # those whom a dial of ours has reached
        self._doubted: set[int] = set()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: list[asyncio.Task[None]] = []
        self._tunnels = Tunnels(self._reach_store, self._spawn)
        self._door = Door(token, handshake_s, self._incoming, self._emit, self._spawn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="imece-network", daemon=True)
        self.wake, self._waker = socket.socketpair()
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._listeners = [_bound(LOOPBACK, 0)]
        self.tunnel_port: int = self._listeners[0].getsockname()[1]
        """On this host's loopback, for its ranks; always open."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._spawn, self._beat())
        self._call(self._accept, self._tunnels.accept(self._listeners[0]))
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
        """What has happened since the last call; never waits."""
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):  # before the events: one that comes in between wakes again
                pass
        if self._error is not None:
            raise self._error
        events = []
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._events.popleft())
        return events

    def listen(self, address: str, port: int = 0) -> int:
        """Take links at `address` alone, at a free port for port 0; the port. Once, and before `dial`.

        Raises UserError if that cannot be.
        """
        assert not self._port, "an agent has one port"
        try:
            listener = _bound(address, port)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"cannot listen on {describe((address, port))} ({why}): choose another port, or an address "
                "of this host"
            ) from None
        self._listeners.append(listener)
        self._port = int(listener.getsockname()[1])
        self._call(self._accept, self._door.accept(listener))
        return self._port

    def dial(self, host: int, address: Address, *, patience_s: float) -> None:
        """Make a link to `host`, in the background. Up or Down follows, the latter after `patience_s` or when
        an agent there does not want this one. Takes the place of an earlier dial; not if it is Up."""
        self._call(self._start_dial, host, address, patience_s)

    def send(self, host: int, message: dict[str, Any]) -> None:
        """Send JSON of at most 64 KiB, in order; dropped if there is no link. Raises ValueError if it is too
        long."""
        self._call(self._send, host, frames.pack(message))

    def drop(self, host: int) -> None:
        """Close the link after what was sent, and end a dial; no event of it comes from now on but those that
        are there already."""
        self._call(self._drop, host)

    def probe(self, address: Address, within_s: float) -> Literal["there", "refused", "silent"]:
        """Whether an agent listens there; refused: the machine says that nothing does. Waits for it."""
        probing = self._probe(address, within_s)
        return asyncio.run_coroutine_threadsafe(probing, self._loop).result()[0]

    def serve_store(self, port: int | None) -> None:
        """Tunnels of hosts that are Up lead to this port of the own loopback; None: they wait."""
        self._call(self._tunnels.serve_store, port)

    def lead_to(self, target: Target) -> None:
        """Where `tunnel_port` leads from now on: to an own loopback port, to the store of the agent at an
        address, or nowhere yet (connections wait). Connections that lead elsewhere are closed."""
        self._call(self._tunnels.lead_to, target)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the loop. An error that it does not expect is raised by `events`."""
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

    def _hello(self, purpose: Purpose) -> Hello:
        return Hello(purpose, VERSION, self.job, self.me, self.agent, self._port, self.hello)

    def _start_dial(self, host: int, address: Address, patience_s: float) -> None:
        self._end_dial(host)
        if host not in self._links:
            self._dials[host] = self._spawn(self._dial(host, address, patience_s))

    def _end_dial(self, host: int) -> None:
        if host in self._dials:
            self._dials.pop(host).cancel()

    async def _dial(self, host: int, address: Address, patience_s: float) -> None:
        """Try until it works; then this task is the link's."""
        task, now = asyncio.current_task(), self._loop.time
        deadline, wait_s = now() + patience_s, _FIRST_RETRY_S
        tries: dict[str, float] = {}  # until when to try on, by what was said
        while True:
            try:
                sock, peer = await reach(
                    address, self._token, self._hello("link"), self._handshake_s,
                    connected=lambda: self._speaking.add(host),
                )  # fmt: skip
                if peer.host == host:
                    break
                sock.close()
                why = f"host {peer.host} answers at {describe(address)}, not host {host}"
                failure = Unreached(why, told=True, again_s=0.0)
            except Unreached as error:
                failure = error
            finally:
                self._speaking.discard(host)
            until = deadline
            if failure.again_s is not None:
                until = min(until, tries.setdefault(str(failure), now() + failure.again_s))
            if now() + wait_s > until:
                if self._dials.get(host) is task:
                    del self._dials[host]
                self._emit(Down(host, str(failure), failure.refused, failure.told))
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_RETRY_S)
        del self._dials[host]
        await self._run(Link(sock, host, address, peer.agent), peer)

    async def _incoming(self, sock: socket.socket, address: str, peer: Hello) -> None:
        """Whoever has proved that it knows the token; `sock` is ours to close."""
        why_not = self._why_not(peer)
        if why_not is not None:
            await self._door.refuse(sock, address, *why_not)
        elif peer.purpose == "link":
            self._end_dial(peer.host)  # this is as good
            link = Link(sock, peer.host, (address, peer.port), peer.agent)
            link.send(frames.pack(self._hello("link").message()))
            await self._run(link, peer)
        else:
            await self._door.answer(sock, self._hello(peer.purpose).message())
            if peer.purpose == "tunnel":
                await self._tunnels.serve(sock, peer.host)
            sock.close()

    def _why_not(self, peer: Hello) -> tuple[str, float] | None:
        """Why not to let it in, and for how long it may try again; None if it may come in."""
        if peer.version != VERSION:
            return f"host {self.me} runs imece {VERSION}, the other side {peer.version}", 0.0
        if peer.job != self.job:
            return f"this port belongs to the job {self.job!r}, not to {peer.job!r}", 0.0
        if peer.purpose == "probe":
            return None
        if peer.purpose == "tunnel":
            waits = self._tunnels.store_port is None or peer.host not in self._links
            return (f"host {self.me} serves no store to host {peer.host} yet", _CROSSING_S) if waits else None
        if peer.host == self.me:
            return f"host {peer.host} is the one that listens here: two have the same host rank", 0.0
        if peer.host in self._links:
            self._doubt(self._links[peer.host])
            return f"host {peer.host} is here already", 1.5 * self._silence.limit_s
        if peer.host in self._speaking and peer.host > self.me:
            # Each dials the other: the lower one's connection is it, and both see it the same way.
            return f"host {self.me} is about to reach host {peer.host}", _CROSSING_S
        return None

    def _doubt(self, link: Link) -> None:
        """Another claims to be this host: it may have been started again before its end was noticed."""
        if link.number not in self._doubted:
            self._doubted.add(link.number)
            self._spawn(self._end_if_gone(link))

    async def _end_if_gone(self, link: Link) -> None:
        if await self._is_gone(link):
            link.end("its agent has been started again", surely=True)
        self._doubted.discard(link.number)

    async def _run(self, link: Link, peer: Hello) -> None:
        """From Up to Down."""
        host = link.host
        self._links[host] = link
        self._emit(Up(host, link.address, peer.hello, link.agent))
        why = await link.run(lambda message: self._said(link, message))
        if link.end_said is None and self._links.get(host) is link:
            link.end(why, surely=await self._is_gone(link))
        if self._links.get(host) is link:
            assert link.end_said is not None
            del self._links[host]
            self._tunnels.close_from(host)
            self._emit(Down(host, *link.end_said))

    def _said(self, link: Link, message: dict[str, Any]) -> None:
        if self._links.get(link.host) is link:
            self._emit(Said(link.host, message))

    async def _is_gone(self, link: Link) -> bool:
        """Whether the process at the other end surely is: its port has another owner now, or none."""
        if not link.address[1]:
            return False
        answer, agent = await self._probe(link.address, _PROBE_S)
        return answer == "refused" or (answer == "there" and agent not in (None, link.agent))

    async def _probe(
        self, address: Address, within_s: float
    ) -> tuple[Literal["there", "refused", "silent"], str | None]:
        """What there is, and the agent's name if it says so. A process that is just ending takes connections
        until its port is closed; so one that does not answer is asked again."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        sock, peer = await reach(
                            address, self._token, self._hello("probe"), self._handshake_s
                        )
                        sock.close()
                        return "there", peer.agent
                    except Unreached as error:
                        if error.refused or error.told:
                            return "refused" if error.refused else "there", None
                    await asyncio.sleep(_FIRST_RETRY_S)
        except TimeoutError:
            return "silent", None

    async def _reach_store(self, address: Address) -> socket.socket:
        sock, _ = await reach(address, self._token, self._hello("tunnel"), self._handshake_s)
        return sock

    def _send(self, host: int, frame: bytes) -> None:
        link = self._links.get(host)
        if link is not None and not link.send(frame):
            link.end("it takes nothing from its connection", surely=False)

    def _drop(self, host: int) -> None:
        self._end_dial(host)
        link = self._links.pop(host, None)
        if link is not None:
            self._tunnels.close_from(host)
            link.finish()
            self._loop.call_later(_CLOSE_S, link.end, "dropped", False)

    async def _beat(self) -> None:
        """Say to all that this process lives, and notice who does not."""
        while True:
            await asyncio.sleep(self._silence.interval_s)
            for host in list(self._links):
                self._send(host, frames.HEARTBEAT)
            links = {link.number: link for link in self._links.values()}
            beats = {number: link.heard for number, link in links.items()}
            for number in self._silence.look(beats, self._loop.time()):
                links[number].end(f"it was silent for {self._silence.limit_s:g} s", surely=False)

    async def _close(self) -> None:
        """Send what waits, and end everything; the port first, so that links that end are a sign."""
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        for listener in self._listeners:
            listener.close()
        links = list(self._links.values())
        for host in [*self._dials, *self._links]:
            self._drop(host)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                for link in links:
                    await link.ended.wait()
        left = self._tasks - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


def _bound(address: str, port: int) -> socket.socket:
    """A socket that listens there; OSError if it cannot."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Closed connections of an earlier agent at this port must not keep a later one from it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
