"""Of any two sides at most one goes on, whichever agent died, was cut off, or missed the last change."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.launch.hosts.succession import Published, Standing


def of(*hosts: int, coordinator: int = 0, number: int = 0) -> Published:
    return Published(number, frozenset(hosts), coordinator)


def test_of_two_hosts_the_coordinators_goes_on() -> None:
    standing = Standing(of(0, 1))
    assert standing.may_go_on({0}, ()) and not standing.may_go_on({1}, ())
    assert standing.may_go_on({1}, {0}), "a coordinator that is surely dead is not going on anywhere"
    why = standing.cut_off({1}, (), {0: "it was silent for 10 s", 1: "?"})
    assert why.startswith("cut off from host 0 (it was silent for 10 s): 1 of 2 hosts are here")


def test_who_was_cut_off_from_many_hosts_says_so_in_one_line() -> None:
    def why(count: int) -> str:
        standing = Standing(of(*range(count)))
        return standing.cut_off({count - 1}, (), {host: f"the link {host} broke" for host in range(count)})

    assert why(3).startswith("cut off from hosts 0, 1 (the link 0 broke; the link 1 broke): 1 of 3 hosts")
    many = why(1000)
    assert many.startswith("cut off from hosts 0, 1, 2, 3, 4, 5, 6, 7 and 991 more (the link 0 broke; ")
    assert len(many) < 400 and "7 broke and 991 more): 1 of 1000 hosts are here" in many


def test_more_than_half_go_on_without_the_coordinator() -> None:
    standing = Standing(of(0, 1, 2))
    assert standing.may_go_on({1, 2}, ()) and not standing.may_go_on({0}, ())
    assert standing.coordinator({0}) == 1 and standing.coordinator({2}) == 0
    assert standing.coordinator({0, 1, 2}) is None


@settings(max_examples=60)
@given(st.sets(st.integers(0, 7), min_size=1), st.data())
def test_of_the_sides_of_one_generation_at_most_one_goes_on(hosts: set[int], data: st.DataObject) -> None:
    """Whatever each side knows of the dead."""
    coordinator = data.draw(st.sampled_from(sorted(hosts)))
    where = {host: data.draw(st.integers(-1, 2), f"where {host} is, -1: dead") for host in sorted(hosts)}
    dead = {host for host, place in where.items() if place < 0}
    going = []
    for place in range(3):
        side = {host for host, at in where.items() if at == place}
        known = data.draw(st.sets(st.sampled_from(sorted(dead)))) if dead else set()
        if Standing(of(*hosts, coordinator=coordinator)).may_go_on(side, known):
            going.append(side)
            assert 2 * len(side) > len(hosts) or coordinator in side or side | known == hosts
    assert len(going) <= 1


@given(st.sets(st.integers(0, 7), min_size=1), st.sets(st.integers(0, 7)))
def test_all_that_live_go_on_if_all_know_who_is_dead(hosts: set[int], dead: set[int]) -> None:
    assert Standing(of(*hosts)).may_go_on(hosts - dead, dead) == bool(hosts - dead)


def test_an_older_generation_counts_until_all_have_heard_of_the_newer_one() -> None:
    before = Standing(of(0, 1, 2, 3))
    smaller = before.next({0, 1}, 0)
    told = before.publish(smaller)
    assert told.newest == smaller and told.coordinator(()) == 0
    assert told.may_go_on({0, 1}, ())
    assert not told.may_go_on({0}, ()), "host 1 may not have heard of it, and go on with 2 and 3"
    assert not told.may_go_on({1, 2, 3}, ()), "host 0 may go on"
    settled = told.settle(smaller)
    assert settled.may_go_on({0}, ()) and not settled.may_go_on({1, 2, 3}, ())
    assert before.merged(settled) == settled.merged(before) == settled
    assert before.merged(told) == told


def test_a_generation_is_settled_when_all_its_hosts_and_a_side_have_heard_of_it() -> None:
    before = Standing(of(0, 1, 2, 3))
    told = before.publish(before.next({0, 1}, 0))
    assert told.acknowledged({0}, ()) is None
    assert told.acknowledged({0, 2, 3}, ()) is None, "host 1 may go on in another one"
    assert told.acknowledged({0, 1}, ()) == told.settle(told.newest)
    alone = before.publish(before.next({0}, 0))
    assert alone.acknowledged({0}, ()) is None, "the other three may go on"
    assert alone.acknowledged({0}, {1, 2, 3}) == alone.settle(alone.newest)


def test_who_comes_back_is_nobody_in_an_older_generation() -> None:
    """Host 1 was cut off, and does not know that 0, 2 and 3 went on; 2 and 3 have forgotten it."""
    stale = Standing(of(0, 1, 2, 3))
    joined = stale.publish(stale.next({1}, 1, joining={2, 3}))
    assert not joined.may_go_on({1, 2, 3}, ()) and joined.acknowledged({1, 2, 3}, ()) is None
    together = stale.publish(stale.next({0, 1, 2}, 0, joining={3}))
    assert together.acknowledged({0, 1, 2, 3}, ()) == together.settle(together.newest)


def test_a_standing_travels() -> None:
    standing = Standing(of(0, 1, 2)).publish(Published(1, frozenset({0, 2}), 0, frozenset({2})))
    assert Standing.of(standing.message()) == standing
    bad: list[dict[str, Any]] = [{}, {"known": []}, {"known": [[1, 2, 3]]}, {"known": [[1, ["a"], 3, []]]}]
    for message in [*bad, {"known": [[1, [2], 2, []], ["x", [2], 2, []]]}]:
        with pytest.raises(ValueError, match="no standing"):
            Standing.of(message)


class Village:
    """Hosts that lose sight of each other, die, turn to others, and hear of some things and not of others."""

    def __init__(self, random: Random, hosts: int) -> None:
        self.random = random
        first = of(*range(hosts))
        self.standing = {host: Standing(first) for host in range(hosts)}  # of those that live and are in it
        self.follows = dict.fromkeys(range(hosts), 0)
        self.outside: set[int] = set()
        self.dead: set[int] = set()
        self.knows_dead: dict[int, set[int]] = {host: set() for host in range(hosts)}
        self.cut: set[frozenset[int]] = set()
        self.acknowledged: dict[Published, set[int]] = {}
        self.settled = [first]

    def some(self, hosts: Iterable[int]) -> set[int]:
        return {host for host in hosts if self.random.random() < 0.7}

    def reach(self, one: int, other: int) -> bool:
        return one == other or frozenset((one, other)) not in self.cut

    def side(self, leader: int) -> set[int]:
        return {host for host, followed in self.follows.items() if followed == leader}

    def knowledge(self, side: Iterable[int]) -> Standing:
        return functools.reduce(Standing.merged, (self.standing[host] for host in side))

    def may_go_on(self, side: Collection[int]) -> bool:
        return self.knowledge(side).may_go_on(side, self.known_dead(side))

    def known_dead(self, side: Iterable[int]) -> set[int]:
        return set().union(*(self.knows_dead[host] for host in side))

    def leaders(self) -> list[int]:
        return [host for host, followed in self.follows.items() if host == followed]

    def cut_or_mend(self) -> None:
        """One link, or all between two parts of the village."""
        everybody = [*self.standing, *self.outside, *self.dead]
        if self.random.random() < 0.5:
            self.cut ^= {frozenset(self.random.sample(everybody, 2))}
        else:
            part = set(self.random.sample(everybody, self.random.randrange(len(everybody))))
            self.cut = {frozenset((one, other)) for one in part for other in everybody if other not in part}

    def die(self) -> None:
        if len(self.standing) > 1 and self.random.random() < 0.3:
            host = self.random.choice(list(self.standing))
            followed, hosts = self.follows.pop(host), self.standing.pop(host).newest.hosts
            self.dead.add(host)
            for witness in self.side(followed) & hosts:  # whom it still has a link to
                if self.reach(host, witness):
                    self.knows_dead[witness].add(host)

    def turn(self) -> None:
        """Some hosts notice that they have lost their coordinator."""
        for host in self.some(self.standing):
            self.turn_from(host, self.follows[host])

    def turn_from(self, host: int, leader: int) -> None:
        """... and turn to the lowest that they reach, if it leads, or lead."""
        if leader in self.standing and self.reach(host, leader) and self.follows[leader] == leader:
            return
        lost = self.standing[host].newest.hosts - {h for h in self.standing if self.reach(host, h)}
        turned_to = self.standing[host].coordinator((lost | {leader}) - {host})
        if turned_to is not None and (turned_to == host or turned_to in self.leaders()):
            self.follows[host] = turned_to

    def publish(self) -> None:
        """A coordinator changes who is in. Who it believes to follow it may have turned to another by now."""
        for leader in self.leaders():
            heard = {host for host in self.side(leader) if self.reach(host, leader)}
            side = heard | self.some(self.some(self.standing.keys()))
            known = self.knowledge(heard)
            if not known.may_go_on(side, self.known_dead(heard)):
                continue
            joining = {host for host in self.some(self.outside) if self.reach(host, leader)}
            staying = heard if self.random.random() < 0.8 else self.some(side)
            if staying == known.newest.hosts:
                continue
            published = known.next(staying | {leader}, leader, joining)
            self.acknowledged[published] = told = {leader, *self.some(heard | joining)}
            for host in told:
                self.standing[host], self.follows[host] = known.publish(published), leader
            self.outside -= told

    def settle(self) -> None:
        """A coordinator hears who has heard of its newest generation, and tells some of them."""
        for leader in self.leaders():
            newest = self.standing[leader].newest
            if newest.coordinator != leader or newest == self.standing[leader].settled:
                continue
            dead = self.knows_dead[leader]
            settled = self.standing[leader].acknowledged(self.acknowledged[newest], dead)
            if settled is not None:
                self.settled.append(newest)
                for host in self.some(newest.hosts) | {leader}:
                    if host == leader or self.follows.get(host) == leader:
                        self.standing[host] = self.standing[host].merged(settled)

    def fence(self) -> None:
        """A host whose side may not go on leaves."""
        host = self.random.choice(list(self.standing))
        side = self.side(self.follows[host]) | {host}
        if len(self.standing) > 1 and not self.may_go_on(side):
            del self.standing[host], self.follows[host]
            self.outside.add(host)

    def going(self) -> list[int]:
        """Leaders of the sides that may go on, if they know all that their hosts know."""
        return [leader for leader in self.leaders() if self.may_go_on(self.side(leader))]


def walk(village: Village, steps: int) -> None:
    acts = [village.cut_or_mend, village.die, village.turn, village.publish, village.settle, village.fence]
    for act in village.random.choices(acts, (4, 1, 8, 4, 4, 1), k=steps):
        act()
        assert len(village.going()) <= 1, f"two sides: {village.follows}, {village.standing}"


@settings(max_examples=60)
@given(st.integers(0, 2**64), st.integers(2, 6))
def test_at_no_time_two_sides_may_go_on(seed: int, hosts: int) -> None:
    village = Village(Random(seed), hosts)
    walk(village, 100)
    if not village.dead:
        numbers = [published.number for published in village.settled]
        assert numbers == sorted(set(numbers)), f"more than one line of descent: {village.settled}"


def test_the_village_lives() -> None:
    """The walks above do what they are for: several coordinators settle generations, one after the other."""
    led, most = set(), 0
    for seed in range(20):
        village = Village(Random(seed), 5)
        walk(village, 100)
        led |= {published.coordinator for published in village.settled}
        most = max(most, len(village.settled))
    assert len(led) > 2 and most > 5, f"{led} led, {most} generations"
