"""The ranks of a host map copies of each other's parts; after a death, the copies of all hosts
restore everything.

    copy    of one rank's part, after each of its last two steps (copy.py)
    set     the copies of all ranks of a generation; a rank maps those of its host

A rank writes its copy before it takes part in the sum of the next step. So a rank that can write the copy of
step n knows that all have written that of step n - 1, or have asked for a new set because it did not fit; in
that case no rank of their host writes until all have exchanged copies anew. So whenever a rank dies, there is
a step that all copies have. A host that lacks a copy gets it from another one (streams.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from imece.collectives import ops
from imece.collectives.texts import gather_json, gather_texts
from imece.errors import UserError
from imece.membership.copy import Copy, Held
from imece.membership.offers import Offer, handed_over, newest_whole, of_step, on_host, travelling
from imece.membership.pieces import Pieces
from imece.membership.streams import NeededOf, Receiver, Stream
from imece.mesh import Mesh

_CPU = torch.device("cpu")


@dataclass
class _Mapped:
    """One of the copies that this rank can read. offers.py defines the words."""

    copy: Copy
    maker: int
    place: int


@dataclass
class _Set:
    places: int
    place_of: list[int]  # by rank of the generation that made it
    mapped: list[_Mapped]

    def close(self) -> None:
        for each in self.mapped:
            each.copy.close()


class Copies:
    """The newest set of copies that this rank has mapped, its own copy among them."""

    def __init__(self, mesh: Mesh, check: Callable[[], object] = lambda: None) -> None:
        """check: raises if what has come from other hosts may have been aborted on its way."""
        self._mesh, self._check = mesh, check
        self._own: Copy | None = None
        self._sets: dict[int, _Set] = {}  # by number; more than one only while a new one is made
        self._made = 0  # sets so far, over all generations: the same number on all ranks that were there

    def asked(self, step: int) -> bool:
        """Whether a rank of this host asked for a new set before it had finished so many steps.

        A rank asks before it takes part in a sum. So after the sum of a step, all know who asked in the step
        before.
        """
        return any(each.copy.asks < step for each in self._sets[self._made].mapped)

    def write(self, step: int, held: Held) -> bool:
        """Copy what this rank holds after `step` finished steps. False if it does not fit: then all are asked
        to `exchange`."""
        return self._own is not None and self._own.write(step, held)

    def exchange(
        self,
        step: int,
        held: Held,
        place: tuple[int, int] | None = None,
        still: Held = MappingProxyType({}),
    ) -> str:
        """Make a new set, of `step` finished steps. All ranks of the generation call this.

        still: what no step changes, so that `write` leaves it out.
        place: which part of the whole this rank has, of how many; by default its rank, of all.
        The old set stays until all ranks have the new one. Returns why there is none if memory is lacking,
        else "".
        """
        group, hosts = self._mesh.world_group, self._mesh.hosts
        at, places = place or (group.rank(), group.size())
        with contextlib.ExitStack() as unless_done:
            try:
                own = Copy.of(held, still)
                unless_done.callback(own.close)
                own.write(step, held)
                mine = {"where": [*_where(own), at], "made": self._made}
            except UserError as error:
                mine = {"lacking": str(error)}
            said = gather_json(mine, group, self._mesh.device, "copies in memory")
            if lacking := [each["lacking"] for each in said if "lacking" in each]:
                self.drop()
                return str(lacking[0])
            wheres = [each["where"] for each in said]
            new = _Set(places, [int(each[3]) for each in wheres], [])
            for maker in next(host for host in hosts if group.rank() in host):
                pid, fd, serial, of = wheres[maker]
                copy = own if maker == group.rank() else Copy.at(pid, fd, serial, keep=True)
                if copy is not own:
                    unless_done.callback(copy.close)
                new.mapped.append(_Mapped(copy, maker, of))
            ops.barrier(group=group)  # now all have opened the copies of their host
            unless_done.pop_all()
        self._made = max(each["made"] for each in said) + 1
        self._sets[self._made], self._own = new, own
        # If a rank dies before all know the new set, other hosts may have only its copy in the old one.
        ops.barrier(group=group)
        self._close([number for number in self._sets if number != self._made])
        return ""

    def forget(self) -> None:
        """Let go of the tensors copied last, whose memory is to be freed."""
        if self._own is not None:
            self._own.forget()

    def drop(self) -> None:
        """Let go of all copies."""
        self._close(list(self._sets))
        self._own = None

    def _close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._sets.pop(number).close()

    # After a death.

    def note(self) -> dict[str, Any]:
        """What this rank can offer, for the others to read."""
        offers = [
            [number, each.maker, each.place, of.places, sorted(each.copy.steps), _where(each.copy)]
            for number, of in self._sets.items()
            for each in of.mapped
        ]
        return {"rank": self._mesh.rank, "made": self._made, "offers": offers}

    def recovered(
        self,
        notes: Iterable[Mapping[str, Any]],
        needs: NeededOf | None = None,
        device: torch.device = _CPU,
    ) -> tuple[int, Pieces] | None:
        """The newest step for which copies of everything exist, and their contents; None if there is none.

        notes: of all ranks of the new generation, which call this together and get the same step. needs:
        which elements this rank keeps of copies from other hosts; by default all. device: on which ranks of
        several hosts move tensors.
        """
        notes = list(notes)
        self._made = max(self._made, *(int(note["made"]) for note in notes))
        offers = [_offer(int(note["rank"]), each) for note in notes for each in note["offers"]]
        newest = newest_whole(offers)
        if newest is None:
            return None
        number, step = newest
        offers, pieces = of_step(offers, number, step), Pieces()
        hosts, rank = self._mesh.hosts, self._mesh.rank
        own = on_host(offers, next(host for host in hosts if rank in host), rank)
        for place in sorted(own):
            self._copy(own[place], rank).read(step, pieces)
        for offer in travelling(offers, hosts):
            copy = self._copy(offer, rank) if offer.holder == rank else None
            stream = Stream(copy, offer.holder, self._mesh.world_group, device, "a part from another host")
            receiver = Receiver(stream, needs) if offer.place not in own else None
            for low, chunk in stream.chunks(step):
                if receiver is not None:
                    receiver.take(low, chunk)
            self._check()
            if receiver is not None:
                receiver.give(pieces)
        return step, pieces

    def _copy(self, offer: Offer, rank: int) -> Copy:
        """An offered copy, mapped now or earlier."""
        if offer.holder == rank:
            mapped = self._sets[offer.number].mapped
            return next(each.copy for each in mapped if each.maker == offer.maker)
        return Copy.at(*offer.where, keep=False)

    # Before some members leave.

    def hand_over(self, step: int, leaving: Collection[int], device: torch.device) -> str:
        """Give what only leaving ranks have of the newest set to ranks that stay. All ranks call this.

        Returns why it was impossible if memory is lacking, else "".
        """
        group, newest = self._mesh.world_group, self._sets[self._made]
        mine = []
        for each in handed_over(newest.place_of, self._mesh.hosts, leaving):
            copy = self._own if each.sender == group.rank() else None
            stream = Stream(copy, each.sender, group, device, "a part that would leave with its host")
            try:
                receives = each.receiver == group.rank()
                sizes = stream.slot_bytes, stream.still_bytes
                kept = Copy.blank(stream.raw_table, *sizes) if receives else None
            except UserError as error:
                kept = None  # the others are about to send it all the same
                mine.append(str(error))
            for low, chunk in stream.chunks(step):
                if kept is not None:
                    kept.span(step, low, len(chunk)).copy_(chunk)
            self._check()
            if kept is not None:
                kept.complete(step)
                newest.mapped.append(_Mapped(kept, each.sender, each.place))
        said = gather_texts(mine, group, device, "parts that were handed over")
        return next((texts[0] for texts in said if texts), "")


def _where(copy: Copy) -> list[int]:
    return [os.getpid(), copy.memory.fd, copy.memory.serial]


def _offer(holder: int, said: list[Any]) -> Offer:
    number, maker, place, places, steps, where = said
    return Offer(holder, number, maker, place, places, tuple(steps), (where[0], where[1], where[2]))
