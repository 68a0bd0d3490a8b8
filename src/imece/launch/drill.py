"""`imece drill`: faults at random instants in the ranks of a running job. drill_record.py defines
the words."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from imece.launch.drill_record import Fault, Plan, Record, hit, outcome
from imece.launch.endings import Ending
from imece.launch.view import Watched
from imece.membership.roster import Generation

_POLL_S = 0.02
_CALM_S = 3.0  # at least this long, and ...
_CALM_STEPS = 5  # this many steps, before the first fault
_PATIENCE_S = 30.0  # after this, the next fault does not wait for the world to be full
_SPREAD = 0.5  # of the time between two faults, longer or shorter

SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("KILL", "STOP", "SEGV")}


class Drill:
    """Pass its `watch` to `launch`; afterwards its record lacks only the status and what is left behind."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.record = Record(plan)
        self.gave_up = False
        """Whether it has ended the run because not all ranks were resilient in time."""
        self._plan, self._say = plan, say
        self._random = random.Random(plan.seed)
        self._began = 0.0

    def watch(self, view: Watched) -> None:
        """In a thread of the launcher: wait for all ranks, then inject one fault after another."""
        plan = self._plan
        if not self._wait_for_all(view):
            return
        self._say(
            f"drill    all {plan.ranks} ranks are resilient; {plan.kills} x SIG{plan.signal} to "
            f"{plan.together}, about every {plan.every_s:g} s"
        )
        due = self._now + max(_CALM_S, self._pause())
        while not view.over.wait(_POLL_S):
            self._observe(view)
            if len(self.record.faults) == plan.kills or self._now < due:
                continue
            late = self._now > due + max(_PATIENCE_S, 2 * plan.every_s)
            if (late or self._is_calm(view)) and self._inject(view):
                due = self._now + self._pause()
        self._observe(view)
        for fault in self.record.faults:  # nothing more will come
            if fault.is_open:
                fault.fired, fault.survived = bool(fault.fired), bool(fault.survived)
                self._tell(fault)

    @property
    def _now(self) -> float:
        """Seconds since all ranks were resilient."""
        return time.monotonic() - self._began

    def _pause(self) -> float:
        return self._plan.every_s * self._random.uniform(1 - _SPREAD, 1 + _SPREAD)

    def _wait_for_all(self, view: Watched) -> bool:
        """Wait until all ranks are resilient. False, after ending the run, if that takes too long."""
        until = time.monotonic() + self._plan.start_s
        while not view.over.wait(_POLL_S):
            if self._full(view) is not None:
                self._began = time.monotonic()
                self.record.resilient = True
                return True
            if time.monotonic() > until:
                self.gave_up = True
                view.end()
                return False
        return False

    def _full(self, view: Watched) -> Generation | None:
        """The newest generation, if it has all ranks and each of them is resilient."""
        newest = view.roster.generation(view.roster.newest())
        full = len(newest.members) == self._plan.ranks and view.roster.all_resilient(newest.members)
        return newest if full and set(newest.members) <= view.living().keys() else None

    def _is_calm(self, view: Watched) -> bool:
        """Whether nothing of the last fault is left, and enough of the run without faults has been seen."""
        if any(fault.is_open for fault in self.record.faults) or self._full(view) is None:
            return False
        seen = self.record.seen
        return len(seen) > 1 and seen[-1][1] - seen[0][1] >= _CALM_STEPS

    def _inject(self, view: Watched) -> bool:
        """Inject one fault, in living members; False if too few live, or one of them no longer goes on."""
        newest = view.roster.generation(view.roster.newest())
        places = {member: at for member, at in view.living().items() if member in newest.members}
        if len(places) <= self._plan.together or not view.roster.all_resilient(places):
            return False
        members = sorted(self._random.sample(sorted(places), self._plan.together))
        fault = Fault(
            self._now, newest.number, self.record.seen[-1][1] if self.record.seen else None,
            [places[member].slot for member in members], [places[member].pid for member in members], members,
            hosts=[places[member].host for member in members],
        )  # fmt: skip
        self.record.faults.append(fault)
        for member in members:
            view.signal(member, SIGNALS[self._plan.signal])
        return True

    def _observe(self, view: Watched) -> None:
        """Note how far the members are, and the outcome of faults."""
        newest = view.roster.newest()
        beats = [view.roster.beat(member) for member in view.roster.generation(newest).members]
        steps = max((beat[1] for beat in beats if beat is not None), default=None)
        if steps is not None and (not self.record.seen or self.record.seen[-1][1] != steps):
            self.record.seen.append((self._now, steps))
        under_way = [fault for fault in self.record.faults if fault.is_open]
        for fault in under_way:
            self._look_at(fault, newest, view)
        for fault in self.record.faults:
            if fault in under_way and not fault.is_open:
                self._tell(fault)

    def _look_at(self, fault: Fault, newest: int, view: Watched) -> None:
        """Whether it fired, and how the others came into a generation without those that were hit."""
        ends = [end for member in fault.members if (end := view.ending(member)) is not None]
        if fault.fired is None and len(ends) == len(fault.members):
            fault.fired = all(self._is_by_signal(end) for end in ends)
            fault.where = [end.where for end in ends]
        hit_later = {
            member for other in self.record.faults if other.time_s > fault.time_s for member in other.members
        }
        without = [
            later
            for number in range(fault.generation + 1, newest + 1)
            if not {*(later := view.roster.generation(number)).members} & {*fault.members}
        ]
        was = view.roster.generation(fault.generation).members
        times, waited_for, finished = [], False, False
        for member in set(was) - set(fault.members):
            said = [
                found
                for later in without
                if member in later.members and (found := view.roster.went_on(member, later.number))
            ]
            ending = view.ending(member)
            if said:
                times.append(min(said))
            elif ending is None and member not in hit_later:
                waited_for = True
            elif ending is not None and ending.ok:
                finished = True
            elif ending is not None and member not in hit_later:
                fault.survived = False
                return
        if times:
            fault.recovery_s = max(at for at, _ in times) - self._began - fault.time_s
            fault.again = max(again for _, again in times)
        if not waited_for and (times or finished):
            fault.survived = True

    def _is_by_signal(self, end: Ending) -> bool:
        if self._plan.signal == "STOP":
            return end.silent_s is not None
        return end.status == -SIGNALS[self._plan.signal]

    def _tell(self, fault: Fault) -> None:
        number = self.record.faults.index(fault) + 1
        self._say(
            f"fault    {number} of {self._plan.kills}, {fault.time_s:.1f} s: SIG{self._plan.signal} to "
            f"{hit(fault)}: {outcome(fault)}"
        )
