"""How ranks end, in words, and which failure was first: pure."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from imece.errors import UserError
from imece.status import Failure
from imece.store import NO_MORE

SAID = 2
"""The exit status of a command that has reported a user's mistake."""
_KILLED = {
    True: ", as memory ran out: give it more (docker --memory, SLURM's --mem), or use less",
    None: ", perhaps out of memory",
    False: "",
}


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    rank: int
    pid: int  # as the rank reported it, or of the process that was started
    status: int  # exit status; negative: ended by that signal
    time_s: float  # monotonic, when its end was seen
    failure: Failure | None = None  # what the rank itself reported
    left_early: bool = False  # status 0 in the middle of an open world
    ended_by_us: bool = False
    silent_s: float | None = None  # seconds of silence for which it was ended
    host: int | None = None  # the host, if there are several
    lost: str = ""  # how its whole host was lost, if nothing more is known
    where: str = ""  # "in backward of step 41", if it has noted that (membership/where.py)
    by_our_signal: bool = False  # a signal that we sent to end it has killed it
    out_of_memory: bool | None = None  # by SIGKILL: whether the kernel had no more memory; None: not known

    @property
    def ok(self) -> bool:
        """Whether the rank finished its work."""
        return self.status == 0 and not self.left_early

    @property
    def because_of_peer(self) -> bool:
        """Whether it failed only because another rank had gone."""
        return self.failure is not None and self.failure.because_of_peer

    @property
    def died(self) -> bool:
        """Whether it ended without an exception, or decision, of its own."""
        return (self.status < 0 or self.left_early) and (self.failure is None or self.because_of_peer)

    @property
    def is_mistake(self) -> bool:
        """Whether it is a user's mistake, which a restart does not mend."""
        return self.status == SAID or (self.failure is not None and self.failure.kind == UserError.__name__)

    @property
    def cause_time_s(self) -> float:
        """When it failed: a rank reports its failure before its slow exit."""
        return self.failure.time_s if self.failure is not None else self.time_s

    def describe(self) -> str:
        """One line, with the phase of a death if known: "rank 1 (pid 4711) was killed by signal 9 (SIGKILL)
        in backward of step 41, perhaps out of memory"."""
        if self.lost:
            return self.lost
        who = name_of(self.rank, self.pid, self.host)
        at = f" {self.where}" if self.where else ""
        and_on = f"{at}," if "," in at else at  # where the sentence goes on
        if self.left_early:
            return f"{who} left early{and_on} with exit status 0 (os._exit?)"
        if self.silent_s is not None and self.status == -signal.SIGKILL:
            why = "stopped, its host hangs, or C code keeps Python's lock"
            return f"{who} was silent for {self.silent_s:g} s{and_on} and was ended ({why})"
        if self.status < 0:
            number = -self.status
            known = number in {int(each) for each in signal.Signals}
            name = signal.Signals(number).name if known else "unknown"
            hints: dict[int, str] = {
                signal.SIGKILL: _KILLED[self.out_of_memory],
                signal.SIGSEGV: ", a segmentation fault",
                signal.SIGXCPU: ", as its CPU time was used up: raise that limit (ulimit -t)",
                signal.SIGBUS: ", perhaps a file was cut that it reads, or /dev/shm is full",
            }
            hint = "" if self.by_our_signal else hints.get(number, "")
            return f"{who} was killed by signal {number} ({name}){at}{hint}"
        if self.failure is not None:
            words = (self.failure.kind, " ".join(self.failure.message.split()))
            what = ": ".join(filter(None, words))
            hint = ""
            if "can't start new thread" in what:
                hint = f": {NO_MORE}"
            elif os.strerror(errno.EMFILE) in what:
                hint = ": close some, or raise the limit (ulimit -Hn, docker run --ulimit nofile=65536)"
            elif "unable to allocate shared memory" in what:  # of torch, for what a loader's workers send
                hint = ": /dev/shm is full: give it more (docker run --shm-size), or take fewer workers"
            elif self.failure.kind == MemoryError.__name__:
                hint = ": give it more memory (ulimit -v, docker --memory), or use less"
            return f"{who} failed with {what} (exit status {self.status}){hint}"
        return f"{who} failed with exit status {self.status}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a whole job."""

    status: int
    """The launcher's exit status."""
    line: str = ""
    """Its last line."""
    cause: Ending | None = None
    """The first failure, whose traceback is shown before."""


def name_of(rank: int, pid: int, host: int | None = None) -> str:
    """The name by which people know a rank. host: if there are several."""
    return f"rank {rank} (pid {pid})" if host is None else f"rank {rank} (host {host}, pid {pid})"


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure that came first, or None if there is none.

    A rank that lost its peer, or that we ended, is a cause only if nothing else is: the kernel closes a dying
    rank's connections before its parent can see it dead, so times alone would blame the survivors.
    """
    failures = [ending for ending in endings if not ending.ok]
    return min(
        failures,
        key=lambda each: (each.ended_by_us, each.because_of_peer, each.cause_time_s),
        default=None,
    )
