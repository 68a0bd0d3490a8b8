"""A running job on several hosts, as seen by another thread beside the agent that leads it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from imece.launch.endings import Ending
from imece.launch.hosts.wide_job import WideJob
from imece.launch.hosts.words import Seen
from imece.launch.view import Place
from imece.membership.roster import Generation


@dataclass(frozen=True)
class _Known:
    """What the leader knows at a moment; replaced as a whole, as another thread reads it."""

    newest: int = -1
    generations: Mapping[int, Generation] = field(default_factory=dict)
    seen: Mapping[int, Seen] = field(default_factory=dict)
    endings: Mapping[int, Ending] = field(default_factory=dict)


class WideView:
    """It is its own roster: what members say comes from the agents of their hosts, and is a moment old."""

    def __init__(self, per_host: int, hit: Callable[[int, int, int], None]) -> None:
        """per_host: ranks. hit: called with a host, a member there, and the number of a signal for it."""
        self.over = threading.Event()
        """Set once all is over for this host."""
        self._per_host, self._hit, self._known = per_host, hit, _Known()
        self._gone_on: dict[tuple[int, int], tuple[float, int]] = {}

    @property
    def roster(self) -> WideView:
        """What members say."""
        return self

    def look(self, job: WideJob, seen: Mapping[int, Seen]) -> None:
        """The agent that leads tells how things are."""
        for member, each in seen.items():
            for generation, time_s, again in each.gone_on:
                self._gone_on.setdefault((member, generation), (time_s, again))
        newest = job.generations.newest
        generations = {**self._known.generations, newest.number: newest}
        self._known = _Known(newest.number, generations, dict(seen), dict(job.all_endings))

    def living(self) -> dict[int, Place]:
        """The members that have not ended."""
        known = self._known
        return {
            member: Place(each.slot, each.pid, each.slot // self._per_host)
            for member, each in known.seen.items()
            if member not in known.endings
        }

    def ending(self, member: int) -> Ending | None:
        """How it ended; None while it lives, or if there is no such member."""
        return self._known.endings.get(member)

    def signal(self, member: int, number: int) -> bool:
        """Make its host send it a signal; False if it has ended."""
        place = self.living().get(member)
        if place is None:
            return False
        self._hit(place.host or 0, member, number)
        return True

    def end(self) -> None:
        """End the job as Ctrl-C would, or SIGTERM if that is ignored."""
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)

    def newest(self) -> int:
        """The newest generation's number; -1 before the first."""
        return self._known.newest

    def generation(self, number: int) -> Generation:
        """A generation that was seen here; one that was over at once may not have been, and then has
        no members."""
        return self._known.generations.get(number, Generation(number, ()))

    def all_resilient(self, members: Iterable[int]) -> bool:
        """Whether each of them would go on without another. False for none."""
        seen, members = self._known.seen, list(members)
        return bool(members) and all(member in seen and seen[member].resilient for member in members)

    def beat(self, member: int) -> tuple[int, int] | None:
        """(beats, finished steps) as it last said; None before its first beat."""
        each = self._known.seen.get(member)
        return None if each is None or each.beats is None else (each.beats, each.steps)

    def went_on(self, member: int, generation: int) -> tuple[float, int] | None:
        """When a member finished its first step in a generation, and how many it had to make again."""
        return self._gone_on.get((member, generation))
