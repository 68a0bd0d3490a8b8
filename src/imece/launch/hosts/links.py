"""The links to other hosts' agents: made, used, and ended, all in the loop's thread.

A link ends when its peer closes it, sends something that is no message, or is silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from imece.launch.hosts import frames
from imece.launch.hosts.door import Door
from imece.launch.hosts.events import Down, Event, Said, Up
from imece.launch.hosts.link import Link
from imece.launch.hosts.reach import VERSION, Hello, Purpose, Unreached, reach
from imece.launch.hosts.tunnel import Tunnels
from imece.launch.silence import Silence
from imece.system.addresses import Address, describe, interface_of

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 0.5
_PROBE_S = 1.0
_CLOSE_S = 1.0  # for the last messages to arrive
_CROSSING_S = 5.0
Probed = tuple[Literal["there", "refused", "silent"], str | None]
"""What was found at an address, and the name of its process if it says so."""


class Links:
    """All links of one agent, and its tunnels to others and from them."""

    def __init__(
        self,
        token: bytes,
        me: int,
        job: str,
        hello: dict[str, Any],
        silent_s: float,
        emit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """spawn: runs what may take long, and ends it when all is closed."""
        self.agent = secrets.token_hex(8)
        self.address, self.port = "", 0
        """Where this agent listens."""
        self.tunnels = Tunnels(self._reach_store, spawn)
        self.door = Door(token, self._incoming, emit, spawn)
        self._me, self._job, self._said_first = me, job, hello
        self._token, self._emit, self._spawn = token, emit, spawn
        self._silence = Silence(silent_s)
        self._beat_s = 0.0  # when this process last said that it lives
        self._stopped_s = 0.0  # for how long it did not run, before the last beat
        self._up: dict[int, Link] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._speaking: set[int] = set()  # hosts that a dial of ours has reached
        self._checked: set[int] = set()

    def _hello(self, purpose: Purpose) -> Hello:
        return Hello(purpose, VERSION, self._job, self._me, self.agent, self.port, self._said_first)

    def dial(self, host: int, address: Address, patience_s: float) -> None:
        """Make a link in the background, in place of an earlier dial."""
        self._end_dial(host)
        if host not in self._up:
            self._dials[host] = self._spawn(self._dial(host, address, patience_s))

    def _end_dial(self, host: int) -> None:
        if host in self._dials:
            self._dials.pop(host).cancel()

    async def _dial(self, host: int, address: Address, patience_s: float) -> None:
        """Try until there is a link; if this dial made it, this task serves the link from then on."""
        now = asyncio.get_running_loop().time
        deadline, wait_s = now() + patience_s, _FIRST_RETRY_S
        tries: dict[str, float] = {}  # by answer: until when to try on
        while host not in self._up:
            try:
                sock, peer = await self._reach_host(host, address)
            except Unreached as failure:
                until = deadline
                if failure.again_s is not None:
                    until = min(until, tries.setdefault(str(failure), now() + failure.again_s))
                if host not in self._up and now() + wait_s > until:
                    self._dials.pop(host)
                    self._emit(Down(host, None, str(failure), False, failure.told))
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_RETRY_S)
            else:
                self._dials.pop(host)
                await self._run(Link(sock, host, address, peer.agent), peer)
                return
        self._dials.pop(host)

    async def _reach_host(self, host: int, address: Address) -> tuple[socket.socket, Hello]:
        """Raises Unreached, also if that host comes in meanwhile."""

        def speak() -> None:
            if host in self._up:
                raise Unreached(f"host {host} is here already")
            self._speaking.add(host)

        try:
            sock, peer = await reach(address, self._token, self._hello("link"), speak)
        finally:
            self._speaking.discard(host)
        if peer.host != host:
            sock.close()
            why = f"host {peer.host} answers at {describe(address)}, not host {host}"
            raise Unreached(why, told=True, again_s=0.0)
        return sock, peer

    async def _incoming(self, sock: socket.socket, address: str, peer: Hello) -> None:
        """Somebody has proved that it knows the token; the door closes `sock` after this."""
        why_not = self._why_not(peer)
        if why_not is not None:
            await self.door.refuse(sock, address, *why_not)
        elif peer.purpose == "link":
            link = Link(sock, peer.host, (address, peer.port), peer.agent)
            link.send(frames.pack(self._hello("link").message()))
            await self._run(link, peer)
        else:
            await self.door.answer(sock, self._hello(peer.purpose).message())
            if peer.purpose == "tunnel":
                await self.tunnels.serve(sock, peer.host)

    def _why_not(self, peer: Hello) -> tuple[str, float] | None:
        """Why not to let it in, and for how long it may try again; None if it may come in."""
        if peer.version != VERSION:
            return f"host {self._me} runs imece {VERSION}, the other side {peer.version}", 0.0
        if peer.job != self._job:
            return f"this port belongs to the job {self._job!r}, not to {peer.job!r}", 0.0
        if peer.purpose == "probe":
            return None
        if peer.purpose == "tunnel":
            if self.tunnels.store_port is not None and peer.host in self._up:
                return None
            return f"host {self._me} serves no store to host {peer.host} yet", _CROSSING_S
        if peer.host == self._me:
            return f"host {peer.host} is the one that listens here: two have the same host rank", 0.0
        if peer.host in self._up:
            self._doubt(self._up[peer.host])
            return f"host {peer.host} is here already", 1.5 * self._silence.limit_s
        if peer.host in self._speaking and peer.host > self._me:
            # Each has told the other who it is: the lower one's connection counts, and both see it so.
            return f"host {self._me} is about to reach host {peer.host}", _CROSSING_S
        return None

    def _doubt(self, link: Link) -> None:
        """Another process claims to be this host: it may have been started again before its end
        was noticed."""
        if link.number not in self._checked:
            self._checked.add(link.number)
            self._spawn(self._end_if_gone(link))

    async def _end_if_gone(self, link: Link) -> None:
        if await self._is_gone(link):
            link.end("its agent has been started again", surely=True)
        self._checked.discard(link.number)

    async def _run(self, link: Link, peer: Hello) -> None:
        """Serve a link, from Up to Down."""
        host = link.host
        if host in self._up:  # the peer has seen that one end, or it would not have taken another
            self._up[host].end("it made another connection", surely=False)
            self._tell_end(self._up[host])
        self._up[host] = link
        self._emit(Up(host, link.number, link.address, peer.hello))
        why = await link.run(lambda message: self._said(link, message))
        if link.end_said is None and self._up.get(host) is link:
            link.end(why, surely=await self._is_gone(link))
        if self._up.get(host) is link:
            self._tell_end(link)

    def _tell_end(self, link: Link) -> None:
        assert link.end_said is not None
        why, surely = link.end_said
        # Before its next beat, or right after that: its peers may have ended the link meanwhile.
        stopped_s = max(asyncio.get_running_loop().time() - self._beat_s, self._stopped_s)
        if self._is_long(stopped_s):
            why += f"; this launcher had not run for {stopped_s:.0f} s: was it, or its machine, stopped?"
        if self.address and interface_of(self.address) is None:
            why += f"; this host has lost its address {self.address}, where the others look for it"
        self._forget(link)
        self._emit(Down(link.host, link.number, why, surely))

    def _forget(self, link: Link) -> None:
        del self._up[link.host]
        self.tunnels.close_from(link.host)

    def _said(self, link: Link, message: dict[str, Any]) -> None:
        if self._up.get(link.host) is link:
            self._emit(Said(link.host, link.number, message))

    async def _is_gone(self, link: Link) -> bool:
        """Whether the process at the other end is surely gone: its port has another owner now, or none.

        Not if one of the two may not have heard the other for long, as when this process was stopped: before
        it ended, the other may have gone on without this host, together with others that still do.
        """
        now = asyncio.get_running_loop().time()
        if self._is_long(now - min(self._beat_s, link.heard_s)) or now < link.doubted_until:
            return False
        if not link.address[1]:
            return False
        answer, agent = await self.probe(link.address, _PROBE_S)
        return answer == "refused" or (answer == "there" and agent not in (None, link.agent))

    async def probe(self, address: Address, within_s: float) -> Probed:
        """What is there, and the agent's name if it says so. A process that is just ending accepts
        connections until its port is closed; so one that does not answer is asked again."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        sock, peer = await reach(address, self._token, self._hello("probe"))
                        sock.close()
                        return "there", peer.agent
                    except Unreached as error:
                        if error.refused or error.told:
                            return "refused" if error.refused else "there", None
                    await asyncio.sleep(_FIRST_RETRY_S)
        except TimeoutError:
            return "silent", None

    async def _reach_store(self, address: Address) -> socket.socket:
        sock, _ = await reach(address, self._token, self._hello("tunnel"))
        return sock

    def send(self, up: Up, frame: bytes) -> None:
        link = self._link_of(up)
        if link is not None:
            link.send(frame)

    def drop(self, up: Up) -> None:
        """End a link once all is sent; from now on there are no events of it."""
        link = self._link_of(up)
        if link is not None:
            self._drop(link, lives_on=True)

    def _link_of(self, up: Up) -> Link | None:
        """None if it has ended; the host may have a newer one."""
        link = self._up.get(up.host)
        return link if link is not None and link.number == up.link else None

    def _drop(self, link: Link, lives_on: bool) -> None:
        self._forget(link)
        link.finish(lives_on=lives_on)
        asyncio.get_running_loop().call_later(_CLOSE_S, link.end, "dropped", False)

    def _is_long(self, silent_s: float) -> bool:
        """Whether a peer may find this process silent, or the other way round."""
        return 0 < self._silence.limit_s / 2 < silent_s

    async def beat(self) -> None:
        """Tell all that this process lives, and notice who does not."""
        now = asyncio.get_running_loop().time
        self._beat_s = now()
        while True:
            await asyncio.sleep(self._silence.interval_s)
            self._stopped_s, self._beat_s = now() - self._beat_s, now()
            stopped = self._is_long(self._stopped_s)
            for link in self._up.values():
                if stopped or self._is_long(now() - link.heard_s):
                    # What has come meanwhile is about to be read, perhaps including the link's end.
                    link.doubted_until = now() + self._silence.limit_s / 2
            for link in self._up.values():
                link.send(frames.HEARTBEAT)
            links = {link.number: link for link in self._up.values()}
            beats = {number: link.heard for number, link in links.items()}
            for number in self._silence.look(beats, now()):
                links[number].end(f"it was silent for {self._silence.limit_s:g} s", surely=False)

    async def close(self) -> None:
        """Send what waits, and end all links and dials."""
        links = list(self._up.values())
        for host in list(self._dials):
            self._end_dial(host)
        for link in links:
            self._drop(link, lives_on=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                for link in links:
                    await link.ended.wait()
