"""Who leads, who follows, who is cut off: agents and their messages without a process, a socket or a wait."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from imece.errors import UserError
from imece.launch import job
from imece.launch.generations import Limits
from imece.launch.host import Start
from imece.launch.hosts import coordinator, follower, seeker
from imece.launch.hosts.agent import Agent
from imece.launch.hosts.coordinator import Coordinator
from imece.launch.hosts.events import Down, Event, Said, Up
from imece.launch.hosts.here import Here, Plan
from imece.launch.hosts.wide_view import WideView
from imece.launch.processes import Ending
from imece.membership.roster import Generation

RANKS = 2


@dataclass
class Process:
    """A rank that does nothing."""

    slot: int
    pid: int


@dataclass
class Clock:
    """The time of all agents."""

    now: float = 0.0


class FakeHost:
    """Ranks that live until they are told to end, or are killed by a test."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.crew = SimpleNamespace(living={}, ended={})
        self.endings: dict[int, Ending] = {}
        self.news: dict[int, Ending] = {}
        self.published: list[Generation] = []
        self.said: list[str] = []
        self.ended_by: list[int] = []
        self.graces_s: list[float] = []
        self.obstinate = False  # its ranks end by SIGKILL alone
        self.resilient = True
        self.meeting_port = 1000 + number

    def start(self, starts: Sequence[Start]) -> None:
        for each in starts:
            self.crew.living[each.member] = Process(each.slot, 100 + each.member)
            self.starts = each.starts

    def publish(self, generation: Generation) -> None:
        self.published.append(generation)

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
        return self.resilient and bool(members)

    def ready(self, members: Iterable[int]) -> list[int]:
        return list(members)

    def beats(self, members: Iterable[int]) -> dict[int, tuple[int, int]]:
        return {}

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

    def send(self, host: int, message: dict[str, Any]) -> None:
        if frozenset((self._me, host)) in self._cluster.links:
            self._cluster.events[host].append(Said(self._me, json.loads(json.dumps(message))))

    def dial(self, host: int, address: tuple[str, int], *, patience_s: float) -> None:
        self._cluster.wanted.add((self._me, host))

    def drop(self, host: int) -> None:
        self._cluster.unlink(self._me, host, told=(host,))

    def serve_store(self, port: int | None) -> None:
        self.store = port

    def lead_to(self, target: object) -> None:
        self.leads_to = target


