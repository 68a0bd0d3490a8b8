"""Hosts that are asked to leave: their ranks leave in order, and the others go on without them."""

from __future__ import annotations

import pytest

from imece.launch.hosts.coordinator import Coordinator
from imece.launch.hosts.events import Down
from tests.launch.hosts.cluster import Make


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


@pytest.mark.parametrize("status", [0, 1, -9])
@pytest.mark.parametrize("host", [0, 1])
def test_the_others_do_not_wait_for_the_processes_of_those_that_have_left(
    cluster: Make, host: int, status: int
) -> None:
    """Nor does it matter how these end: by the SIGKILL that comes when their time is over, say."""
    made = cluster(2)
    made.agents[host].role.signalled(15)
    made.settle()
    left, stay = made.members(host), made.members(1 - host)
    for told in ([left[0]], left):
        assert made.newest(1 - host).leaving == tuple(left), "until all of them have closed"
        made.hosts[host].told |= set(told)
        made.settle()
    assert (made.newest(1 - host).members, made.newest(1 - host).leaving) == (tuple(stay), ())
    assert made.heres[host].outcome is None and made.members(host) == left, "their processes still live"
    for member in left:
        made.hosts[host].dies(member, status)
    made.settle()
    outcome = made.heres[host].outcome
    assert outcome is not None and outcome.status == 143 and made.leaders == [1 - host]
    assert made.newest(1 - host).members == tuple(stay) and made.members(1 - host) == stay
    said = [line for line in made.hosts[1 - host].said if "rank" in line]
    assert [line for line in said if "have left" in line] == [
        "imece: all that were to leave have left; 2 ranks go on"
    ]
    assert not [line for line in said if "killed" in line or "replacement" in line]


@pytest.mark.parametrize("when", ["before it is told", "after"])
def test_the_coordinator_dies_while_others_end_that_have_left(cluster: Make, when: str) -> None:
    """Whether or not it had told the one that leads after it what was decided last."""
    made = cluster(3)
    made.agents[2].role.signalled(15)
    made.settle()
    before = made.heres[1].snapshot
    made.hosts[2].closes()
    made.settle()
    assert made.newest(1).members == (0, 1, 2, 3)
    number = made.newest(1).number
    if when != "after":
        made.heres[1].snapshot = before
    made.die(0)
    assert made.leaders == [1] and made.members(2) == [4, 5]
    assert made.newest(1).members == (2, 3) == made.newest(2).members and 2 in made.agents
    assert when != "after" or made.newest(1).number == number + 1, (
        "no generation more than the death asks for"
    )
    for member in (4, 5):
        made.hosts[2].dies(member, -9)
    made.settle()
    outcome = made.heres[2].outcome
    assert outcome is not None and outcome.status == 143
    assert made.newest(1).members == (2, 3) == tuple(made.members(1))


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


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_hosts_are_asked_to_go_one_after_another(
    cluster: Make, order: tuple[int, int], number: int
) -> None:
    """Those of the second wait in the generation in which the first leaves: they have to save alone."""
    made = cluster(2)
    first, second = order
    made.agents[first].role.signalled(15)
    made.settle()
    assert made.newest(second).leaving == tuple(made.members(first))
    for each in made.hosts.values():
        each.obstinate = True
    made.agents[second].role.signalled(number)
    made.settle()
    stay = tuple(made.members(second))
    made.hosts[first].told |= set(made.members(first))
    made.settle()
    assert (made.newest(second).members, made.newest(second).leaving) == (stay, ())
    for host in order:
        for member in made.members(host):
            made.hosts[host].dies(member, 0)
        made.settle()
    name = "SIGINT" if number == 2 else "SIGTERM"
    for host in (0, 1):
        outcome = made.heres[host].outcome
        assert outcome is not None and outcome.status == 128 + number and f"ended by {name}" in outcome.line


