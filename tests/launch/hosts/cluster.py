"""Agents of several hosts and their messages, without processes, sockets or waiting."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from imece.launch.endings import Ending
from imece.launch.generations import Limits
from imece.launch.host import Start
from imece.launch.hosts.agent import Agent
from imece.launch.hosts.coordinator import Coordinator
from imece.launch.hosts.events import Down, Event, Said, Up
from imece.launch.hosts.here import Here, Plan
from imece.membership.roster import Generation
from tests.clock import Clock

RANKS = 2


@dataclass
class Process:
    """A rank that does nothing."""

    slot: int
    pid: int


class FakeHost:
    """Ranks that live until they are told to end, or are killed by a test."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.crew = SimpleNamespace(living={}, ended={})
        self.endings: dict[int, Ending] = {}
        self.news: dict[int, Ending] = {}
        self.published: list[Generation] = []
        self.last: list[int] = []  # generations that were said to be the last
        self.said: list[str] = []
        self.ended_by: list[int] = []
        self.graces_s: list[float] = []
        self.obstinate = False  # its ranks end by SIGKILL alone
        self.lost_in: dict[int, int] = {}  # members that cannot reach others, and in which generation
        self.told: set[int] = set()  # members that have said that they are closed
        self.resilient = True
        self.unsaid: set[int] = set()  # members that have not come to say that they are resilient
        self.meeting_port = 1000 + number

    def start(self, starts: Sequence[Start]) -> None:
        for each in starts:
            self.crew.living[each.member] = Process(each.slot, 100 + each.member)
            self.starts = each.starts

    def publish(self, generation: Generation) -> None:
        self.published.append(generation)

    def publish_last(self, generation: int) -> None:
        self.last.append(generation)

    def say_finished(self, ranks: Collection[int], starts: int) -> None: ...

    def dies(self, member: int, status: int = -9, by_us: bool = False) -> None:
        process = self.crew.ended[member] = self.crew.living.pop(member)
        ending = Ending(process.slot, process.pid, status, 0.0, None, False, by_us, None, self.number)
        self.endings[member] = self.news[member] = ending

    def end(self, members: Collection[int], number: int, grace_s: float) -> None:
        for member in members:
            if number and member in self.crew.living:
                self.ended_by.append(number)
                self.graces_s.append(grace_s)
                if not self.obstinate:
                    self.dies(member, -number, by_us=True)

    def leaves(self) -> None:
        """As ranks do that see that they are asked to."""
        for member in self.published[-1].leaving:
            if member in self.crew.living:
                self.dies(member, 0)

    def closes(self) -> None:
        """As ranks that leave do first of all: they say so."""
        self.told |= self.crew.living.keys() & set(self.published[-1].leaving)

    def kill(self, members: Collection[int]) -> None: ...
    def ask_for_stacks(self) -> None: ...

    def forget(self, members: Collection[int]) -> None:
        for member in members:
            self.crew.ended.pop(member, None)

    def begin_anew(self) -> None:
        self.crew.ended.clear()

    def say(self, line: str) -> None:
        self.said.append(line)

    def all_resilient(self, members: Collection[int]) -> bool:
        return self.resilient and bool(members) and not self.unsaid & set(members)

    def ready(self, members: Iterable[int]) -> list[int]:
        return list(members)

    def closed(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if member in self.told]

    def lost(self, members: Iterable[int], generation: int) -> list[int]:
        return [member for member in members if self.lost_in.get(member) == generation]

    def beats(self, members: Iterable[int]) -> dict[int, tuple[int, int]]:
        return {}

    def pid_of(self, member: int) -> int:
        pid: int = self.crew.living[member].pid
        return pid

    def name(self, member: int, slot: int) -> str:
        return f"rank {slot}"

    def went_on(self, member: int) -> list[tuple[int, float, int]]:
        return [(self.published[-1].number, 5.0, 0)] if self.published else []

    def hit(self, member: int, number: int) -> bool:
        self.dies(member, -number)
        return True


class FakeNetwork:
    """One agent's links in a cluster."""

    def __init__(self, cluster: Cluster, me: int) -> None:
        self._cluster, self._me = cluster, me
        self.store: int | None = None
        self.leads_to: object = None
        self.dialled: dict[int, tuple[str, int]] = {}  # where, the last time

    def send(self, link: Up, message: dict[str, Any]) -> None:
        if self._cluster.links.get(frozenset((self._me, link.host))) == link.link:
            said = Said(self._me, link.link, json.loads(json.dumps(message)))
            self._cluster.events[link.host].append(said)

    def dial(self, host: int, address: tuple[str, int], *, patience_s: float) -> None:
        self._cluster.wanted.add((self._me, host))
        self.dialled[host] = address

    def drop(self, link: Up) -> None:
        if self._cluster.links.get(frozenset((self._me, link.host))) == link.link:
            self._cluster.unlink(self._me, link.host, told=(link.host,))

    def serve_store(self, port: int | None) -> None:
        self.store = port

    def lead_to(self, target: object) -> None:
        self.leads_to = target


