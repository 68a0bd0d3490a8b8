"""After a death: which copies are read, and which of them must travel between hosts. Pure.

    set      the copies that the ranks of a generation made together; a higher number is a later one
    place    which part of the whole a copy holds: its maker's rank among those that divide the model. One
             copy of each place is everything. With hybrid strategies each host has all places
    maker    the rank that made a copy, in the generation of its set
    holder   a rank of the new generation that can read it

All ranks know all offers, and come to the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Offer(NamedTuple):
    """One holder's offer of one copy."""

    holder: int
    number: int  # of the set
    maker: int
    place: int
    places: int
    steps: tuple[int, ...]
    """The steps for which it is complete."""
    where: tuple[int, int, int]
    """Process id of the holder, and what others on its host need to map the copy there."""


class Handed(NamedTuple):
    """A copy that only leaving ranks would have goes to one that stays."""

    place: int
    sender: int
    receiver: int


def newest_whole(offers: Iterable[Offer]) -> tuple[int, int] | None:
    """The latest set of which all places are offered as of one step, and the newest such step."""
    offers = list(offers)
    for number in sorted({offer.number for offer in offers}, reverse=True):
        of_set = [offer for offer in offers if offer.number == number]
        found = [
            {step for offer in of_set if offer.place == place for step in offer.steps}
            for place in range(of_set[0].places)
        ]
        if common := set.intersection(*found):
            return number, max(common)
    return None


def of_step(offers: Iterable[Offer], number: int, step: int) -> list[Offer]:
    """The offers of one set that have this step, the first maker's first."""
    found = [offer for offer in offers if offer.number == number and step in offer.steps]
    return sorted(found, key=lambda offer: (offer.maker, offer.holder))


def on_host(offers: Sequence[Offer], host: Collection[int], rank: int) -> dict[int, Offer]:
    """By place, the copy on this host that a rank reads: one that it holds itself if possible."""
    found: dict[int, Offer] = {}
    for offer in sorted(offers, key=lambda offer: (offer.maker, offer.holder != rank)):
        if offer.holder in host:
            found.setdefault(offer.place, offer)
    return found


def travelling(offers: Sequence[Offer], hosts: Sequence[Collection[int]]) -> list[Offer]:
    """For each place that some host has no copy of, the copy that is sent to all."""
    host_of = {rank: at for at, host in enumerate(hosts) for rank in host}
    has: list[set[int]] = [set() for _ in hosts]
    for offer in offers:
        has[host_of[offer.holder]].add(offer.place)
    lacking = {place for places in has for place in places} - set[int].intersection(*has)
    firsts = {offer.place: offer for offer in reversed(offers) if offer.place in lacking}
    return [firsts[place] for place in sorted(firsts)]


def handed_over(
    places: Sequence[int], hosts: Sequence[Collection[int]], leaving: Collection[int]
) -> list[Handed]:
    """What would be lost with leaving hosts, and who takes it. places: of the copy that each rank
    has made."""
    staying = [rank for rank in range(len(places)) if rank not in leaving]
    stay = {places[rank] for host in hosts if not set(host) <= set(leaving) for rank in host}
    go = sorted({places[rank] for rank in leaving} - stay)
    if not staying:
        return []
    return [Handed(place, places.index(place), staying[at % len(staying)]) for at, place in enumerate(go)]
