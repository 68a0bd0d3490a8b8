"""Which copies are read after a death, and which travel between hosts."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
import torch.distributed as dist

from imece.cli.launch.options import MOST_RANKS
from imece.errors import UserError
from imece.membership.offers import Offer, handed_over, newest_whole, of_step, on_host, travelling
from imece.membership.roster import Generation, Roster

HOSTS = [[0, 1], [2, 3]]


def offers(
    *, number: int = 1, hosts: list[list[int]] = HOSTS, steps: tuple[int, ...] = (4, 5), places: int = 4
) -> list[Offer]:
    """Each rank offers all copies of its host; with fewer places than ranks, hosts have the same."""
    return [
        Offer(holder, number, maker, maker % places, places, steps, (holder, maker, 0))
        for host in hosts
        for holder, maker in product(host, host)
    ]


def test_the_newest_step_that_all_places_have() -> None:
    assert newest_whole(offers()) == (1, 5)
    one_is_behind = [each._replace(steps=(4,)) if each.maker == 2 else each for each in offers()]
    assert newest_whole(one_is_behind) == (1, 4)
    of_two_sets = [*offers(), *offers(number=2, steps=(6,))]
    assert newest_whole(of_two_sets) == (2, 6)
    not_everywhere = [*offers(), *offers(number=2, steps=(6,), hosts=[HOSTS[0]])]
    assert newest_whole(not_everywhere) == (1, 5)
    assert newest_whole(offers(hosts=[HOSTS[0]])) is None
    assert newest_whole([]) is None
    assert newest_whole(offers(steps=())) is None


def test_a_replica_is_as_good() -> None:
    hybrid = offers(places=2)
    assert newest_whole([each for each in hybrid if each.holder == 3]) == (1, 5)
    one_is_behind = [each._replace(steps=(4,)) if each.maker == 0 else each for each in hybrid]
    assert newest_whole(one_is_behind) == (1, 5)  # rank 2 has the same place
    assert travelling(of_step(hybrid, 1, 5), HOSTS) == []


def test_what_a_host_reads_and_what_travels() -> None:
    # Rank 1 has died: those that were 2 and 3 are 1 and 2, and 3 is new on the first host.
    holders, hosts = {0: 0, 2: 1, 3: 2}, [[0, 3], [1, 2]]
    left = [each._replace(holder=holders[each.holder]) for each in offers() if each.holder != 1]
    chosen = of_step(left, 1, 5)
    assert {place: each.holder for place, each in on_host(chosen, hosts[0], 3).items()} == {0: 0, 1: 0}
    assert {place: each.holder for place, each in on_host(chosen, hosts[1], 2).items()} == {2: 2, 3: 2}
    assert [(each.place, each.maker, each.holder) for each in travelling(chosen, hosts)] == [
        (0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 1),
    ]  # fmt: skip
    assert travelling(chosen, [[0, 1, 2, 3]]) == []  # on one host all read all


def test_what_would_leave_with_its_host() -> None:
    assert handed_over([0, 1, 2, 3], HOSTS, {1}) == []  # its neighbour has it
    assert handed_over([0, 1, 2, 3], HOSTS, {2, 3}) == [(2, 2, 0), (3, 3, 1)]
    assert handed_over([0, 1, 2, 3], HOSTS, {0, 1, 2}) == [(0, 0, 3), (1, 1, 3)]
    assert handed_over([0, 1, 0, 1], HOSTS, {2, 3}) == []  # a replica stays
    assert handed_over([0, 1, 2, 3], HOSTS, {0, 1, 2, 3}) == []  # nobody is left to have it


def test_who_leaves_is_told() -> None:
    roster = Roster(dist.HashStore())
    for generation in (Generation(3, (0, 2)), Generation(4, (0, 2, 5), ("rank 1 was killed",), (2, 5))):
        roster.publish(generation)
        assert roster.generation(generation.number) == generation
    most = Generation(5, tuple(range(1_000_000, 1_000_000 + MOST_RANKS)))
    roster.publish(most)
    assert roster.generation(5) == most
    store = dist.HashStore()
    store.set("imece/members/1", '{"members": [1], "leaving": "all"}')
    with pytest.raises(UserError, match="generation 1 names no members"):
        Roster(store).generation(1)
    store.set("imece/members/1", '{"members": [1]}')  # of a launcher that knows nothing of it
    assert Roster(store).generation(1).leaving == ()


def test_a_member_that_is_forgotten_while_its_beat_is_asked_for_holds_nobody_up() -> None:
    """A drill asks in a thread of its own."""

    class Forgets(dist.Store):
        """Between a question and its answer."""

        def check(self, keys: list[str]) -> bool:
            known = store.check(keys)
            Roster(store).forget(7)
            return known

        def get(self, key: str) -> bytes:
            return store.get(key)

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    store.set("imece/members/beat/7", "3 1")
    assert Roster(store).beat(7) == (3, 1)
    assert Roster(Forgets()).beat(7) is None
    assert Roster(store).beat(7) is None
