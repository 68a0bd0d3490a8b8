"""One job: the processes (crew.py), what they say (roster, status), and what follows (generations.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from imece import status
from imece.errors import CollectiveTimeoutError, UserError
from imece.launch.crew import Crew
from imece.launch.generations import End, Generations, GoOn, Limits, Verdict
from imece.launch.processes import (
    SAID,
    Ending,
    first_cause,
    is_stopped,
    prints_stacks,
    worker_environment,
)
from imece.launch.silence import Silence
from imece.launch.view import View
from imece.membership.roster import Roster

_AFTER_FAILURE_S = 2.0  # from SIGTERM to SIGKILL once a rank has failed
_STACKS_S = 0.5  # for a silent rank to show where it is
_JOINING_S = 0.05  # how often to ask whether a replacement is ready
_NEVER = float("inf")


@dataclass(frozen=True)
class Order:
    """What is to be run, and how: see launch/local.py."""

    command: Sequence[str]
    environ: Mapping[str, str]
    limits: Limits
    grace_s: float
    direct: bool
    silent_s: float
    logs: Path | None


class Job:
    """The ranks of one order, until all are done or the run is over."""

    def __init__(self, order: Order, store: dist.Store, port: int, crew: Crew) -> None:
        """`store` listens at `port`; `crew` is open."""
        self._order = order
        self._store = store
        self._port = port
        self._crew = crew
        self._roster = Roster(store)
        self._generations = Generations(order.limits)
        self._silence = Silence(order.silent_s)
        self._endings: dict[int, Ending] = {}  # of those that are not reaped yet
        self._all_endings: dict[int, Ending] = {}
        self._causes: list[Ending] = []
        self._why = ""
        self._over_since = _NEVER  # when the run was found to be over, or a signal ended it
        self._over = False  # the former
        self._again_at: float | None = None  # all are being ended, and start again then
        self._got_signal: int | None = None
        self._passed_on = 0  # to how many ranks
        self._ended_by_us: set[int] = set()
        self._let_go: set[int] = set()  # those whom nobody needs any more
        self._evicted: set[int] = set()
        self._kill_at: dict[int, float] = {}
        self._replacements: list[tuple[float, int]] = []  # when, slot
        self._poll_at = 0.0
        self._look_at = 0.0

    def start(self) -> None:
        """Start all ranks, as members of a new generation."""
        self._roster.publish(self._generations.start_all(time.monotonic()))
        for member, slot in list(self._generations.slots.items()):
            try:
                self._start(member, slot, joining=False)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                ranks = self._order.limits.ranks
                raise UserError(f"cannot start rank {slot} of {ranks}: {error}") from None

    def view(self) -> View:
        """For a thread beside this one."""
        return View(self._port, self._crew, self._all_endings)

    def watch(self) -> None:
        """Until every rank has ended: pass on output and signals, and do what their ends ask for."""
        while self._crew.living or self._again_at is not None:
            ended, signals = self._crew.wait(self._next_time())
            now = time.monotonic()
            for number in signals:
                self._signalled(number, now)
            if ended:
                self._ended(ended, now)
            self._on_time(time.monotonic())

    def report(self) -> int:
        """Say what went wrong, the first cause last, and return the exit status. After the crew has left."""
        if self._got_signal is not None:
            name = signal.Signals(self._got_signal).name
            self._crew.say(f"imece: ended by {name}, passed on to {self._passed_on} ranks")
            return 128 + self._got_signal
        cause = first_cause(self._causes)
        if cause is None:
            return 0
        if self._order.direct and cause.status == SAID:
            return SAID
        for process in self._crew.ended.values():
            if process.pid == cause.pid:
                self._crew.show_failure(process.outputs[1])
        others = len(self._ended_by_us)
        ended = f"; the other {others} ranks were ended" if others > 1 else "; the other rank was ended"
        finished = [self._crew.ended[member].slot for member in self._finished()]
        left = f"; rank {finished[0]} had finished before" if finished and cause.because_of_peer else ""
        self._crew.say(f"imece: {cause.describe()}{self._why}{left or (ended if others else '')}")
        return 128 - cause.status if cause.status < 0 else cause.status or 1

    def _finished(self) -> list[int]:
        return [member for member, ending in self._endings.items() if ending.ok]

    def _next_time(self) -> float:
        times = [time.monotonic() + 60.0, *self._kill_at.values()]
        times += [at for at in (self._generations.blame_at, self._again_at) if at is not None]
        times += [at for at, _ in self._replacements]
        if self._is_calm:
            times.append(self._poll_at)
        return min(times)

    @property
    def _is_calm(self) -> bool:
        """Whether nobody is being ended."""
        return not self._over and self._again_at is None and self._got_signal is None

    def _on_time(self, now: float) -> None:
        """Do what is due."""
        for member in [member for member, at in self._kill_at.items() if now >= at]:
            del self._kill_at[member]
            self._crew.kill(member)
        blame_at = self._generations.blame_at
        if blame_at is not None and now >= blame_at:
            self._follow(self._generations.overdue(self._roster.all_resilient, now), now)
        if self._again_at is not None and now >= self._again_at and not self._crew.living:
            self._start_again()
        if self._is_calm:
            for at, slot in list(self._replacements):
                if now >= at:
                    self._replacements.remove((at, slot))
                    self._replace(slot)
            if now >= self._poll_at:
                self._poll(now)
                self._poll_at = now + (_JOINING_S if self._generations.joining else self._silence.interval_s)

    def _poll(self, now: float) -> None:
        """Read what members say of themselves."""
        beats = {member: beat for member in self._crew.living if (beat := self._roster.beat(member))}
        steps = {member: count for member, (_, count) in beats.items()}
        self._generations.note_steps(steps)
        ready = [member for member in self._generations.joining if self._roster.is_ready(member)]
        generation = self._generations.take_in(ready, steps)
        if generation is not None:
            self._roster.publish(generation)
            who = " and ".join(self._name(member) for member in ready)
            self._crew.say(f"imece: {who} joined; {len(generation.members)} ranks go on")
        left_over = [member for member in self._generations.left_over(now) if member not in self._let_go]
        if left_over:
            self._replacements = []
            self._let_go |= set(left_over)
            self._end_ranks(left_over, signal.SIGTERM, _AFTER_FAILURE_S)
        if now >= self._look_at:
            self._look_at = now + self._silence.interval_s
            self._look_for_silence({member: count for member, (count, _) in beats.items()}, now)

    def _look_for_silence(self, beats: Mapping[int, int], now: float) -> None:
        silent = [
            member
            for member in self._silence.look(beats, now)
            if member not in self._evicted and not status.has_closed(self._store, member)
        ]
        if not silent:
            return
        suspects = [member for member in self._silence.suspects() if member not in self._evicted]
        stopped = [member for member in suspects if is_stopped(self._crew.living[member].pid)]
        if stopped:
            self._silence.forgive()
        for member in stopped or silent:
            shows = member not in stopped and self._ask_for_stacks(member)
            self._evicted.add(member)
            self._kill_at[member] = now + (_STACKS_S if shows else 0.0)

    def _ask_for_stacks(self, member: int) -> bool:
        """Let it print where it is, if it can."""
        if not prints_stacks(self._crew.living[member].pid):
            return False
        self._crew.signal(member, signal.SIGUSR1)
        return True

    def _ended(self, members: Sequence[int], now: float) -> None:
        """Find out how they ended, and do what follows."""
        endings = {member: self._ending(member, now) for member in members}
        self._endings |= endings
        self._all_endings |= endings
        if self._over:
            self._causes += endings.values()
        open_question = not self._over and self._again_at is None
        judged = {m: ending for m, ending in endings.items() if open_question and m not in self._let_go}
        for member in endings.keys() - judged.keys():
            self._generations.remove(member)
        if not judged:
            return
        if self._is_calm and any(_timed_out(ending) for ending in judged.values()):
            for member in self._crew.living:
                self._ask_for_stacks(member)
        said = [(member, self._roster.beat(member)) for member in (*self._crew.living, *judged)]
        self._generations.note_steps({member: beat[1] for member, beat in said if beat is not None})
        verdict = self._generations.judge(judged, self._roster.all_resilient, now)
        if verdict is not None:
            self._follow(verdict, now)

    def _ending(self, member: int, now: float) -> Ending:
        process = self._crew.ended[member]
        info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None, "a pidfd is readable only once its process has ended"
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        failure = status.read_failure(self._store, member)
        by_us = member in self._ended_by_us and (failure is None or failure.time_s > self._over_since)
        early = code == 0 and status.left_early(self._store, member)
        silent_s = self._order.silent_s if member in self._evicted else None
        self._kill_at.pop(member, None)
        return Ending(process.slot, process.pid, code, now, failure, early, by_us, silent_s)

    def _follow(self, verdict: Verdict, now: float) -> None:
        """Do what was found to follow from the last ends."""
        if isinstance(verdict, End):
            self._over = True
            self._causes, self._why = list(verdict.endings), verdict.why
            self._end_ranks(list(self._crew.living), signal.SIGTERM, _AFTER_FAILURE_S)
            return
        gone = [member for member in self._crew.ended if not self._endings[member].ok]
        for member in gone:
            self._crew.kill(member)  # what it has started, before others go on in its place
        if isinstance(verdict, GoOn):
            if verdict.generation is not None:
                self._roster.publish(verdict.generation)
            self._replacements += [(verdict.at_s, slot) for slot in verdict.slots]
        else:
            self._again_at = verdict.at_s
            self._replacements = []
            self._end_ranks(list(self._crew.living), signal.SIGTERM, _AFTER_FAILURE_S)
        for member in gone:
            self._forget(member)
        self._crew.say(verdict.said)

    def _start_again(self) -> None:
        for member in list(self._crew.ended):
            self._forget(member)
        self._again_at, self._over_since = None, _NEVER
        self._ended_by_us.clear()
        self._let_go.clear()
        self.start()

    def _forget(self, member: int) -> None:
        self._crew.reap(member)
        del self._endings[member]

    def _replace(self, slot: int) -> None:
        member = self._generations.start_one(slot, time.monotonic())
        try:
            self._start(member, slot, joining=True)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._generations.remove(member)
            self._crew.say(f"imece: cannot start a replacement for rank {slot}: {error}")

    def _start(self, member: int, slot: int, *, joining: bool) -> None:
        environ = worker_environment(
            self._order.environ,
            slot,
            self._order.limits.ranks,
            self._port,
            f"imece-{os.getpid()}-{self._port}",
            member=member,
            joining=joining,
            starts=self._generations.starts,
        )
        # Only the first of all: a person who looks on wants to know that it is another process now.
        direct = self._order.direct and member == 0
        self._crew.start(member, slot, self._order.command, environ, direct=direct)

    def _signalled(self, number: int, now: float) -> None:
        again = self._got_signal is not None
        if not again:
            self._got_signal, self._passed_on = number, len(self._crew.living)
        self._generations.stopping = True
        self._generations.blame_at = None
        self._again_at, self._replacements = None, []
        passed_on = signal.SIGTERM if number == signal.SIGPIPE else number
        self._end_ranks(list(self._crew.living), passed_on, 0.0 if again else self._order.grace_s)

    def _end_ranks(self, members: Sequence[int], number: int, grace_s: float) -> None:
        """Send them a signal, and after `grace_s` SIGKILL to them and to all they started."""
        now = time.monotonic()
        self._over_since = min(self._over_since, now)
        for member in members:
            self._ended_by_us.add(member)
            self._crew.signal(member, number)
            self._kill_at[member] = now + grace_s

    def _name(self, member: int) -> str:
        process = self._crew.living[member]
        return f"rank {process.slot} (pid {process.pid})"


def _timed_out(ending: Ending) -> bool:
    return ending.failure is not None and ending.failure.kind == CollectiveTimeoutError.__name__