class Cluster:
    """Agents of some hosts, whose events are handled one after another."""

    def __init__(self, hosts: int, clock: Clock, apart: bool = False, **limits: Any) -> None:
        self.count, self.limits = hosts, Limits(hosts * RANKS, **limits)
        self._clock = clock
        self.links: set[frozenset[int]] = set()
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
        if frozenset((one, other)) not in self.links:
            return
        self.links.discard(frozenset((one, other)))
        for host in told:
            peer = other if host == one else one
            if host in self.agents:
                self.events[host].append(Down(peer, "it was silent for 10 s", surely))

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
                    self.links.add(pair)
                    hello = {"hosts": self.count, "ranks": RANKS}
                    for one, other in ((me, host), (host, me)):
                        address = f"10.0.0.{other + 1}", 29400 + other
                        self.events[one].append(Up(other, address, hello, f"agent {other}"))
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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one, of agents that have started their ranks."""
    clock = Clock()
    for module in (job, coordinator, follower, seeker):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return lambda hosts, **limits: Cluster(hosts, clock, **limits)


def test_all_start_together(cluster: Make) -> None:
    made = cluster(3)
    assert made.leaders == [0] and [made.members(host) for host in range(3)] == [[0, 1], [2, 3], [4, 5]]
    for host in range(3):
        assert made.hosts[host].published == [Generation(0, (0, 1, 2, 3, 4, 5))]
        store = 1000 if host == 0 else ("10.0.0.1", 29400)
        assert made.networks[host].leads_to == store
    assert [made.networks[host].store for host in range(3)] == [1000, None, None]
    assert frozenset((1, 2)) in made.links, "they will have to find each other when host 0 is gone"


def test_a_rank_dies_and_is_replaced(cluster: Make) -> None:
    made = cluster(2)
    made.hosts[1].dies(3)
    made.settle()
    assert made.members(1) == [2, 4]
    assert made.hosts[0].published == made.hosts[1].published
    assert [generation.members for generation in made.hosts[0].published] == [
        (0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_launcher_dies_and_comes_again(cluster: Make, victim: int) -> None:
    made = cluster(3)
    made.die(victim)
    left = [host for host in range(3) if host != victim]
    assert made.leaders == [left[0]]
    lasting = tuple(member for member in range(6) if member // 2 != victim)
    for host in left:
        assert made.newest(host).members == lasting and "is gone" in made.newest(host).lost[0]
    made.start(victim)
    made.settle()
    assert made.leaders == [left[0]], "one that was started again begins no second job"
    assert made.members(victim) == [6, 7]
    assert {made.newest(host).members for host in range(3)} == {(*lasting, 6, 7)}
    assert made.networks[victim].leads_to == (f"10.0.0.{left[0] + 1}", 29400 + left[0])


def test_one_comes_again_though_host_0_is_gone(cluster: Make) -> None:
    """It looks for the job at the rendezvous, where nobody is; whoever leads looks for it."""
    made = cluster(3)
    made.die(0)
    made.die(1)
    made.start(1)
    made.settle()
    assert made.leaders == [2] and made.newest(1).members == (4, 5, 6, 7)
    made.start(0)
    made.settle()
    assert made.leaders == [2] and made.newest(0).members == (4, 5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("hosts", "side", "leader"),
    [
        (2, {0}, 0),  # of exactly half, those with the coordinator
        (3, {0}, 1),
        (3, {1}, 0),
        (3, {0, 1}, 0),
        (4, {2, 3}, 0),
        (5, {0, 1}, 2),
    ],
)
def test_a_cut_leaves_one_side(cluster: Make, hosts: int, side: set[int], leader: int) -> None:
    made = cluster(hosts)
    made.cut(side)
    assert made.leaders == [leader]
    going = side if leader in side else set(range(hosts)) - side
    lasting = tuple(member for member in range(2 * hosts) if member // 2 in going)
    for host in range(hosts):
        assert (made.members(host) != []) == (host in going)
        if host in going:
            assert made.newest(host).members == lasting
        else:
            assert any("cut off from" in line for line in made.hosts[host].said)
    made.mend()
    assert made.leaders == [leader] and all(len(made.members(host)) == RANKS for host in range(hosts))
    assert len({made.newest(host) for host in range(hosts)}) == 1
    assert len(made.newest(0).members) == 2 * hosts


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_host_that_came_back_goes_on_when_the_one_it_came_back_to_dies(cluster: Make, hosts: int) -> None:
    made = cluster(hosts)
    made.cut({hosts - 1})
    made.mend()
    made.die(0)
    assert made.leaders == [1]
    assert len(made.newest(1).members) == 2 * (hosts - 1)


def test_the_store_in_which_ranks_meet_goes_with_a_host_that_has_no_ranks(cluster: Make) -> None:
    made = cluster(2, max_restarts=0)
    for member in (0, 1):
        made.hosts[0].dies(member)
    made.settle()
    before = made.newest(1)
    made.die(0)
    assert made.leaders == [1] and before.members == made.newest(1).members == (2, 3)
    assert made.newest(1).number == before.number + 1, "whoever was meeting there meets again"


def test_when_no_side_may_go_on_all_start_again_together(cluster: Make) -> None:
    made = cluster(3)
    for host in range(3):
        made.away |= {frozenset((host, other)) for other in range(3) if other != host}
    for one, other in ((0, 1), (0, 2), (1, 2)):
        made.unlink(one, other, told=(one, other))
    made.settle()
    assert made.leaders == [] and [made.members(host) for host in range(3)] == [[], [], []]
    made.mend()
    assert made.leaders == [0] and [made.members(host) for host in range(3)] == [[6, 7], [8, 9], [10, 11]]
    assert made.newest(0).number > 0, "numbers are not used again"
    assert [made.hosts[host].starts for host in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_leaves_in_order(cluster: Make, host: int) -> None:
    made = cluster(2)
    made.agents[host].role.signalled(15)
    made.settle()
    asked = made.newest(1 - host)
    assert asked.leaving == tuple(range(2 * host, 2 * host + 2)) and len(asked.members) == 4
    made.hosts[host].leaves()
    made.settle()
    outcome = made.heres[host].outcome
    assert outcome is not None and outcome.status == 143 and "have left in order" in outcome.line
    assert made.leaders == [1 - host]
    last = made.newest(1 - host)
    assert (last.members, last.lost, last.leaving) == (tuple(range(2 - 2 * host, 4 - 2 * host)), (), ())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_hosts_are_asked_to_go(cluster: Make, order: tuple[int, int]) -> None:
    """Then nobody is left who could go on: the job ends, with time to save."""
    made = cluster(2)
    for host in order:
        made.agents[host].role.signalled(15)
    made.settle()
    for host in (0, 1):
        outcome = made.heres[host].outcome
        assert outcome is not None and outcome.status == 143 and "passed on to 4 ranks" in outcome.line
        assert made.hosts[host].ended_by == [15, 15], "each rank gets the signal"
        assert len(made.hosts[host].endings) == 2, "nobody is replaced"


def test_a_watcher_sees_and_hits_members_of_all_hosts(cluster: Make) -> None:
    made = cluster(2)
    view = made.heres[0].view = WideView(made.heres[0])
    assert view.newest() == -1 and not view.living() and not view.signal(3, 9)
    made.settle()
    assert view.living() == {member: (member, 100 + member, member // 2) for member in range(4)}
    assert view.generation(view.newest()).members == (0, 1, 2, 3)
    assert view.roster.all_resilient(range(4)) and not view.all_resilient([0, 7]) and view.ending(3) is None
    assert view.went_on(0, 0) == view.went_on(3, 0) == (5.0, 0), "ages are times again"
    assert view.signal(3, 9) and view.signal(0, 11)
    made.settle()
    ends = view.ending(3), view.ending(0)
    assert [(end.status, end.host) for end in ends if end is not None] == [(-9, 1), (-11, 0)]
    assert view.living().keys() == {1, 2, 4, 5} and not view.signal(3, 9)
    assert {*view.generation(view.newest()).members} == {1, 2, 4, 5}
    assert view.generation(0).members == (0, 1, 2, 3), "earlier ones are kept"


@pytest.mark.parametrize("number", [2, 15])
def test_one_signal_to_all_hosts_is_one(cluster: Make, number: int) -> None:
    """As from SLURM: ranks keep their time to save. The second one of a host is another."""
    made = cluster(3)
    for host in made.hosts.values():
        host.resilient, host.obstinate = False, True
    for number_of_host in (2, 0, 1):
        made.agents[number_of_host].role.signalled(number)
    made.settle()
    for host in made.hosts.values():
        assert host.ended_by == [number] * 2 and host.graces_s == [30.0] * 2
    made.agents[0].role.signalled(number)
    made.settle()
    for host in made.hosts.values():
        assert host.graces_s == [30.0] * 2 + [0.0] * 2


def test_one_asked_to_go_goes_though_the_coordinator_dies(cluster: Make) -> None:
    made = cluster(3)
    made.agents[2].role.signalled(15)
    made.die(0)
    assert made.leaders == [1] and made.newest(1).leaving == (4, 5)
    made.hosts[2].leaves()
    made.settle()
    outcome = made.heres[2].outcome
    assert outcome is not None and outcome.status == 143 and made.newest(1).members == (2, 3)


def test_nobody_comes(cluster: Make) -> None:
    made = cluster(2, apart=True)
    with pytest.raises(UserError, match=r"no job at 10.0.0.1:29400 within 600 s.*is host 0 started"):
        made.heres[1].network.dial(0, ("", 0), patience_s=0)
        made.agents[1].on_time(601.0)
    with pytest.raises(UserError, match=r"host 1 of 2 hosts did not come to 10.0.0.1:29400 within 600 s"):
        made.agents[0].on_time(601.0)


def test_ranks_that_do_not_go_on_end_with_the_first_that_is_lost(cluster: Make) -> None:
    made = cluster(2)
    for host in made.hosts.values():
        host.resilient = False
    made.die(1)
    outcome = made.heres[0].outcome
    assert outcome is not None and outcome.status == 137
    assert outcome.line == (
        "imece: host 1 (10.0.0.2) is gone: its launcher has ended; the other 2 ranks were ended"
    )


def test_nonsense_from_a_peer_ends_its_link_and_nothing_else(cluster: Make) -> None:
    made = cluster(3)
    for message in ({"say": "seen", "members": [[1]]}, {"say": "ended", "members": 3}, {"say": 1}, {}):
        made.events[0].append(Said(2, message))
        made.settle()
    assert made.leaders == [0] and made.members(0) == [0, 1]
    assert any("not understood" in line for line in made.hosts[0].said)
