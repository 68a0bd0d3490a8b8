"""Who computes together: what the launcher and the ranks tell each other through the launcher's store.

    member      one process of the job, by a number that is never used again; the first are 0, 1, ...
    generation  the members that compute together, in the order of their ranks
    resilient   a member that goes on when others die: in the next generation, with the same memory
    ready       a member that was started later and may be taken into the next generation
    leaving     a member that is asked to go: it hands over what it alone holds, and ends with status 0
    lost        said by a member that cannot reach another one, though nobody is seen to have ended
    last        the launcher's answer to that if the other one has finished: no generation follows

Only the launcher makes generations: it is the first to know of a death, and while it lives, members need not
agree with each other on who is there. All messages are JSON of limited size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imece.errors import UserError
from imece.store import read_note

if TYPE_CHECKING:  # a launcher does not wait for torch before it starts ranks
    import torch.distributed as dist

_PREFIX = "imece/members/"
_NEWEST = _PREFIX + "newest"
_LAST = _PREFIX + "last"
_MEETING = "imece/generation/"
_GENERATION_BYTES = 1 << 20  # the largest number of ranks that can be started needs a fifth of it


@dataclass(frozen=True)
class Generation:
    """The members that compute together; a member's rank is its place among them."""

    number: int
    members: tuple[int, ...]
    lost: tuple[str, ...] = ()
    """Why the generation before is over: a line for each member that is gone, with how it ended; or who has
    lost others though nobody has ended. Empty if members only joined or left in order."""
    leaving: tuple[int, ...] = ()
    """Members that are about to leave in order: in this generation others take over what they alone hold."""

    def as_json(self) -> dict[str, Any]:
        """All of it, of limited size."""
        return {
            "number": self.number,
            "members": list(self.members),
            "lost": [line[:500] for line in self.lost[:8]],
            "leaving": list(self.leaving),
        }


def meeting_in(store: dist.Store, number: int) -> dist.Store:
    """The part of the store in which the members of a generation meet."""
    import torch.distributed as dist

    return dist.PrefixStore(f"{_MEETING}{number}", store)


def outcome_of(number: int) -> str:
    """The key, in the same store, of what the members of a generation have agreed on: whether they are it."""
    return f"{_MEETING}{number}/outcome"


def forget_meetings(store: dist.Store, before: int) -> None:
    """Delete what earlier generations have left there: addresses and notes of every rank."""
    for key in store.list_keys():
        number = key.removeprefix(_MEETING).partition("/")[0]
        if key.startswith(_MEETING) and number.isdecimal() and int(number) < before:
            store.delete_key(key)


class Roster:
    """The launcher's and the members' view of this, in the store below all prefixes."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    # Called by the launcher.

    def publish(self, generation: Generation) -> None:
        """From now on this is the newest generation."""
        self._store.set(f"{_PREFIX}{generation.number}", json.dumps(generation.as_json()))
        self._store.set(_NEWEST, str(generation.number))

    def say_last(self, generation: int) -> None:
        """No generation follows this one as long as nobody dies: some of its members have finished."""
        self._store.set(_LAST, str(generation))

    def forget(self, member: int) -> None:
        """A member has ended: remove what it said about itself."""
        for what in ("resilient", "ready", "lost"):
            self._store.delete_key(f"{_PREFIX}{what}/{member}")
        # Not deleted: a drill's thread may have seen that it exists, and would wait for it to come again.
        self._store.set(f"{_PREFIX}beat/{member}", "")

    def all_resilient(self, members: Iterable[int]) -> bool:
        """Whether each of them would go on without another one. False if there are none."""
        keys = [f"{_PREFIX}resilient/{member}" for member in members]
        return bool(keys) and self._store.check(keys)

    def is_ready(self, member: int) -> bool:
        """Whether the member waits to be taken in."""
        return self._store.check([f"{_PREFIX}ready/{member}"])

    def beat(self, member: int) -> tuple[int, int] | None:
        """(beats, finished steps) as the member last said; None before its first beat."""
        key = f"{_PREFIX}beat/{member}"
        if not self._store.check([key]):
            return None
        beats, _, steps = self._store.get(key).decode(errors="replace").partition(" ")
        return (int(beats), int(steps)) if beats.isdecimal() and steps.isdecimal() else None

    def has_lost(self, member: int, generation: int) -> bool:
        """Whether the member waits for an end of that generation, since it cannot reach others in it."""
        key = f"{_PREFIX}lost/{member}"
        return self._store.check([key]) and self._store.get(key) == str(generation).encode()

    def went_on(self, member: int, generation: int) -> tuple[float, int] | None:
        """When a member finished its first step in a generation, and how many steps it had to make again.

        The time is in seconds of the host's monotonic clock. None if it has not finished one.
        """
        key = f"{_PREFIX}went-on/{generation}/{member}"
        if not self._store.check([key]):
            return None
        note = read_note(self._store.get(key), f"member {member}")
        return float(note["time_s"]), int(note["again"])

    # Called by a member.

    def newest(self) -> int:
        """The newest generation's number; -1 if there is none: the launcher keeps no roster."""
        return int(self._store.get(_NEWEST)) if self._store.check([_NEWEST]) else -1

    def generation(self, number: int) -> Generation:
        """The generation of that number, which must have been published. UserError if it is not valid."""
        note = read_note(self._store.get(f"{_PREFIX}{number}"), "the launcher", _GENERATION_BYTES)
        members, lost, leaving = note.get("members"), note.get("lost"), note.get("leaving", [])
        for each in (members, leaving):
            if not isinstance(each, list) or not all(isinstance(number, int) for number in each):
                raise UserError(f"the launcher's generation {number} names no members")
        assert members is not None
        return Generation(number, tuple(members), tuple(map(str, lost or ())), tuple(leaving))

    def since(self, number: int) -> Iterator[Generation]:
        """The generations after that one. Several may follow each other before a member looks."""
        for each in range(number + 1, self.newest() + 1):
            if self._store.check([f"{_PREFIX}{each}"]):
                yield self.generation(each)

    def is_last(self, generation: int) -> bool:
        """Whether no generation follows this one as long as nobody dies: lost peers have finished."""
        return self._store.check([_LAST]) and self._store.get(_LAST) == str(generation).encode()

    def say_resilient(self, member: int, resilient: bool = True) -> None:
        """From now on `member` goes on without others, or no longer does."""
        key = f"{_PREFIX}resilient/{member}"
        if resilient:
            self._store.set(key, "1")
        else:
            self._store.delete_key(key)

    def say_ready(self, member: int) -> None:
        """`member` may be taken into the next generation."""
        self._store.set(f"{_PREFIX}ready/{member}", "1")

    def say_lost(self, member: int, generation: int) -> None:
        """`member` cannot reach others of its generation, and knows of no newer one."""
        self._store.set(f"{_PREFIX}lost/{member}", str(generation))

    def say_alive(self, member: int, beats: int, steps: int) -> None:
        """`member` is running, and has made so many steps."""
        self._store.set(f"{_PREFIX}beat/{member}", f"{beats} {steps}")

    def say_went_on(self, member: int, generation: int, time_s: float, again: int) -> None:
        """`member` has finished its first step in this generation."""
        self._store.set(
            f"{_PREFIX}went-on/{generation}/{member}", json.dumps({"time_s": time_s, "again": again})
        )
