"""Networks on this host's loopback, and strangers that connect to them."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from imece.launch.hosts.events import Down, Event, Said, Up
from imece.launch.hosts.network import Network
from imece.system.addresses import Address
from imece.world import LOOPBACK

TOKEN = b"a token for these tests, and no other"
LIMIT_S = 60.0  # for what takes milliseconds on an idle machine
Kind = TypeVar("Kind")


class Probing(Network):
    """One that can be asked what is at an address."""

    def probe(self, address: Address, within_s: float) -> str:
        """Whether an agent is "there"; "refused": the machine says that nothing listens; or "silent"."""
        probing = self._links.probe(address, within_s)
        return asyncio.run_coroutine_threadsafe(probing, self._loop).result()[0]


class Agent(Probing):
    """A network that listens on loopback, and can be asked for one event after the other."""

    def __init__(
        self, me: int, token: bytes = TOKEN, job: str = "job", *, port: int = 0, **more: Any
    ) -> None:
        super().__init__(token, me, job, **{"hello": {}, "silent_s": 60.0, **more})
        self.me, self.seen = me, list[Event]()
        self.links: dict[int, Up] = {}  # the last one to each host
        self.address = LOOPBACK, port

    def __enter__(self) -> Agent:
        super().__enter__()
        self.address = LOOPBACK, self.listen(*self.address)
        return self

    def next(self, kind: type[Kind], within_s: float = LIMIT_S) -> Kind:
        """The next event, which has to be of that kind."""
        deadline = time.monotonic() + within_s
        while not self.seen:
            assert time.monotonic() < deadline, f"no {kind.__name__} within {within_s} s"
            select.select([self.wake], [], [], 0.2)
            self.seen += self.events()
        event = self.seen.pop(0)
        assert isinstance(event, kind), f"{event} and not {kind.__name__}"
        if isinstance(event, Up):
            self.links[event.host] = event
        return event

    def tell(self, host: int, message: dict[str, Any]) -> None:
        """Send it on the last link to that host."""
        self.send(self.links[host], message)

    def hears(self, host: int) -> dict[str, Any]:
        """What that host says next, on its last link."""
        said = self.next(Said)
        assert (said.host, said.link) == (host, self.links[host].link)
        return said.message

    def loses(self, host: int, why: str, surely: bool, told: bool = False) -> None:
        """The next event is the end of the last link to that host, or of a dial if there was none."""
        link = self.links[host].link if host in self.links else None
        assert self.next(Down) == Down(host, link, why, surely, told)

    def is_calm(self, for_s: float = 0.05) -> bool:
        """Whether nothing happens for so long."""
        select.select([self.wake], [], [], for_s)
        self.seen += self.events()
        return not self.seen


@contextmanager
def agents(*hosts: int, **more: Any) -> Iterator[list[Agent]]:
    """One for each host; none has a link yet."""
    with ExitStack() as stack:
        yield [stack.enter_context(Agent(host, **more)) for host in hosts]


def knock(agent: Agent) -> socket.socket:
    """A stranger's connection."""
    return socket.create_connection(agent.address, timeout=LIMIT_S)


def all_that_comes(sock: socket.socket) -> bytes:
    """Up to the end of the connection."""
    data = b""
    try:
        while piece := sock.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next bytes that come; fewer at the end of the connection."""
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def is_open(sock: socket.socket) -> bool:
    """Whether the other end has neither closed the connection nor sent anything."""
    return not select.select([sock], [], [], 0)[0]
