"""What follows when ranks end: who goes on, who is replaced, whether all start again or the run is over.

Pure: ends, readiness, finished steps and times come in, verdicts go out. No processes, no store, no clock.

    slot      a place for a rank, counted over all hosts: the number by which people know the rank
    member    the process in a slot, by a number that is never used again (membership/roster.py)
    veteran   a member of the newest generation that has finished a step since it was taken in
    died      ended by a signal or left early, and has reported no exception of its own
    leaving   a member that will not be in the next generation, since its host leaves
    left      a member that has said that it is gone: nobody waits for its process to end
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from imece.launch.endings import Ending, first_cause
from imece.listing import some
from imece.membership.roster import Generation

BLAME_S = 1.0  # how long a rank that lost its peer waits for the launcher to see that peer's end
_BURST_S = 1.0  # ranks that die within this time die of the same cause, if all of them ran before it
_LOOP = 3  # deaths in a row without a finished step in between
_BACK_OFF_S = (0.0, 1.0, 2.0)
_TRIES = 10  # replacements in one slot, in a row, that die before they have joined: about four minutes
_LONGEST_BACK_OFF_S = 60.0  # before the next of these starts; at first 1 s, then twice as long each time
_LATE_S = 5.0
_NAMED = 3  # most ranks to name that say the same


@dataclass(frozen=True)
class Limits:
    """The limits that the person who started the run has set."""

    ranks: int
    """Ranks on all hosts together."""
    min_ranks: int = 1
    """With fewer ranks the run does not go on."""
    max_restarts: int | None = None
    """Replacements, or restarts of all ranks, in total. None: no limit as long as steps are finished."""
    restart: bool = False
    """Start all ranks again when one has died and the others do not go on without it."""
    exceptions: bool = False
    """... also if it has failed in another way, unless by a user's mistake (exit status 2)."""


@dataclass(frozen=True)
class GoOn:
    """The others go on in `generation` (None: in their present one), and `slots` are filled at `at_s`."""

    generation: Generation | None
    slots: tuple[int, ...]
    at_s: float
    said: str
    """A line for people; "" for none."""


@dataclass(frozen=True)
class StartAgain:
    """End all others; then, not before `at_s`, start all ranks again."""

    at_s: float
    said: str


@dataclass(frozen=True)
class End:
    """The run is over because of `endings`. why: what to add to the cause."""

    endings: tuple[Ending, ...]
    why: str = ""


Verdict = GoOn | StartAgain | End


