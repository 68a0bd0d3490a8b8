"""Shared by `imece launch` and `imece.spawn`: a rank's environment, how it ends, which failure was first."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imece.errors import UserError
from imece.launch.hosts.token import VARIABLES
from imece.status import Failure
from imece.store import NO_MORE
from imece.system.control_groups import usable_cores
from imece.world import AGENT_PORT, JOINING, LOOPBACK, MEMBER

MOST_RANKS_PER_HOST = 1024  # more would be a typing error and exhaust the host
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # here: a child between fork and exec must not take the loader's lock
_PARENT_GONE = 143
_KILLED = {
    True: ", as memory ran out: give it more (docker --memory, SLURM's --mem), or use less",
    None: ", perhaps out of memory",
    False: "",
}
SAID = 2
"""The exit status of a command that has reported a user's mistake."""


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

    member: its number, if the parent keeps a roster. joining: it replaces a dead rank, and is a world of its
    own at first. starts: torchrun's restart count, which keeps torch's keys in the store apart.

    The store listens on loopback at `port` and is served by the parent. Threads are divided among ranks; Gloo
    and NCCL stay on loopback, unless the user has set their variables.
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
    # A rank may itself start ranks: they are no members of its job. None needs to know the launchers' secret.
    left_out = (MEMBER, JOINING, AGENT_PORT, *VARIABLES)
    theirs = {name: value for name, value in environ.items() if name not in left_out}
    return {**defaults, **theirs, **{name: str(value) for name, value in own.items()}}


def die_with_parent(parent_pid: int) -> None:
    """In a child: make the kernel kill it as soon as its parent dies, even by SIGKILL."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(_PARENT_GONE)


def die_together(pipe: int) -> None:
    """In a child that leads a group: make the kernel kill the whole group, also what a wrapper has started,
    as soon as nobody has the other end of `pipe` open. pipe: the reading end, which the child keeps open."""
    with contextlib.suppress(OSError):  # a kernel without this: the leader dies in any case
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal, which would end it otherwise."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _proc(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def busy_s_of(pid: int) -> float:
    """Seconds that the process has computed so far, or was kept waiting for a core by others; all its threads
    together. 0 if it has ended."""
    computed, waited_ns = _proc(pid, "stat").rpartition(")")[2].split()[11:13], 0
    with contextlib.suppress(OSError):  # it has ended, or no file may be opened any more
        for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waited_ns += int(each.read_text().split()[1])
    return sum(map(int, computed)) / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger."""
    return _proc(pid, "stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def is_in_group(pid: int, group: int) -> bool:
    """Whether there is such a process in the process group that `group` leads."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def group_lives(group: int) -> bool:
    """Whether some process of that group has not ended, even if its leader has."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads: the rank and what it has started.

    SIGKILL leaves Python's resource trackers alive, if they are in the group (trackers.py). Without the rank
    and its workers they end by themselves, and take out of /dev/shm what these have left: semaphores of a
    loader's workers, and shared memory.

    `pid` must not have been reaped yet, or its number may belong to another process.
    """
    if signum == signal.SIGKILL:
        with contextlib.suppress(OSError, MemoryError):  # no means to look: trackers die as well
            if any(map(_is_tracker, _members(pid))):
                _kill_but_trackers(pid)
                return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
    if signum == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)  # a rank leaves its group for a moment (trackers.py)


def _kill_but_trackers(group: int) -> None:
    killed: set[int] = set()
    while others := {each for each in _members(group) if each not in killed and not _is_tracker(each)}:
        for each in others:  # which may just have started another one
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed |= others


def _members(group: int) -> Iterator[int]:
    """The processes of a group, also those that have ended and are not reaped."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and is_in_group(int(name), group):
            yield int(name)


def _is_tracker(pid: int) -> bool:
    return "from multiprocessing.resource_tracker import main" in _proc(pid, "cmdline")