class Cluster:
    """Agents of some hosts, whose events are handled one after another."""

    def __init__(self, hosts: int, clock: Clock, apart: bool = False, **limits: Any) -> None:
        self.count, self.limits = hosts, Limits(hosts * RANKS, **limits)
        self._clock = clock
        self._numbers = itertools.count()
        self.links: dict[frozenset[int], int] = {}
        self.wanted: set[tuple[int, int]] = set()  # who dials whom
        self.away: set[frozenset[int]] = set()  # pairs between which nothing crosses
        self.events: dict[int, deque[Event]] = {}
        self.hosts: dict[int, FakeHost] = {}
        self.agents: dict[int, Agent] = {}
        self.heres: dict[int, Here] = {}
        self.networks: dict[int, FakeNetwork] = {}
        if apart:
            self.away = {frozenset((one, other)) for one in range(hosts) for other in range(one)}
        for host in range(hosts):
            self.start(host)
        self.settle()

    def start(self, host: int) -> None:
        """Start a host's launcher."""
        plan = Plan(self.count, host, ("10.0.0.1", 29400), self.limits, 30.0, 10.0)
        self.events[host], self.hosts[host] = deque(), FakeHost(host)
        self.networks[host] = FakeNetwork(self, host)
        self.heres[host] = Here(plan, self.hosts[host], self.networks[host])  # type: ignore[arg-type]
        self.agents[host] = Agent(self.heres[host])

    def settle(self) -> None:
        """Until nothing has happened for a while."""
        calm = 0
        for _ in range(1000):
            before = self._state()
            while self._connect() or self._handle() or self._end_ranks():
                pass
            self._tick()
            calm = calm + 1 if self._state() == before else 0
            if calm == 10:
                return
        raise AssertionError("they never come to rest")

    def die(self, host: int) -> None:
        """Its launcher is killed, and with it its ranks."""
        self._ends(host)
        self.settle()

    def _ends(self, host: int) -> None:
        del self.agents[host]
        for other in list(self.agents):
            self.unlink(host, other, told=(other,), surely=True)

    def cut(self, side: Collection[int]) -> None:
        """Nothing crosses between these hosts and the others; all notice."""
        for one in side:
            for other in set(self.agents) - set(side):
                self.away.add(frozenset((one, other)))
                self.unlink(one, other, told=(one, other))
        self.settle()

    def mend(self) -> None:
        """All crosses again."""
        self.away.clear()
        self.settle()

    def unlink(self, one: int, other: int, told: Collection[int], surely: bool = False) -> None:
        link = self.links.pop(frozenset((one, other)), None)
        if link is None:
            return
        for host in told:
            peer = other if host == one else one
            if host in self.agents:
                self.events[host].append(Down(peer, link, "it was silent for 10 s", surely))

    def link(self, one: int, other: int) -> None:
        """Link two hosts; both are told."""
        link = self.links[frozenset((one, other))] = next(self._numbers)
        hello = {"hosts": self.count, "ranks": RANKS}
        for host, peer in ((one, other), (other, one)):
            address = f"10.0.0.{peer + 1}", 29400 + peer
            self.events[host].append(Up(peer, link, address, hello))

    @property
    def leaders(self) -> list[int]:
        """Those that lead a job that runs."""
        roles = {host: agent.role for host, agent in self.agents.items()}
        return [host for host, role in roles.items() if isinstance(role, Coordinator) and role.runs]

    def members(self, host: int) -> list[int]:
        return sorted(self.hosts[host].crew.living)

    def newest(self, host: int) -> Generation:
        return self.hosts[host].published[-1]

    def _connect(self) -> bool:
        for me, host in sorted(self.wanted):
            pair = frozenset((me, host))
            if me not in self.agents:
                self.wanted.discard((me, host))
            elif host in self.agents and pair not in self.away:
                self.wanted.discard((me, host))
                if pair not in self.links:
                    self.link(me, host)
                    return True
        return False

    def _handle(self) -> bool:
        for host, agent in list(self.agents.items()):
            if self.events[host]:
                agent.happened(self.events[host].popleft())
                return True
        return False

    def _end_ranks(self) -> bool:
        for host, agent in list(self.agents.items()):
            news, self.hosts[host].news = self.hosts[host].news, {}
            if news:
                agent.role.ended(news, 0.0)
                return True
        return False

    def _tick(self) -> None:
        """Let all do what is due."""
        self._clock.now += 0.3
        for host, agent in list(self.agents.items()):
            agent.on_time(self._clock.now)
            if self.heres[host].outcome is not None:
                self._ends(host)

    def _state(self) -> object:
        return repr(
            [
                (type(agent.role), self.hosts[host].published, list(self.hosts[host].crew.living))
                for host, agent in self.agents.items()
            ]
        )


Make = Callable[..., Cluster]
