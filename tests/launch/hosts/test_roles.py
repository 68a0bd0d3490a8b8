"""Which agent leads, follows or is cut off: agents and messages without processes, sockets or waiting."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from imece.errors import UserError
from imece.launch.hosts.coordinator import Coordinator
from imece.launch.hosts.events import Said, Up
from imece.launch.hosts.follower import Follower
from imece.launch.hosts.seeker import Seeker
from imece.launch.hosts.wide_view import WideView
from imece.membership.roster import Generation
from tests.launch.hosts.cluster import RANKS, Make


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


def test_host_0_comes_again_with_another_address(cluster: Make) -> None:
    """As a pod does: what stays is its name, which is that of the rendezvous."""
    made = cluster(2)
    for here in made.heres.values():
        assert here.book == {0: ("10.0.0.1", 29400), 1: ("10.0.0.2", 29401)}
    for host in (0, 1):
        link = made.links[frozenset((0, 1))]
        made.events[host].append(Up(0, link, ("10.7.7.7", 29400), {"hosts": 2, "ranks": RANKS}))
    made.settle()
    made.cut({0})
    assert made.networks[1].dialled[0] == ("10.0.0.1", 29400)


def test_a_rank_dies_while_nobody_leads(cluster: Make) -> None:
    """Its launcher has already told the one that will lead how its ranks are."""
    made = cluster(3)
    made._ends(0)
    while not any(isinstance(event, Said) and event.message["say"] == "yes" for event in made.events[1]):
        assert made._handle()
    made.hosts[2].dies(4)
    assert made._end_ranks()
    made.settle()
    assert made.leaders == [1] and made.members(2) == [5, 6]
    assert made.newest(1).members == made.newest(2).members == (2, 3, 5, 6)


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
            assert any("it was silent for 10 s): " in line for line in made.hosts[host].said)
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


def test_two_that_lost_each_other_and_not_the_one_that_leads_find_each_other_again(cluster: Make) -> None:
    """Or neither would go on when that one dies."""
    made = cluster(3)
    pair = frozenset((1, 2))
    made.away.add(pair)
    made.unlink(1, 2, told=(1, 2))
    made.settle()
    assert made.leaders == [0] and pair not in made.links and len(made.newest(2).members) == 6
    made.mend()
    assert pair in made.links
    made.die(0)
    assert made.leaders == [1] and len(made.newest(2).members) == 4


def test_two_that_do_not_reach_each_other_for_long_are_named_on_all_hosts(cluster: Make) -> None:
    made = cluster(3)
    made.away.add(frozenset((1, 2)))
    made.unlink(1, 2, told=(1, 2))
    made.settle()
    apart = "host 1 (10.0.0.2) and host 2 (10.0.0.3) do not reach each other"
    assert not any("reach" in line for host in range(3) for line in made.hosts[host].said)
    for _ in range(12):
        made.settle()
    for host in range(3):
        assert [apart in line for line in made.hosts[host].said].count(True) == 1, "both say so"
    made.mend()
    made.settle()
    for host in range(3):
        again = [line for line in made.hosts[host].said if "reach each other again" in line]
        assert again == ["imece: host 1 (10.0.0.2) and host 2 (10.0.0.3) reach each other again"]


def test_who_comes_back_does_not_help_to_cut_off_those_that_it_went_on_with(cluster: Make) -> None:
    """Hosts 4 to 8 go on without 0, which still counts on 4; then 5 and 6 begin anew with 0."""
    made = cluster(9, max_restarts=99)
    for one, other in itertools.product(range(4), (4, 7, 8, 5, 6)):
        made.away.add(frozenset((one, other)))
        made.unlink(one, other, told=(4,) if (one, other) == (0, 4) else (one, other))
    made.settle()
    assert made.newest(4).members == tuple(range(8, 18))
    for back in (5, 6):
        made.die(back)
        made.away |= {frozenset((back, other)) for other in (4, 7, 8)}
        made.away -= {frozenset((back, other)) for other in range(4)}
        made.start(back)
        made.settle()
    made.hosts[1].dies(2)  # of that all hear, and so where the others are
    made.settle()
    assert frozenset((1, 5)) in made.links and 5 in made.heres[1].standing.newest.hosts  # type: ignore[union-attr]
    made.cut({0})
    assert made.leaders == [4], "five of the first nine are here, but two of them were elsewhere meanwhile"


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


def test_host_0_gathers_again_when_the_one_that_led_is_gone_too(cluster: Make) -> None:
    """Nobody else does: it and those that are started again would look for each other."""
    made = cluster(2)
    made.die(0)
    made.start(0)
    while not isinstance(made.agents[0].role, Seeker):
        assert made._connect() or made._handle()
    made.die(1)
    made.start(1)
    made.settle()
    assert made.leaders == [0] and [len(made.members(host)) for host in (0, 1)] == [RANKS, RANKS]
    assert not any("is host 0 started" in line for line in made.hosts[0].said)


def test_who_has_never_heard_of_a_generation_leads_nobody(cluster: Make) -> None:
    made = cluster(2, apart=True)
    made.away.clear()
    while not isinstance(made.agents[1].role, Follower):
        assert made._connect() or made._handle()
    made.die(0)
    assert "before it knew of any generation" in made.hosts[1].said[-1]
    made.start(0)
    made.settle()
    assert made.leaders == [0] and made.newest(1).members == (0, 1, 2, 3)


@pytest.mark.parametrize("apart", [True, False])
def test_of_two_that_are_about_to_lead_one_gives_way(cluster: Make, apart: bool) -> None:
    """Hosts 1 and 2 lose each other when host 0 dies, and 3 and 4 vote for both, but follow one."""
    made = cluster(5)
    if apart:
        made.away.add(frozenset((1, 2)))
    made._ends(0)
    made.unlink(1, 2, told=(1, 2))
    made.settle()
    assert made.leaders == [1] and made.newest(1).members[:6] == (2, 3, 6, 7, 8, 9)
    assert any("host 2 was cut off from " in line for line in made.hosts[2].said)
    made.mend()
    made.start(0)
    made.settle()
    assert made.leaders == [1] and all(len(made.members(host)) == RANKS for host in range(5))
    assert len({made.newest(host) for host in range(5)}) == 1


def test_who_is_about_to_lead_gives_up_in_time(cluster: Make) -> None:
    """Hosts 0 and 3 are started again before 2 has answered: 1 does not know any more that they were dead."""
    made = cluster(4)
    made._ends(0)
    made._ends(3)
    while not isinstance(made.agents[1].role, Coordinator):
        assert made._handle()
    made.start(0)
    made.start(3)
    while frozenset((1, 3)) not in made.links or frozenset((0, 1)) not in made.links:
        assert made._connect()
    made.events[1].rotate(-len([each for each in made.events[1] if isinstance(each, Said)]))
    for _ in range(10):
        made.settle()
        made._clock.now += 5.0
    made.settle()
    assert made.leaders == [0] and all(len(made.members(host)) == RANKS for host in range(4))
    assert any("not followed by all of its side" in line for line in made.hosts[1].said)


def test_who_is_about_to_lead_waits_without_looking_again_and_again(cluster: Make) -> None:
    """One that is to follow may be silent for as long as its link lasts."""
    made = cluster(3)
    made._ends(0)
    while not isinstance(made.agents[1].role, Coordinator):
        assert made._handle()
    made._clock.now += 8.0
    made.agents[1].on_time(made._clock.now)
    assert made.leaders == [] and made.agents[1].role.next_time() > made._clock.now


def test_who_seeks_follows_nobody_that_it_has_not_asked(cluster: Make) -> None:
    """Who was stopped for long may speak to one that has begun anew, and does not count any more."""
    made = cluster(3)
    made.cut({2})
    known = made.heres[0].standing
    assert known is not None
    made.heres[2].up[0] = Up(0, 99, made.heres[2].book[0], {})
    made.agents[2].happened(Said(0, 99, {"do": "view", "standing": known.message(), "run": "imece-1"}))
    assert isinstance(made.agents[2].role, Seeker) and made.heres[2].standing is None


def test_what_was_meant_for_a_link_that_has_ended_reaches_no_newer_one(cluster: Make) -> None:
    """Host 2 would follow one that gives it up, by what that one said before it heard that the link ended."""
    made = cluster(5)
    made._ends(3)
    made.unlink(0, 2, told=(0, 2))
    made.link(0, 2)
    made.settle()
    assert made.leaders == [0] and made.members(2) == [10, 11]
    assert made.newest(2) == made.newest(0) and len(made.newest(0).members) == 8
    assert "host 2 was cut off from host 0, which goes on without it: its ranks" in made.hosts[2].said[0]


@pytest.mark.parametrize("told", [True, False])
def test_who_leads_is_gone_while_all_are_about_to_start_again(cluster: Make, told: bool) -> None:
    """That nobody has ranks then is no end of the job, nor is anybody started twice."""
    made = cluster(3, restart=True)
    before = made.heres[1].snapshot
    made.hosts[0].resilient = False
    made.hosts[0].dies(0)
    while made._end_ranks() or made._handle():
        pass
    assert [made.members(host) for host in range(3)] == [[], [], []]
    made.hosts[0].resilient = True
    if told:
        assert isinstance(made.agents[0].role, Coordinator)
        made.agents[0].role._tell_what_is_known(0.0, anyway=True)
        while made._handle():
            pass
    else:
        made.settle()
        made.heres[1].snapshot = made.heres[2].snapshot = before
    made.die(0)
    assert made.leaders == [1] and [len(made.members(host)) for host in (1, 2)] == [RANKS, RANKS]
    assert list(made.newest(2).members) == made.members(1) + made.members(2)


def test_a_watcher_sees_and_hits_members_of_all_hosts(cluster: Make) -> None:
    made = cluster(2)
    view = made.heres[0].view = WideView(2, made.heres[0].hit)
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


def test_a_watcher_ends_the_job_though_ctrl_c_is_ignored(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, sent = WideView(2, cluster(2).heres[0].hit), []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        view.end()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        view.end()
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent == [(os.getpid(), signal.SIGINT), (os.getpid(), signal.SIGTERM)]


def test_nobody_comes(cluster: Make) -> None:
    made = cluster(2, apart=True)
    for now in (4.0, 6.0, 60.0):
        made.agents[1].on_time(now)
        assert sum("finds no job at 10.0.0.1:29400 yet" in line for line in made.hosts[1].said) == (now > 5)
    with pytest.raises(UserError, match=r"no job at 10.0.0.1:29400 within 600 s.*is host 0 started"):
        made.heres[1].network.dial(0, ("", 0), patience_s=0)
        made.agents[1].on_time(601.0)
    made.agents[0].on_time(601.0)
    outcome = made.heres[0].outcome
    assert outcome is not None and outcome.status == 2
    assert outcome.line == "imece: host 1 of 2 hosts did not come to 10.0.0.1:29400 within 600 s"


def test_who_has_come_is_told_for_whom_all_wait(cluster: Make) -> None:
    made = cluster(3, apart=True)
    made.away.discard(frozenset((0, 1)))
    for _ in range(3):
        made.settle()
    line = "imece: waiting at 10.0.0.1:29400 for host 2 of 3 hosts"
    assert made.hosts[0].said[-1] == line and made.hosts[1].said == [line]
    made.mend()
    assert made.leaders == [0] and made.hosts[1].said == [line]


def test_nobody_comes_back(cluster: Make) -> None:
    """Who was cut off did nothing wrong."""
    made = cluster(3)
    made.away = {frozenset((0, 1)), frozenset((0, 2)), frozenset((1, 2))}
    for one, other in ((0, 1), (0, 2), (1, 2)):
        made.unlink(one, other, told=(one, other))
    made.settle()
    for now in (50.0, 60.0, 700.0):
        for host in range(3):
            made.agents[host].on_time(now)
    said = "imece: host 2 still reaches nobody at 10.0.0.1:29400, 10.0.0.2:29401: is the way there cut"
    assert [line.startswith(said) for line in made.hosts[2].said].count(True) == 1
    outcomes = [here.outcome for here in made.heres.values()]
    assert [outcome and outcome.status for outcome in outcomes] == [1, 1, 1]


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


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ({"say": "seen", "members": [[1]]}, True),
        ({"say": "ended", "members": [3], "endings": []}, True),
        ({"say": 1}, False),
        ({}, False),
    ],
)
def test_nonsense_from_a_peer_ends_its_link_at_most(
    cluster: Make, message: dict[str, object], ends: bool
) -> None:
    made = cluster(3)
    made.events[0].append(Said(2, made.links[frozenset((0, 2))], message))
    made.settle()
    assert made.leaders == [0] and made.members(0) == [0, 1]
    assert any("not understood" in line for line in made.hosts[0].said) == ends
    assert (frozenset((0, 2)) in made.links) != ends


@pytest.mark.parametrize("host", [0, 1])
def test_ranks_that_have_lost_one_that_has_finished_on_another_host_are_told_so(
    cluster: Make, host: int
) -> None:
    made = cluster(2)
    made.hosts[1 - host].dies(2 * (1 - host), 0)
    made.hosts[host].lost_in[2 * host + 1] = 0
    made.settle()
    for each in (0, 1):
        assert (len(made.hosts[each].published), made.hosts[each].last) == (1, [0])


@pytest.mark.parametrize("member", [0, 3])
def test_ranks_that_cannot_reach_each_other_any_more_meet_anew(cluster: Make, member: int) -> None:
    """All connections were closed on the way, and nobody has ended."""
    made = cluster(2)
    made.hosts[member // 2].lost_in[member] = 0
    made.settle()
    who = {0: "rank 0", 3: "rank 3 (host 1, pid 103)"}[member]
    why = f"{who} lost the connection to others, though no rank has ended"
    for host in (0, 1):
        assert made.hosts[host].published[1:] == [Generation(1, (0, 1, 2, 3), (why,))], "once"
        assert made.hosts[host].said[-1] == f"imece: {why}; 4 ranks go on"
