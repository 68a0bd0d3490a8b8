"""One job: its ranks on one host or several, what they say, and what follows (generations.py).

It starts and ends ranks through the hands of their hosts (host.py), and is told of ends and signals. It never
waits: `next_time` says when to call `on_time`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping

from imece.errors import CollectiveTimeoutError, UserError
from imece.launch.endings import SAID, Ending, Outcome, first_cause
from imece.launch.generations import End, Generations, GoOn, Limits, Verdict
from imece.launch.host import CannotStart, Hands, Start
from imece.listing import many
from imece.membership.roster import Generation
from imece.status import Failure

AFTER_FAILURE_S = 2.0  # from SIGTERM to SIGKILL once a rank has failed
WAITED_FOR_S = 0.02  # how often to ask leavers, for whom all others wait, whether they are gone
_JOINING_S = 0.05  # how often to ask whether a replacement is ready
_AGAIN_S = 30.0  # after which a replacement that could not be started is tried once more
_POLL_S = 1.0  # how often to ask how far all are
_NEVER = float("inf")


class Job:
    """The ranks of one run, until all are done or the run is over."""

    def __init__(
        self, limits: Limits, grace_s: float, direct: bool, hands: Mapping[int, Hands], per_host: int
    ) -> None:
        """hands: by the number of the host; each host has `per_host` consecutive slots."""
        self.generations = Generations(limits)
        self.hands = dict(hands)
        self._limits, self._grace_s, self._direct, self._per_host = limits, grace_s, direct, per_host
        self._endings: dict[int, Ending] = {}  # of members that are not forgotten yet
        self._causes: list[Ending] = []
        self._why = ""
        self._over = False
        self._again_at: float | None = None  # set while all are being ended, to start again then
        self._got_signal: int | None = None
        self._passed_on = 0  # ranks that got a signal
        self._signalled_where = ""
        self._killed: set[int] = set()  # killed after a signal, as they had not ended in time
        self._asked_to_end: set[int] = set()
        self._let_go: set[int] = set()  # members that nobody needs any more
        self._replacements: list[tuple[float, int]] = []  # when, slot
        self._poll_at = 0.0
        self._last = -1  # the generation that was last said to be the last

    @property
    def is_done(self) -> bool:
        """Whether all ranks have ended, and none is about to start."""
        return not self.generations.slots and self._again_at is None

    @property
    def is_calm(self) -> bool:
        """Whether no member is being ended."""
        return not self._over and self._again_at is None and self._got_signal is None

    def start(self) -> None:
        """Start all ranks, as members of a new generation. UserError if one cannot be started."""
        generation = self.generations.start_all(time.monotonic())
        self._publish(generation)
        size, restarts = len(generation.members), self.generations.starts
        for host, members in self._by_host(generation.members).items():
            ranks = [(member, generation.members.index(member)) for member in members]
            slots = self.generations.slots
            starts = [Start(member, slots[member], rank, size, False, restarts) for member, rank in ranks]
            try:
                self.hands[host].start(starts)
            except CannotStart as error:
                where = f"rank {error.start.slot} of {self._limits.ranks}"
                raise UserError(f"cannot start {where}: {error}") from None

    def ended(self, endings: Mapping[int, Ending], now: float) -> None:
        """Members have ended, and were seen together: do what follows."""
        endings = {member: each for member, each in endings.items() if member in self.generations.slots}
        self._endings |= endings
        if any(ending.ok for ending in endings.values()):
            finished = [ending.rank for ending in self._endings.values() if ending.ok]
            for hands in self.hands.values():
                hands.say_finished(finished, self.generations.starts)
        if self._over:
            self._causes += endings.values()
        if self._got_signal is not None:
            killed = {
                m for m, each in endings.items() if each.by_our_signal and each.status == -signal.SIGKILL
            }
            self._killed |= killed - self._let_go
        open_question = not self._over and self._again_at is None
        judged = {m: ending for m, ending in endings.items() if open_question and m not in self._let_go}
        for member in endings.keys() - judged.keys():
            self.generations.remove(member)
        if not judged:
            return
        if self.is_calm and any(_timed_out(ending) for ending in judged.values()):
            for hands in self.hands.values():
                hands.ask_for_stacks()
        self.generations.note_steps(self._steps([*self.generations.slots]))
        verdict = self.generations.judge(judged, self._all_resilient, now)
        if verdict is not None:
            self._follow(verdict)

    def signalled(self, number: int, where: str = "") -> None:
        """A launcher (`where`, in words) has got a signal that ends the job: pass it on to all ranks."""
        again = self._got_signal is not None
        if not again:
            self._got_signal, self._passed_on = number, len(self.generations.slots)
            self._signalled_where = where
        self.generations.stopping = True
        self.generations.blame_at = None
        self._again_at, self._replacements = None, []
        # Of these three signals, ranks are only prepared for SIGTERM.
        passed_on = signal.SIGTERM if number in (signal.SIGPIPE, signal.SIGHUP) else number
        joining = self.generations.joining.copy()  # nobody takes them in now, and they would wait for that
        self._let_go |= set(joining)
        grace_s = 0.0 if again else self._grace_s
        self._end_ranks(self.generations.slots.keys() - joining, passed_on, grace_s)
        self._end_ranks(joining, passed_on, min(grace_s, AFTER_FAILURE_S))

    def cannot_start(self, member: int, why: str, now: float) -> None:
        """A member's process could not be started."""
        slot = self.generations.slots[member]
        if member in self.generations.joining:
            self.generations.remove(member)
            again = ""
            if self.is_calm and not self.generations.is_ending:
                self._replacements.append((now + _AGAIN_S, slot))
                again = f"; tried again in {_AGAIN_S:.0f} s"
            self.say(f"imece: cannot start a replacement for rank {slot}: {why}{again}")
        else:
            failure = Failure(now, UserError.__name__, f"cannot start: {why}", False)
            self.ended({member: Ending(slot, 0, SAID, now, failure, host=slot // self._per_host)}, now)

    def next_time(self) -> float:
        """When `on_time` has something to do."""
        times = [at for at in (self.generations.blame_at, self._again_at) if at is not None]
        times += [at for at, _ in self._replacements]
        if self._looks:
            times.append(self._poll_at)
        return min(times, default=_NEVER)

    def on_time(self, now: float) -> None:
        """Do what is due."""
        blame_at = self.generations.blame_at
        if blame_at is not None and now >= blame_at:
            self._follow(self.generations.overdue(self._all_resilient, now))
        if self._again_at is not None and now >= self._again_at and not self.generations.slots:
            self._start_again()
        if self.is_calm:
            for at, slot in list(self._replacements):
                if now >= at:
                    self._replacements.remove((at, slot))
                    self._replace(slot)
        if self._looks and now >= self._poll_at:
            self._poll(now)
            self._poll_at = now + self._poll_s

    def outcome(self) -> Outcome:
        """The outcome of the job, after its end."""
        if self._got_signal is not None:
            name = signal.Signals(self._got_signal).name
            ranks = many(self._passed_on, "rank")
            line = f"imece: ended by {name}{self._signalled_where}, passed on to {ranks}"
            killed = f", of which {len(self._killed)} had to be killed" if self._killed else ""
            return Outcome(128 + self._got_signal, line + killed)
        cause = first_cause(self._causes)
        if cause is None:
            return Outcome(0)
        if self._direct and (cause.status == SAID or (cause.status == 1 and cause.failure is None)):
            return Outcome(cause.status)
        others = len(self._asked_to_end)
        ended = f"; the other {others} ranks were ended" if others > 1 else "; the other rank was ended"
        finished = [ending.rank for ending in self._endings.values() if ending.ok]
        # A rank that finished may be the cause of an exception that says nothing else, or of a silent
        # failure.
        may_be_why = cause.status > 0 and (cause.failure is None or cause.because_of_peer)
        left = f"; rank {finished[0]} had finished before" if finished and may_be_why else ""
        line = f"imece: {cause.describe()}{self._why}{left}{ended if others else ''}"
        return Outcome(128 - cause.status if cause.status < 0 else cause.status or 1, line, cause)

    @property
    def _looks(self) -> bool:
        """Whether to look at what members say; also after a signal, as some may wait for leavers."""
        return not self._over and self._again_at is None

    @property
    def _poll_s(self) -> float:
        if self.generations.leaving:
            return WAITED_FOR_S
        return _JOINING_S if self.generations.joining else _POLL_S

    def _poll(self, now: float) -> None:
        """Read what members say about themselves."""
        steps = self._steps(self.generations.slots)
        self.generations.note_steps(steps)
        joining = list(self.generations.joining)
        asked = self._by_host(joining).items()
        ready = [member for host, members in asked for member in self.hands[host].ready(members)]
        generation = self.generations.take_in(ready, steps, self._all_resilient)
        if generation is not None:
            self._publish(generation)
            who = " and ".join(self._name(member) for member in ready)
            self.say(f"imece: {who} joined; {len(generation.members)} ranks go on")
        self._renew_for_lost()
        left_over = [member for member in self.generations.left_over(now) if member not in self._let_go]
        if left_over:
            self._replacements = []
            self._let_go |= set(left_over)
            self._end_ranks(left_over, signal.SIGTERM, AFTER_FAILURE_S)

    def _renew_for_lost(self) -> None:
        """Living members that cannot reach each other any more meet anew, unless some have finished."""
        generations = self.generations
        number, living = generations.newest.number, set(generations.newest.members) & generations.slots.keys()
        asked = [
            (self.hands[host], those) for host, those in self._by_host(living).items() if host in self.hands
        ]
        lost = [self._name(member) for hands, those in asked for member in hands.lost(those, number)]
        if lost and generations.is_last([each for hands, those in asked for each in hands.closed(those)]):
            if self._last != number:
                self._last = number
                for hands in self.hands.values():
                    hands.publish_last(number)
            return
        generation = generations.renew_for(lost, self._all_resilient)
        if generation is not None:
            self._publish(generation)
            (why,) = generation.lost
            self.say(f"imece: {why}; {len(generation.members)} ranks go on")

    def _follow(self, verdict: Verdict) -> None:
        """Carry out the verdict on the last ends."""
        if isinstance(verdict, End):
            self._over = True
            self._causes, self._why = list(verdict.endings), verdict.why
            self._end_ranks(list(self.generations.slots), signal.SIGTERM, AFTER_FAILURE_S)
            return
        gone = [member for member, ending in self._endings.items() if not ending.ok]
        for hands in self.hands.values():
            hands.kill(gone)  # what the dead ranks started, before replacements go on in their place
        if isinstance(verdict, GoOn):
            if verdict.generation is not None:
                self._publish(verdict.generation)
            self._replacements += [(verdict.at_s, slot) for slot in verdict.slots]
        else:
            self._again_at = verdict.at_s
            self._replacements = []
            self._end_ranks(list(self.generations.slots), signal.SIGTERM, AFTER_FAILURE_S)
        for hands in self.hands.values():
            hands.forget(gone)
        for member in gone:
            del self._endings[member]
        if verdict.said:
            self.say(verdict.said)

    def _start_again(self) -> None:
        self._begin_anew()
        self._endings.clear()
        self._again_at = None
        self._asked_to_end.clear()
        self._let_go.clear()
        self.start()

    def _begin_anew(self) -> None:
        for hands in self.hands.values():
            hands.begin_anew()

    def _replace(self, slot: int) -> None:
        """Start a new member in a slot, which will join."""
        now, restarts = time.monotonic(), self.generations.starts
        start = Start(self.generations.start_one(slot, now), slot, 0, 1, True, restarts)
        try:
            self.hands[slot // self._per_host].start([start])
        except CannotStart as error:
            self.cannot_start(error.start.member, str(error), now)

    def _end_ranks(self, members: Collection[int], number: int, grace_s: float) -> None:
        """Send them a signal, and after `grace_s` SIGKILL to them and everything they started."""
        self._asked_to_end |= set(members)
        for host, those in self._by_host(members).items():
            self.hands[host].end(those, number, grace_s)

    def _by_host(self, members: Iterable[int]) -> dict[int, list[int]]:
        """Living members, by host."""
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(self.generations.slots[member] // self._per_host, []).append(member)
        return found

    def _steps(self, members: Iterable[int]) -> dict[int, int]:
        """How many steps they have finished, of those that say so."""
        hosts = self._by_host(members).items()
        beats = [self.hands[host].beats(those) for host, those in hosts if host in self.hands]
        return {member: steps for each in beats for member, (_, steps) in each.items()}

    def _all_resilient(self, members: Collection[int]) -> bool:
        hosts = self._by_host(members).items()
        return bool(members) and all(self.hands[host].all_resilient(those) for host, those in hosts)

    def _publish(self, generation: Generation) -> None:
        for hands in self.hands.values():
            hands.publish(generation)

    def say(self, line: str) -> None:
        for hands in self.hands.values():
            hands.say(line)

    def _name(self, member: int) -> str:
        slot = self.generations.slots[member]
        return self.hands[slot // self._per_host].name(member, slot)


def _timed_out(ending: Ending) -> bool:
    return ending.failure is not None and ending.failure.kind == CollectiveTimeoutError.__name__