class Generations:
    """The members of a job, and the verdicts about them."""

    def __init__(self, limits: Limits) -> None:
        self.newest = Generation(-1, ())
        self.slots: dict[int, int] = {}
        """The slot of each living member."""
        self.joining: list[int] = []
        """Living members that are in no generation yet."""
        self.starts = 0
        """How often a replacement was started, or all ranks again: torchrun's restart count."""
        self.stopping = False
        """Whether all have been asked to end: they may need each other for that, but nobody is replaced."""
        self.blame_at: float | None = None
        """When to call `overdue`."""
        self.places: Sequence[int] = range(limits.ranks)
        """The slots that may have members: fewer than all while a host is away."""
        self.leaving: set[int] = set()
        self.left: set[int] = set()
        """Living members that have left, and are in no generation any more."""
        self._limits = limits
        self._members = 0  # numbers used so far
        self._failed: dict[int, Ending] = {}  # ends without a verdict yet
        self._finished = False  # whether a rank has done all its work
        self._no_veteran_since: float | None = None
        self._started_s: dict[int, float] = {}
        self._newcomers: dict[int, int] = {}  # steps that newcomers had finished when they were taken in
        self._deaths = 0  # in a row
        self._counted_s = 0.0  # when the last death was counted
        self._steps_then: int | None = None
        self._steps: int | None = None  # finished steps of the member that is furthest
        self._never_joined: dict[int, int] = {}  # by slot: deaths in a row of members before they joined
        self._to_leave: set[int] = set()  # members that leave once the present leavers have left
        self._said: dict[int, int] = {}  # finished steps, as living members last said
        self._renewals: tuple[int, int | None] = 0, None  # how many in a row; finished steps then

    def start_all(self, now: float) -> Generation:
        """New members in all slots, as a generation of their own."""
        members = tuple(self._new_member(slot, now) for slot in self.places)
        self.newest = Generation(self.newest.number + 1, members)
        self.joining, self._newcomers, self.leaving, self.left = [], {}, set(), set()
        self._to_leave, self._never_joined = set(), {}
        self._finished, self._no_veteran_since = False, None
        self._steps = self._steps_then = None  # they may count anew
        return self.newest

    def start_one(self, slot: int, now: float) -> int:
        """A new member in `slot`, which will join."""
        member = self._new_member(slot, now)
        self.joining.append(member)
        return member

    def note_steps(self, steps: Mapping[int, int]) -> None:
        """Note finished steps, of the members that report them."""
        back = [count for member, count in steps.items() if count < self._said.get(member, count)]
        self._said |= steps
        if back:  # at a checkpoint: steps finished from there on are new
            self._steps = self._steps_then = max(back)
        self._steps = max([*steps.values(), *([] if self._steps is None else [self._steps])], default=None)
        if self._steps_then is None:
            self._steps_then = self._steps
        for member, count in list(self._newcomers.items()):
            if steps.get(member, count) > count:
                del self._newcomers[member]

    def take_in(
        self, ready: Collection[int], steps: Mapping[int, int], go_on: Callable[[Sequence[int]], bool]
    ) -> Generation | None:
        """The next generation, with those who are `ready` to join. None if nothing changes, or if the others
        would not come: their steps are over, or have not begun."""
        ready = [member for member in self.joining if member in ready]
        if not ready or self._failed or self.is_ending or self.leaving or not self.all_go_on(go_on):
            return None
        self.joining = [member for member in self.joining if member not in ready]
        self._newcomers |= {member: steps.get(member, 0) for member in ready}
        for member in ready:
            self._never_joined.pop(self.slots[member], None)
        self.newest = Generation(self.newest.number + 1, (*self._living(), *ready))
        return self.newest

    def renew(self, lost: tuple[str, ...] = ()) -> Generation:
        """The next generation, of the same members. lost: why, in words."""
        self.newest = self._next(self._living(), lost)
        return self.newest

    def renew_for(self, lost: Sequence[str], go_on: Callable[[Sequence[int]], bool]) -> Generation | None:
        """The same for members (in words) that have lost others though nobody has ended. None if it would not
        help: if others would not come, or no step was finished since the last few times."""
        if not lost or self._failed or self.is_ending or self.leaving or not self.all_go_on(go_on):
            return None
        count = self._renewals[0] if self._renewals[1] == self._steps else 0
        if count == _LOOP:
            return None
        self._renewals = count + 1, self._steps
        who = some(lost, _NAMED, " and ")
        return self.renew((f"{who} lost the connection to others, though no rank has ended",))

    def is_last(self, closed: Collection[int]) -> bool:
        """Whether no generation follows the newest one unless somebody dies: some members have finished, or
        leave (`closed`) though nobody has asked them to."""
        return not self.leaving and (self._finished or not self.left.issuperset(closed))

    @property
    def is_ending(self) -> bool:
        """Whether newcomers are of no use: ranks finish their work, or have been asked to end."""
        return self._finished or self.stopping

    def all_go_on(self, go_on: Callable[[Sequence[int]], bool]) -> bool:
        """Whether all of them go on. A member that was taken in once counts, even if it has not said
        so yet."""
        return go_on(self._veterans() or self._living())

    def leave(self, members: Collection[int]) -> Generation | None:
        """The generation in which these members leave in order; None if too few would stay.

        While others are leaving, that is the newest one; these follow when the others are gone: in a
        generation before that they would wait for members that have left already.
        """
        asked = {member for member in members if member in self.newest.members}
        going = self.leaving | self._to_leave | asked
        if len(set(self._living()) - going) < max(1, self._limits.min_ranks):
            return None
        if self.leaving:
            self._to_leave |= asked
            return self.newest
        self.leaving = asked
        self.newest = self._next(self._living())
        return self.newest

    def closed(self, members: Collection[int], now: float) -> GoOn | None:
        """These members have said that they leave in order: the others need nothing more from them.

        Whatever their processes still do, and however they end, no longer concerns the others.
        """
        told = self.leaving & set(members)
        self.leaving -= told
        self.left |= told
        return self._after_leaving(now) if told and not self.leaving else None

    def judge(
        self, endings: Mapping[int, Ending], go_on: Callable[[Sequence[int]], bool], now: float
    ) -> Verdict | None:
        """The verdict on these ends, which were seen together; None if nothing follows, or nothing yet.

        go_on: whether all of some members would go on without the others.
        """
        left = self.leaving & endings.keys()
        self.leaving -= left
        for member, ending in endings.items():
            known = member in left | self.left
            self.remove(member)
            if known:
                continue
            if not ending.ok:
                self._failed[member] = ending
            elif member in self.newest.members:
                self._finished = True
        if self._finished and self._no_veteran_since is None and not self._veterans():
            self._no_veteran_since = now
        if not self._failed:
            return self._after_leaving(now) if left and not self.leaving else None
        # One that fails before it has joined has failed alone, however it ends: its host's disk or GPU may be
        # at fault, or a script that was edited meanwhile.
        go_on_without = self._living() and self.all_go_on(go_on)
        alone = self._failed.keys() - set(self.newest.members) if go_on_without else set()
        own = [
            ending
            for member, ending in self._failed.items()
            if not (member in alone or ending.died or ending.because_of_peer)
        ]
        if own and not self.stopping:
            return self._after_failure(go_on, now)
        if alone or any(ending.died for ending in self._failed.values()):
            return self._after_death(go_on, now)
        if self.stopping:
            return None
        if not self.slots:  # no end will be seen any more
            return self.overdue(go_on, now)
        self.blame_at = self.blame_at or now + BLAME_S
        return None

    def remove(self, member: int) -> None:
        """A member has ended, and nothing follows from that."""
        del self.slots[member]
        self._newcomers.pop(member, None)
        self._said.pop(member, None)
        self.left.discard(member)
        self.leaving.discard(member)
        if member in self.joining:
            self.joining.remove(member)

    def overdue(self, go_on: Callable[[Sequence[int]], bool], now: float) -> Verdict:
        """Ranks have lost a peer, no rank has ended for another reason, and none is expected to any more."""
        self.blame_at = None
        return self._after_failure(go_on, now)

    def left_over(self, now: float) -> list[int]:
        """Members that wait for others who have all finished."""
        since = self._no_veteran_since
        if since is None or self.stopping:
            return []
        return [*self.joining, *(self._newcomers if now >= since + _LATE_S else ())]

    def _after_failure(self, go_on: Callable[[Sequence[int]], bool], now: float) -> Verdict:
        cause = first_cause(list(self._failed.values()))
        assert cause is not None
        again = self._limits.restart and self._limits.exceptions and not cause.is_mistake
        if again and not go_on(self._living()):
            return self._start_again(now)
        return self._end()

    def _after_death(self, go_on: Callable[[Sequence[int]], bool], now: float) -> Verdict | None:
        living = self._living()
        going = set() if self.stopping else self.leaving | self._to_leave
        staying = [member for member in living if member not in going]
        least, all_go_on = self._limits.min_ranks, self.all_go_on(go_on)
        if len(staying) < max(1, least) or not all_go_on:
            if self.stopping:
                return None
            too_few = f"; fewer than --min-ranks {least} were left" if staying and all_go_on else ""
            if self._limits.restart:
                return self._start_again(now, too_few)
            may_restart = self._steps is not None and self._limits.max_restarts is None
            none_left = "; none is left that could go on (--max-restarts N starts all again)"
            return self._end(too_few or (none_left if may_restart else ""))
        # A member that had not joined holds up nobody's steps: its death is no sign that the others are in
        # a loop.
        joined = [member for member in self._failed if member in self.newest.members]
        if joined and not self.stopping and self._is_loop(now):
            return self._end(f", the {_LOOP}rd time in a row that ranks died and no finished step was seen")
        lost, self._failed, self.blame_at = self._failed, {}, None
        start_wait_s, given_up = self._after_not_joining(
            each.rank for m, each in lost.items() if m not in joined
        )
        wait_s = max(self._back_off_s() if joined else 0.0, start_wait_s)
        again = [ending for ending in lost.values() if ending.rank not in given_up]
        slots = () if self.stopping or self._finished else self._replaced(again)
        at_s = now + wait_s
        # The others need a generation without those that our own signal has killed; people need no line
        # about them.
        deaths = [ending.describe() for ending in lost.values() if not ending.by_our_signal]
        row = f", the {_TRIES}th in a row that died before it had joined" if given_up else ""
        follows = f"{row}; {_ranks(len(living))} on{_replacements(len(slots), wait_s)}"
        said = f"imece: {'; '.join(dict.fromkeys(deaths))}{follows}" if deaths else ""
        if not joined:
            return GoOn(None, slots, at_s, said)
        gone = dict.fromkeys(lost[member].describe() for member in self.newest.members if member in lost)
        self.newest = self._next(living, tuple(gone))
        return GoOn(self.newest, slots, at_s, said)

    def _after_leaving(self, now: float) -> GoOn | None:
        """All leavers have left. The others wait for that, even when they are asked to end."""
        living = self._living()
        if not living:
            return None
        if not self.stopping:
            self.leaving = self._to_leave & set(living)
        self._to_leave = set()
        self.newest = self._next(living)
        return GoOn(
            self.newest, (), now, f"imece: all that were to leave have left; {_ranks(len(living))} on"
        )

    def _next(self, members: tuple[int, ...], lost: tuple[str, ...] = ()) -> Generation:
        leaving = tuple(member for member in members if member in self.leaving)
        return Generation(self.newest.number + 1, members, lost, leaving)

    def _start_again(self, now: float, why: str = "") -> Verdict:
        """why: in words, why nobody goes on, if that is to be printed."""
        if self._is_loop(now):
            return self._end(f", the {_LOOP}rd time in a row that ranks ended and no finished step was seen")
        cause = first_cause(list(self._failed.values()))
        limit = self._limits.max_restarts
        too_few = len(self.places) < self._limits.min_ranks
        if limit is not None and self.starts >= limit:
            return self._end(f"{why}; --max-restarts {limit} is used up" if limit else why)
        if cause is None or too_few:
            return self._end(why)
        self.starts += 1
        self._failed, self.blame_at = {}, None
        wait_s = self._back_off_s()
        when = f"in {wait_s:.0f} s" if wait_s else "now"
        many = "the rank starts" if len(self.places) == 1 else f"all {len(self.places)} ranks start"
        return StartAgain(now + wait_s, f"imece: {cause.describe()}; {many} again {when}")

    def _end(self, why: str = "") -> End:
        self.blame_at = None
        return End(tuple(self._failed.values()), why)

    def _replaced(self, lost: Collection[Ending]) -> tuple[int, ...]:
        """The slots that may be filled again."""
        left = len(lost) if self._limits.max_restarts is None else self._limits.max_restarts - self.starts
        slots = tuple(ending.rank for ending in lost if ending.rank in self.places)[: max(0, left)]
        self.starts += len(slots)
        return slots

    def _is_loop(self, now: float) -> bool:
        """Count this death, and say whether it is one too many."""
        if self._steps is not None and (self._steps_then is None or self._steps > self._steps_then):
            self._deaths = 0
        all_ran = all(self._started_s[member] < self._counted_s for member in self._failed)
        if not (self._deaths and all_ran and now - self._counted_s < _BURST_S):
            self._deaths += 1
            self._counted_s = now
        self._steps_then = self._steps
        known = self._steps is not None or self._limits.max_restarts is None
        return known and self._deaths >= _LOOP

    def _after_not_joining(self, slots: Iterable[int]) -> tuple[float, set[int]]:
        """Members that had not joined have died in these slots: how long to wait now, and which slots
        stay empty."""
        wait_s, given_up = 0.0, set()
        for slot in slots:
            count = self._never_joined.pop(slot, 0) + 1
            if count == _TRIES:
                given_up.add(slot)  # a member that comes all the same, with its host, starts a new count
            else:
                self._never_joined[slot] = count
                wait_s = max(wait_s, min(2.0 ** (count - 1), _LONGEST_BACK_OFF_S))
        return wait_s, given_up

    def _back_off_s(self) -> float:
        return _BACK_OFF_S[max(0, min(self._deaths, len(_BACK_OFF_S)) - 1)]

    def _living(self) -> tuple[int, ...]:
        there = self.slots.keys() - self.left
        return tuple(member for member in self.newest.members if member in there)

    def _veterans(self) -> list[int]:
        return [member for member in self._living() if member not in self._newcomers]

    def _new_member(self, slot: int, now: float) -> int:
        member, self._members = self._members, self._members + 1
        self.slots[member], self._started_s[member] = slot, now
        return member


def _ranks(count: int) -> str:
    return "1 rank goes" if count == 1 else f"{count} ranks go"


def _replacements(count: int, wait_s: float) -> str:
    if not count:
        return " without a replacement"
    who, verb = ("a replacement", "is") if count == 1 else (f"{count} replacements", "are")
    return f", {who} {verb} starting" + (f" in {wait_s:.0f} s" if wait_s else "")