def test_one_host_leaves_after_another(cluster: Make) -> None:
    """Those of the first may have left already: nobody is to wait for them in a generation with both."""
    made = cluster(3)
    for host in (1, 2):
        made.agents[host].role.signalled(15)
    made.settle()
    assert made.newest(0).members == (0, 1, 2, 3, 4, 5) and made.newest(0).leaving == (2, 3)
    assert made.hosts[0].published.count(made.newest(0)) == 1
    for host, left, leaving in ((1, (0, 1, 4, 5), (4, 5)), (2, (0, 1), ())):
        made.hosts[host].closes()
        made.settle()
        assert (made.newest(0).members, made.newest(0).leaving) == (left, leaving)
        for member in made.members(host):
            made.hosts[host].dies(member, 0)
        made.settle()
        outcome = made.heres[host].outcome
        assert outcome is not None and outcome.status == 143 and "have left in order" in outcome.line


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


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_leaves_though_another_rank_was_just_taken_in(cluster: Make, host: int) -> None:
    """Which has not come to say yet that it goes on."""
    made = cluster(2)
    made.hosts[0].dies(0)
    made.settle()
    assert made.newest(0).members == (1, 2, 3, 4)
    for each in made.hosts.values():
        each.unsaid = {4}
    made.agents[host].role.signalled(15)
    made.settle()
    assert made.newest(0).leaving == ((1, 4), (2, 3))[host] and made.heres[host].outcome is None


def test_one_asked_to_go_goes_though_the_coordinator_dies(cluster: Make) -> None:
    made = cluster(3)
    made.agents[2].role.signalled(15)
    made.die(0)
    assert made.leaders == [1] and made.newest(1).leaving == (4, 5)
    made.hosts[2].leaves()
    made.settle()
    outcome = made.heres[2].outcome
    assert outcome is not None and outcome.status == 143 and made.newest(1).members == (2, 3)


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_got_a_signal_goes_though_it_is_cut_off(cluster: Make, host: int, number: int) -> None:
    """Before others have heard of it, or with too few others to go on."""
    made = cluster(3)
    made.hosts[host].obstinate = True
    made.away |= {frozenset((host, other)) for other in range(3) if other != host}
    links = {pair: made.links.pop(pair) for pair in list(made.links) if host in pair}
    made.agents[host].role.signalled(number)
    made.hosts[host].obstinate = False
    for pair, link in links.items():
        (other,) = pair - {host}
        made.events[host].append(Down(other, link, "it was silent for 10 s", False))
        made.events[other].append(Down(host, link, "it was silent for 10 s", False))
    made.settle()
    outcome = made.heres[host].outcome
    assert outcome is not None and outcome.status == 128 + number
    assert not any("tries for" in line for line in made.hosts[host].said)
    assert len(made.leaders) == 1 and len(made.newest(2).members) == 4


@pytest.mark.parametrize("restart", [True, False])
def test_all_others_die_while_a_host_leaves(cluster: Make, restart: bool) -> None:
    """Whoever would replace them would wait for members that have left."""
    made = cluster(2, restart=restart)
    made.agents[1].role.signalled(15)
    while made._handle():
        pass
    assert made.newest(1).leaving == (2, 3)
    for member in (0, 1):
        made.hosts[0].dies(member)
    made.settle()
    outcomes = [here.outcome for here in made.heres.values()]
    assert outcomes[1] is not None and outcomes[1].status == 143
    if restart:
        assert outcomes[0] is None and made.newest(0).members == (4, 5) == tuple(made.members(0))
    else:
        assert outcomes[0] is not None and outcomes[0].status == 137


def test_all_end_by_a_signal_while_they_end_to_start_again(cluster: Make) -> None:
    made = cluster(2, restart=True)
    made.agents[1].role.signalled(15)
    while made._handle():
        pass
    made.hosts[1].obstinate = True
    made.hosts[0].dies(0)
    made.hosts[0].dies(1)
    made.settle()
    made.hosts[1].dies(2, 0)
    made.settle()
    made.agents[0].role.signalled(2)
    made.hosts[1].dies(3, 0)
    made.settle()
    outcome = made.heres[0].outcome
    assert outcome is not None and outcome.status == 130


@pytest.mark.parametrize("number", [2, 15])
def test_the_one_that_is_about_to_lead_gets_a_signal(cluster: Make, number: int) -> None:
    """Before all have answered that they follow it."""
    made = cluster(3)
    made._ends(0)
    while not isinstance(made.agents[1].role, Coordinator):
        assert made._handle()
    assert made.leaders == []
    made.agents[1].role.signalled(number)
    made.settle()
    made.hosts[1].leaves()
    made.settle()
    outcome, other = made.heres[1].outcome, made.heres[2].outcome
    assert outcome is not None and outcome.status == 128 + number
    if number == 15:
        assert "have left in order" in outcome.line and other is None and made.leaders == [2]
    else:
        assert other is not None and "ended by SIGINT, passed on to 4 ranks" in other.line
