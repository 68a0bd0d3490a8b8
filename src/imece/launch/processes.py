"""What `imece launch` and `imece.spawn` share: a rank's environment, how it ends, which failure was first."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imece.cores import usable_cores
from imece.errors import UserError
from imece.status import Failure
from imece.world import AGENT_PORT, JOINING, LOOPBACK, MEMBER

MAX_RANKS = 1024  # of one host; a typing error above it would only exhaust the host
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # found here: a child between fork and exec must not take the loader's lock
_PARENT_GONE = 143
SAID = 2
"""The status of a command that has told a user's mistake."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    rank: int
    pid: int  # that it has told of itself, or of what was started
    status: int  # exit status; negative: ended by that signal
    time_s: float  # monotonic, when its end was seen
    failure: Failure | None = None  # what the rank itself said of it
    left_early: bool = False  # status 0 in the middle of an open world
    ended_by_us: bool = False
    silent_s: float | None = None  # it was ended because it had not been heard of for so long
    host: int | None = None  # where, if there are several
    lost: str = ""  # how its whole host went, which is all that is known of it
    where: str = ""  # "in backward of step 41", if it has noted that (membership/where.py)
    by_our_signal: bool = False  # it was killed by one that we have sent it, to end it

    @property
    def ok(self) -> bool:
        """Whether the rank finished its work."""
        return self.status == 0 and not self.left_early

    @property
    def because_of_peer(self) -> bool:
        """Whether it only failed since another rank had gone."""
        return self.failure is not None and self.failure.because_of_peer

    @property
    def died(self) -> bool:
        """Whether it ended without an exception, nor a decision, of its own."""
        return (self.status < 0 or self.left_early) and (self.failure is None or self.because_of_peer)

    @property
    def is_mistake(self) -> bool:
        """Whether it is a user's, which no repetition mends."""
        return self.status == SAID or (self.failure is not None and self.failure.kind == UserError.__name__)

    @property
    def cause_time_s(self) -> float:
        """When it failed: what a rank says of itself comes before its slow exit."""
        return self.failure.time_s if self.failure is not None else self.time_s

    def describe(self) -> str:
        """One line, with the phase of a death if it is known: "rank 1 (pid 4711) was killed by signal 9
        (SIGKILL) in backward of step 41, perhaps out of memory"."""
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
                signal.SIGKILL: ", perhaps out of memory",
                signal.SIGSEGV: ", a segmentation fault",
            }
            hint = "" if self.by_our_signal else hints.get(number, "")
            return f"{who} was killed by signal {number} ({name}){at}{hint}"
        if self.failure is not None:
            what = " ".join(f"{self.failure.kind}: {self.failure.message}".split())
            return f"{who} failed with {what} (exit status {self.status})"
        return f"{who} failed with exit status {self.status}"


@dataclass(frozen=True)
class Outcome:
    """What became of a whole job."""

    status: int
    """The launcher's exit status."""
    line: str = ""
    """What it says last."""
    cause: Ending | None = None
    """The first failure, whose traceback is shown before."""


def name_of(rank: int, pid: int, host: int | None = None) -> str:
    """What a person knows a rank by. host: where there are several."""
    return f"rank {rank} (pid {pid})" if host is None else f"rank {rank} (host {host}, pid {pid})"


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure that came first, or None if there is none.

    A rank that lost its peer, or that we ended, is a cause only if nothing else is: the kernel closes a
    dying rank's connections before its parent can see it dead, so times alone would blame the survivors.
    """
    failures = [ending for ending in endings if not ending.ok]
    return min(
        failures,
        key=lambda each: (each.ended_by_us, each.because_of_peer, each.cause_time_s),
        default=None,
    )


def worker_environment(
    environ: Mapping[str, str],
    rank: int,
    ranks: int,
    port: int,
    job: str,
    *,
    member: int | None = None,
    joining: bool = False,
    starts: int = 0,
) -> dict[str, str]:
    """`environ` with torchrun's variables for one of `ranks` ranks of this host.

    member: its number, if the parent keeps a roster. joining: it takes the place of one that died, and is a
    world of its own at first. starts: torchrun's restart count, by which torch's keys in the store differ.

    The store listens on loopback at `port` and is served by the parent. Threads are shared out; Gloo and
    NCCL stay on loopback. What the person has set of the latter is left as it is.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    own: dict[str, object] = {
        "RANK": 0 if joining else rank,
        "WORLD_SIZE": 1 if joining else ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": 0 if joining else rank,
        "ROLE_WORLD_SIZE": 1 if joining else ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": starts,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": job,
    }
    if member is not None:
        own[MEMBER] = member
    if joining:
        own[JOINING] = 1
    # A rank may itself start ranks: they are no members of its job.
    theirs = {name: value for name, value in environ.items() if name not in (MEMBER, JOINING, AGENT_PORT)}
    return {**defaults, **theirs, **{name: str(value) for name, value in own.items()}}


def die_with_parent(parent_pid: int) -> None:
    """Called in a child: let the kernel kill it as soon as its parent dies, also by SIGKILL."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(_PARENT_GONE)


def die_together(pipe: int) -> None:
    """Called in a child that leads a group, with the reading end of a pipe that it keeps open: let the kernel
    kill the whole group, what a wrapper has started too, as soon as nobody has the other end."""
    with contextlib.suppress(OSError):  # a kernel that does not know this: the leader dies in any case
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def prints_stacks(pid: int) -> bool:
    """Whether SIGUSR1 may be sent: the process has a handler for it (imece.init's shows stacks and calls)."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _proc(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def cpu_s_of(pid: int) -> float:
    """For how long the process has computed so far, all its threads together; 0 if it has ended."""
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger."""
    return _proc(pid, "stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def is_in_group(pid: int, group: int) -> bool:
    """Whether there is such a process in the process group that `group` leads."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def group_lives(group: int) -> bool:
    """Whether a process of that group has not ended, though its leader may have."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads: the rank and what it has started.

    `pid` must not have been reaped yet, or its number may have become another's.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
