"""Which side of a cut goes on, and who leads it: pure, from what a host knows.

    coordinator   the host whose agent makes generations; every other one follows it
    side          a coordinator and those that follow it. A host follows one at a time, and turns to another
                  only when it has lost its coordinator
    dead          surely so. Nobody knows whether a host that is only silent goes on
    published     a generation that its coordinator has told to some of its hosts
    settled       one that all of its hosts, and a side that may go on, are known to have heard of

A side may go on if it has more than half of a generation's hosts, or half of them and its coordinator, or if
all others are dead. As two sides have no host in common, no two sides may. But for that all must count alike,
and a host that has not heard of the newest generation counts the hosts of an older one. So a newer generation
counts beside the older ones until it is settled: a side must have enough of each. A host that has joined
since does not count in an older one, even if it was in that: it has forgotten what it knew.

The dead are not simply left out of the count: they may have gone on elsewhere before they died.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from imece.listing import some

_NAMED = 8  # most hosts, and ends of links, that one line names


@dataclass(frozen=True)
class Published:
    """The hosts of a generation."""

    number: int
    hosts: frozenset[int]
    coordinator: int
    """The host that published it."""
    joined: frozenset[int] = frozenset()
    """Hosts that did not follow it before, but came, or came again."""

    def enough(self, side: Collection[int], dead: Collection[int]) -> bool:
        """Whether `side` may go on, as far as this generation is concerned."""
        own, all_ = self.hosts.intersection(side), len(self.hosts)
        if 2 * len(own) == all_ and self.coordinator in own:
            return True
        return 2 * len(own) > all_ or (bool(own) and self.hosts.issubset(own.union(dead)))


@dataclass(frozen=True)
class Standing:
    """What one host knows about the generations that count. A host that may not go on forgets it; it gets a
    new one from those whom it joins."""

    settled: Published
    newer: tuple[Published, ...] = ()
    """In the order of their numbers; not known to be settled."""

    @property
    def newest(self) -> Published:
        """The generation whose coordinator is the one to follow."""
        return self.newer[-1] if self.newer else self.settled

    def may_go_on(self, side: Collection[int], dead: Collection[int]) -> bool:
        """Whether `side`, whose hosts' knowledge this is, may go on."""
        return self._lacking(side, dead) is None

    def coordinator(self, lost: Collection[int]) -> int | None:
        """Whom a host follows that has lost these: the coordinator, or else the lowest host; None: nobody."""
        hosts = self.newest.hosts.difference(lost)
        return self.newest.coordinator if self.newest.coordinator in hosts else min(hosts, default=None)

    def next(self, side: Iterable[int], coordinator: int, joining: Iterable[int] = ()) -> Published:
        """What the coordinator of a side that may go on publishes: who stays, and who joins."""
        joined = frozenset(joining)
        return Published(self.newest.number + 1, joined.union(side), coordinator, joined)

    def publish(self, published: Published) -> Self:
        """... and what a host that hears of it then knows; the host says so to its coordinator."""
        return self._with([self.settled], [*self.newer, published])

    def acknowledged(self, by: Collection[int], dead: Collection[int]) -> Self | None:
        """What its coordinator knows when the hosts `by`, including itself, have said that they have heard of
        the newest generation and follow it: that it is settled. None: not yet."""
        enough = self.newest.hosts.issubset(by) and self.may_go_on(by, dead)
        return self.settle(self.newest) if enough else None

    def settle(self, published: Published) -> Self:
        """The generation is settled, so older ones no longer count."""
        return self._with([self.settled, published], self.newer)

    def merged(self, other: Standing) -> Self:
        """What two hosts of one side know together; a new coordinator must know what all of its side do."""
        return self._with([self.settled, other.settled], [*self.newer, *other.newer])

    def cut_off(self, side: Collection[int], dead: Collection[int], whys: Mapping[int, str]) -> str:
        """Why a side that may not go on does not. whys: how links to hosts have ended, in words."""
        lacking = self._lacking(side, dead)
        assert lacking is not None, "it may go on"
        missing = sorted(lacking.hosts.difference(side, dead))
        who = f"host{'s' * (len(missing) > 1)} {some(missing, _NAMED)}"
        causes = some(list(dict.fromkeys(whys[host] for host in missing if host in whys)), _NAMED, "; ")
        return (
            f"cut off from {who}{causes and f' ({causes})'}: "
            f"{len(lacking.hosts.intersection(side))} of {len(lacking.hosts)} hosts are here, and the others "
            "may be going on"
        )

    def message(self) -> dict[str, Any]:
        """The message to send."""
        known = [self.settled, *self.newer]
        return {"known": [[p.number, sorted(p.hosts), p.coordinator, sorted(p.joined)] for p in known]}

    @classmethod
    def of(cls, message: dict[str, Any]) -> Self:
        """What `message` says; ValueError if it is not valid."""
        known = message.get("known")
        if not isinstance(known, list) or not known:
            raise ValueError("no standing")
        first, *newer = map(_published, known)
        return cls(first, tuple(newer))

    def _lacking(self, side: Collection[int], dead: Collection[int]) -> Published | None:
        """The newest generation of whose hosts there are not enough."""
        left = set(side)
        for published in (*reversed(self.newer), self.settled):
            if not published.enough(left, dead):
                return published
            left -= published.joined
        return None

    def _with(self, settled: Iterable[Published], newer: Iterable[Published]) -> Self:
        last = max(settled, key=lambda published: published.number)
        left = {published for published in newer if published.number > last.number}
        return type(self)(last, tuple(sorted(left, key=lambda p: (p.number, p.coordinator))))


def _published(entry: object) -> Published:
    match entry:
        case [int(number), list(hosts), int(coordinator), list(joined)] if all(
            isinstance(host, int) for host in (*hosts, *joined)
        ):
            return Published(number, frozenset(hosts), coordinator, frozenset(joined))
    raise ValueError("no standing")
