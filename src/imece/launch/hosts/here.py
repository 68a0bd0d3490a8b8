"""What an agent has whatever its role, and the roles that it can turn to.

seeks     it has no ranks, and looks for the agent that leads the job (seeker.py)
follows   its ranks do what the coordinator's messages say (follower.py)
leads     it is the coordinator, or host 0 that waits until all have come (coordinator.py)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from imece.launch.endings import Ending, Outcome
from imece.launch.generations import Limits
from imece.launch.host import Host
from imece.launch.hosts.events import Up
from imece.launch.hosts.network import Network
from imece.launch.hosts.succession import Standing
from imece.launch.hosts.wide_view import WideView
from imece.launch.hosts.words import Report, Seen, of_report
from imece.membership.roster import Generation
from imece.system.addresses import Address

_ELECTION_S = 5.0  # beyond what it takes to notice a silent host


@dataclass(frozen=True)
class Plan:
    """What one agent among several should do."""

    hosts: int
    me: int
    rendezvous: Address
    limits: Limits
    """For all hosts together."""
    grace_s: float
    silent_s: float
    """A host that says nothing for so long is silent."""
    patience_s: float = 600.0
    """How long to look for others."""

    @property
    def election_s(self) -> float:
        """How long a host waits until another leads, or until it leads itself."""
        return 2 * self.silent_s + _ELECTION_S

    @property
    def ranks(self) -> int:
        """Ranks on each host."""
        return self.limits.ranks // self.hosts


@dataclass(frozen=True)
class Seek:
    """Look for the agent that leads."""

    why: str = ""
    """How this host was cut off, in words; "" if it had no part in the job yet, or has said so."""


@dataclass(frozen=True)
class Follow:
    """Do what `leader` says, whose first message is `view`."""

    leader: int
    view: dict[str, Any]


@dataclass(frozen=True)
class Lead:
    """Lead the job: a new one, or in place of a lost coordinator (`why`, in words)."""

    votes: dict[int, Report] = field(default_factory=dict)
    """Reports of the hosts that will follow."""
    why: str = ""


Turn = Seek | Follow | Lead


class Role(Protocol):
    """What an agent does when something happens."""

    def up(self, host: int) -> None: ...
    def said(self, host: int, message: dict[str, Any]) -> None: ...
    def down(self, host: int, why: str, surely: bool, told: bool) -> None: ...
    def ended(self, endings: Mapping[int, Ending], now: float) -> None: ...
    def signalled(self, number: int) -> None: ...
    def next_time(self) -> float: ...
    def on_time(self, now: float) -> None: ...


class Here:
    """This agent: its host, its links, and what it knows."""

    def __init__(self, plan: Plan, host: Host, network: Network) -> None:
        self.plan, self.host, self.network = plan, host, network
        self.up: dict[int, Up] = {}
        """Hosts to which there is a link."""
        self.whys: dict[int, str] = {}
        """How the last link to a host has ended, in words."""
        self.dead: set[int] = set()
        """Hosts whose agents are surely gone."""
        self.book: dict[int, Address] = {0: plan.rendezvous}
        """Where agents were last heard to listen."""
        self.standing: Standing | None = None
        """What is known about who may go on; None if this host has no part in the job."""
        self.snapshot: dict[str, Any] | None = None
        """What the coordinator last said about the job's generations."""
        self.newest = Generation(-1, ())
        """The newest generation that was published on this host."""
        self.run = ""
        """Names the job for its ranks."""
        self.was_cut_off = False
        """Whether it had a part in the job, and has not come back yet."""
        self.asked_to_go: int | None = None
        """The signal by which this host was asked to leave, or to end the job, if any."""
        self.view: WideView | None = None
        """For another thread that watches, while this host leads."""
        self.turn: Turn | None = None
        """The role to turn to."""
        self.outcome: Outcome | None = None
        """Set once all is over for this agent."""

    @property
    def me(self) -> int:
        return self.plan.me

    def send(self, host: int, message: dict[str, Any]) -> None:
        """Send to the agent of another host, if there is a link."""
        if host in self.up:
            self.network.send(self.up[host], message)

    def drop(self, host: int, why: str) -> None:
        """Close the link to a host, if there is one; the role is not told of its end."""
        if host in self.up:
            self.network.drop(self.up.pop(host))
            self.whys[host] = why

    def hit(self, host: int, member: int, number: int) -> None:
        """Send a signal to a member of any host."""
        if host == self.me:
            self.host.hit(member, number)
        else:
            self.send(host, {"do": "hit", "member": member, "signal": number})

    def say(self, line: str) -> None:
        """Print a line for people on this host."""
        self.host.say(f"imece: {line}")

    def seen(self) -> dict[int, Seen]:
        """The state of the members that live here."""
        host, found = self.host, {}
        living = dict(host.crew.living)
        beats, ready = host.beats(living), host.ready(living)
        closed, newest = host.closed(living), self.newest.number
        lost = host.lost(living, newest)
        for member, process in living.items():
            count, steps = beats.get(member, (None, 0))
            found[member] = Seen(
                process.slot, host.pid_of(member), count, steps, member in ready,
                host.all_resilient([member]), tuple(host.went_on(member)), member in closed,
                newest if member in lost else -1,
            )  # fmt: skip
        return found

    def report(self) -> Report:
        """Everything that a new leader must know."""
        endings = {member: self.host.endings[member] for member in self.host.crew.ended}
        return Report(self.seen(), endings, self.newest)

    def said_report(self) -> dict[str, Any]:
        """The same as JSON."""
        return of_report(self.report(), time.monotonic())

    def how_lost(self, host: int, why: str, surely: bool) -> str:
        """How a host was lost, in words."""
        name = self.name(host)
        return f"{name} is gone: its launcher has ended" if surely else f"{name} was lost: {why}"

    def name(self, host: int) -> str:
        """A host with its address, if that is known."""
        return f"host {host} ({self.book[host][0]})" if host in self.book else f"host {host}"

    def side(self) -> set[int]:
        """This host and those it has a link to, among the hosts that count."""
        assert self.standing is not None
        return {self.me, *(self.standing.newest.hosts & self.up.keys())}

    def seek(self, side: set[int]) -> Seek:
        """What is left to do for a side that may not go on."""
        assert self.standing is not None
        return Seek(self.standing.cut_off(side, self.dead, self.whys))

    def note_book(self, said: Sequence[Any]) -> None:
        """Note where agents listen. TypeError or ValueError if it is no such list.

        Host 0 is where the rendezvous is: if that is a name, it may have another address when it comes back.
        """
        for host, address, port in said:
            if int(port) and int(host):
                self.book[int(host)] = str(address), int(port)

    def said_book(self) -> list[list[Any]]:
        """The same as JSON."""
        return [[host, *address] for host, address in self.book.items()]
