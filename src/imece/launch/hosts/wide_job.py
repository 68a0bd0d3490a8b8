"""A job on several hosts: hosts come, leave and are lost, and another launcher may continue it.

parting   a host whose members will leave in order: nobody is started there any more
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from imece.launch.endings import Ending
from imece.launch.generations import Limits
from imece.launch.host import Hands
from imece.launch.hosts.wide_generations import WideGenerations
from imece.launch.hosts.words import Report
from imece.launch.job import AFTER_FAILURE_S, Job
from imece.membership.roster import Generation


class WideJob(Job):
    """The ranks of one run, on the hosts that it has at the moment."""

    def __init__(
        self,
        limits: Limits,
        grace_s: float,
        hands: Mapping[int, Hands],
        per_host: int,
        anew: Callable[[], None],
    ) -> None:
        """anew: called when all ranks have ended, before they start again."""
        super().__init__(limits, grace_s, False, hands, per_host)
        self.generations: WideGenerations = WideGenerations(limits)
        self.all_endings: dict[int, Ending] = {}
        """Endings of members on all hosts."""
        self._anew = anew
        self._parting: set[int] = set()
        self._set_places()

    def begin_after(self, snapshot: Mapping[str, Any] | None, generation: int, members: int) -> None:
        """There was a job on these hosts before: only its numbers are left, which are not used again."""
        if snapshot is not None:
            self.generations.restore(snapshot)
            self.generations.slots = {}
            self.generations.starts += 1
            self.generations.stopping = False
        self.generations.follow_up(Generation(generation, ()), members)

    def ended(self, endings: Mapping[int, Ending], now: float) -> None:
        self.all_endings |= endings
        super().ended(endings, now)

    def has_members(self, host: int) -> bool:
        """Whether any live there."""
        return any(slot // self._per_host == host for slot in self.generations.slots.values())

    def take(self, host: int, hands: Hands) -> None:
        """There is one more host, without ranks: `fill` starts them, or the next start of all does."""
        self.hands[host] = hands
        self._set_places()

    def takes_in(self) -> bool:
        """Whether newcomers are of use now."""
        generations = self.generations
        return self.is_calm and not generations.is_ending and generations.all_go_on(self._all_resilient)

    def fill(self, host: int) -> None:
        """Start members in the slots of a host that has none, to join the others."""
        for slot in self._empty(self._slots_of(host)):
            self._replace(slot)

    def leave(self, host: int) -> bool:
        """Let a host's members leave in order, if the others go on without them; False if they do not."""
        if not self.takes_in():
            return False
        members = self._by_host(self.generations.slots).get(host, [])
        joining = [member for member in members if member in self.generations.joining]
        leaving = [member for member in members if member in self.generations.newest.members]
        newest = self.generations.newest
        generation = self.generations.leave(leaving) if leaving else None
        if leaving and generation is None:
            return False
        self._parting.add(host)
        self._set_places()
        self._let_go |= set(joining)
        self._end_ranks(joining, signal.SIGTERM, AFTER_FAILURE_S)
        if generation is not None:
            if generation != newest:
                self._publish(generation)
            self._poll_at = 0.0
            self.hands[host].end(leaving, 0, self._grace_s)
        return True

    def cut_short(self, host: int) -> None:
        """End the members of a host at once."""
        self._end_ranks(self._by_host(self.generations.slots).get(host, []), signal.SIGKILL, 0.0)

    def lose(self, hosts: Mapping[int, str], now: float) -> None:
        """These hosts are gone with all their members. hosts: number -> how it was lost, in words."""
        for host in hosts:
            del self.hands[host]
            self._parting.discard(host)
        self._set_places()
        slots = self.generations.slots.items()
        members = {m: hosts[slot // self._per_host] for m, slot in slots if slot // self._per_host in hosts}
        self.ended(self._lost(members, now), now)

    def resume(
        self, snapshot: Mapping[str, Any], reports: Mapping[int, Report], why: str, now: float
    ) -> None:
        """Continue another host's job, with the reports of all hosts that are left.

        why: in words, how members ended that nobody reports. KeyError, TypeError or ValueError if `snapshot`
        is not valid.
        """
        generations = self.generations
        generations.restore(snapshot)
        living = {m: seen for report in reports.values() for m, seen in report.members.items()}
        endings = {m: ending for report in reports.values() for m, ending in report.endings.items()}
        newest = max((report.newest for report in reports.values()), key=lambda each: each.number)
        generations.follow_up(newest, 1 + max([*living, *endings, *newest.members], default=-1))
        held = {seen.slot for seen in living.values()}
        for member in [m for m, slot in generations.slots.items() if m not in living and slot in held]:
            generations.remove(member)  # all were starting again: others have come in its place
        for member, seen in living.items():
            generations.resume(member, seen.slot)
        self._set_places()
        number = generations.newest.number
        gone = {member: endings[member] for member in endings if member in generations.slots}
        missing = [m for m in generations.slots if m not in living and m not in gone]
        self.ended(gone | self._lost(dict.fromkeys(missing, why), now), now)
        if generations.stopping:
            self.signalled(signal.SIGTERM, " on a host that is gone")
        if not self.is_calm:
            return
        if not generations.slots:
            if not generations.is_ending:  # nobody has come to the end: whoever led would have started some
                stands_for_all = generations.start_one(generations.places[0], now)
                self.ended(self._lost({stands_for_all: why}, now), now)
            return
        if generations.newest.number == number:
            self._publish(generations.renew())  # the store in which the last generation was meeting is gone
        if not generations.is_ending:
            empty = self._empty(generations.places)
            self._replacements += [(now, slot) for slot in empty if self.has_members(slot // self._per_host)]

    def _poll(self, now: float) -> None:
        super()._poll(now)
        leaving = self._by_host(self.generations.leaving).items()
        closed = [member for host, members in leaving for member in self.hands[host].closed(members)]
        verdict = self.generations.closed(closed, now)
        if verdict is not None:
            self._follow(verdict)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._anew()

    def _lost(self, members: Mapping[int, str], now: float) -> dict[int, Ending]:
        slots, per_host = self.generations.slots, self._per_host
        return {
            member: Ending(slots[member], 0, -signal.SIGKILL, now, host=slots[member] // per_host, lost=why)
            for member, why in members.items()
        }

    def _empty(self, slots: Iterable[int]) -> list[int]:
        """Those that have no member and are about to get none."""
        taken = {*self.generations.slots.values(), *(slot for _, slot in self._replacements)}
        return [slot for slot in slots if slot not in taken]

    def _slots_of(self, host: int) -> range:
        return range(host * self._per_host, (host + 1) * self._per_host)

    def _set_places(self) -> None:
        hosts = sorted(self.hands.keys() - self._parting)
        self.generations.places = [slot for host in hosts for slot in self._slots_of(host)]
        self._replacements = [
            (at, slot) for at, slot in self._replacements if slot in self.generations.places
        ]
