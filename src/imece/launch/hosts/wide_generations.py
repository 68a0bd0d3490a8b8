"""Generations that another launcher can continue: what it must know, and what it may find beyond that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imece.launch.generations import Generations
from imece.membership.roster import Generation


class WideGenerations(Generations):
    """The members of a job on several hosts, any of which may come to lead it."""

    def snapshot(self) -> dict[str, Any]:
        """All that another launcher must know to continue in place of this one, as JSON."""
        newest = self.newest
        return {
            "newest": [newest.number, list(newest.members)],
            "slots": list(self.slots.items()),
            "joining": self.joining,
            "leaving": sorted(self.leaving),
            "left": sorted(self.left),
            "newcomers": list(self._newcomers.items()),
            "starts": self.starts,
            "stopping": self.stopping,
            "members": self._members,
            "finished": self._finished,
            "deaths": self._deaths,
            "steps": [self._steps_then, self._steps],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what another's snapshot says. KeyError, TypeError or ValueError if it is not valid."""
        number, members = snapshot["newest"]
        self.newest = Generation(int(number), tuple(map(int, members)))
        self.slots = {int(member): int(slot) for member, slot in snapshot["slots"]}
        self.joining = list(map(int, snapshot["joining"]))
        self.leaving = set(map(int, snapshot["leaving"]))
        self.left = set(map(int, snapshot["left"]))
        self._newcomers = {int(member): int(steps) for member, steps in snapshot["newcomers"]}
        self.stopping = bool(snapshot["stopping"])
        self.starts, self._members = int(snapshot["starts"]), int(snapshot["members"])
        self._finished, self._deaths = bool(snapshot["finished"]), int(snapshot["deaths"])
        self._steps_then, self._steps = (None if steps is None else int(steps) for steps in snapshot["steps"])
        self._started_s = dict.fromkeys(self.slots, 0.0)

    def follow_up(self, newest: Generation | None, members: int) -> None:
        """There may have been a newer generation, and more members (`members` numbers), than is
        known here."""
        self._members = max(self._members, members)
        if newest is not None and newest.number > self.newest.number:
            self.newest = newest
            self.joining = [member for member in self.joining if member not in newest.members]

    def resume(self, member: int, slot: int) -> None:
        """A member lives, whatever the snapshot said."""
        if member not in self.slots:
            self.slots[member], self._started_s[member] = slot, 0.0
            if member not in self.newest.members:
                self.joining.append(member)
