"""A fault drill's plan, the outcome of each fault, and what follows from all of them (pure).

fault     a signal to one member of the newest generation, or to several at once
fired     each of these ended by that signal, or was evicted for its silence
survived  all others of that generation finished a step in a later one, without those that were hit
recovery  from the signal to the last of these steps
calm      before the first fault: what the speed of the run is compared with
"""

from __future__ import annotations

import signal
import statistics
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from imece.launch.endings import name_of
from imece.listing import many, some

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Plan:
    """Which faults to inject."""

    ranks: int
    kills: int = 5
    every_s: float = 5.0
    signal: str = "KILL"
    together: int = 1
    """Members that each fault hits."""
    seed: int = 0
    start_s: float = 120.0
    """How long to wait for all ranks to be resilient."""


@dataclass
class Fault:
    """One fault, and its outcome."""

    time_s: float
    """Seconds since all ranks were resilient."""
    generation: int
    step: int | None
    """Finished steps, as the members had last said."""
    ranks: list[int]
    """Their numbers on the host."""
    pids: list[int]
    members: list[int]
    fired: bool | None = None
    """None: not known yet."""
    survived: bool | None = None
    recovery_s: float | None = None
    """Also None if the steps were over before any survivor could make another."""
    again: int = 0
    """Finished steps that had to be made again."""
    where: list[str] = field(default_factory=list)
    """The phase and step of each, such as "in backward of step 41"; "" if it had noted none."""
    hosts: list[int | None] = field(default_factory=list)
    """The host of each, if there are several."""

    @property
    def is_open(self) -> bool:
        """Whether something about it is still unknown."""
        return self.fired is None or self.survived is None


@dataclass
class Record:
    """Everything about a drill."""

    plan: Plan
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[float, int]] = field(default_factory=list)
    """At each change: (seconds since all ranks were resilient, finished steps of the rank that
    is furthest)."""
    resilient: bool = False
    """Whether all ranks were resilient at some time."""
    status: int | None = None
    """The script's exit status."""
    left: list[str] = field(default_factory=list)
    """Processes, and files in /dev/shm, that outlived it."""

    @property
    def recoveries(self) -> list[float]:
        """Recovery times in seconds of the faults that were survived."""
        return [fault.recovery_s for fault in self.faults if fault.survived and fault.recovery_s is not None]

    @property
    def fired(self) -> int:
        """How many faults fired."""
        return sum(fault.fired is True for fault in self.faults)

    @property
    def survived(self) -> int:
        """How many faults were survived."""
        return sum(fault.fired is True and fault.survived is True for fault in self.faults)

    @property
    def passed(self) -> bool:
        """Whether there were as many faults as planned, all fired and survived, and the script ended well."""
        return (
            self.status == 0 and self.fired == self.survived == self.plan.kills == len(self.faults)
        ) and not self.left

    @property
    def calm_steps_per_s(self) -> float | None:
        """Speed of the undisturbed run before the first fault; None if that was too short to tell."""
        until = self.faults[0].time_s if self.faults else float("inf")
        calm = [(at, steps) for at, steps in self.seen if at <= until]
        if len(calm) < 2 or calm[-1][1] <= calm[0][1]:
            return None
        return (calm[-1][1] - calm[0][1]) / (calm[-1][0] - calm[0][0])

    @property
    def hit_steps_per_s(self) -> float | None:
        """Speed from the first fault until a while after the last one; None if there was no fault."""
        if not self.faults or not self.seen:
            return None
        begin, last = self.faults[0].time_s, self.faults[-1]
        end = min(last.time_s + max(self.plan.every_s, last.recovery_s or 0.0), self.seen[-1][0])
        return (self._steps_at(end) - self._steps_at(begin)) / (end - begin) if end > begin else None

    @property
    def goodput(self) -> float | None:
        """The disturbed speed divided by the undisturbed one: the share of steps that were still made."""
        calm, hit = self.calm_steps_per_s, self.hit_steps_per_s
        return hit / calm if calm and hit is not None else None

    def as_json(self) -> dict[str, Any]:
        """Everything, and what follows from it."""
        recoveries = self.recoveries
        return asdict(self) | {
            "fired": self.fired,
            "survived": self.survived,
            "passed": self.passed,
            "median_s": statistics.median(recoveries) if recoveries else None,
            "worst_s": max(recoveries, default=None),
            "again": sum(fault.again for fault in self.faults),
            "calm_steps_per_s": self.calm_steps_per_s,
            "hit_steps_per_s": self.hit_steps_per_s,
            "goodput": self.goodput,
        }

    def _steps_at(self, time_s: float) -> float:
        """Finished steps, interpolated between two times at which they were seen."""
        for (before, less), (after, more) in pairwise(self.seen):
            if before <= time_s <= after:
                return less + (more - less) * (time_s - before) / (after - before)
        return self.seen[0][1] if time_s < self.seen[0][0] else self.seen[-1][1]


def hit(fault: Fault) -> str:
    """Whom it hit, and where that rank was: "rank 2 (host 1, pid 4711) in backward of step 41"."""
    count = len(fault.ranks)
    hosts, where = fault.hosts or [None] * count, fault.where or [""] * count
    names = [name_of(*each) for each in zip(fault.ranks, fault.pids, hosts, strict=True)]
    if any(where):
        return ", ".join(f"{name} {at}".strip() for name, at in zip(names, where, strict=True))
    return ", ".join(names) + ("" if fault.step is None else f" after step {fault.step:,}")


def outcome(fault: Fault) -> str:
    """The outcome of a fault, in words."""
    if not fault.fired:
        return "did not fire: the process ended in another way"
    if not fault.survived:
        return "NOT SURVIVED"
    if fault.recovery_s is None:
        return "survived; the steps were over"
    return f"went on after {fault.recovery_s:.2f} s, {steps_again(fault.again)}"


def steps_again(count: int) -> str:
    """ "1 step made again"."""
    return f"{many(count, 'step')} made again"


def lines(record: Record) -> list[str]:
    """The lines that end a drill."""
    plan, recoveries = record.plan, record.recoveries
    missing = plan.kills - len(record.faults)
    shown = [
        f"drill    {record.fired} of {plan.kills} faults fired, {record.survived} of {record.fired} "
        f"survived; the script ended with status {record.status}"
    ]
    if missing and record.status in _INTERRUPTED:
        shown.append(f"         interrupted after {len(record.faults)} of {plan.kills} faults")
    elif missing:
        shown.append(
            f"         it ended before {missing} of the faults: give it more steps, or --every-s less"
        )
    if recoveries:
        shown.append(
            f"recovery median {statistics.median(recoveries):.2f} s, worst {max(recoveries):.2f} s, "
            "from the signal to the last survivor's next finished step"
        )
    if record.faults:
        shown.append(f"lost     {steps_again(sum(fault.again for fault in record.faults))}")
    if record.goodput is not None and record.calm_steps_per_s is not None:
        shown.append(
            f"goodput  {100 * record.goodput:.0f} % of the {record.calm_steps_per_s:.3g} steps/s "
            "before the first fault"
        )
    return [*shown, f"left     {some(record.left, 8) or 'no process, nothing in /dev/shm'}"]
