"""What the kernel is asked about processes, and to do with them: a rank, and what it has started."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # here: a child between fork and exec must not take the loader's lock
_PARENT_GONE = 143


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


def hear_of_cpu_limit() -> None:
    """In a child: make the kernel end it by SIGXCPU, a second before a limit of CPU time at which it sends
    SIGKILL, which anybody may have sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft == hard != resource.RLIM_INFINITY and hard > 1:
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))


def reap_adopted(own: Collection[int]) -> None:
    """Reap children that have ended and nobody waits for, but not the `own`, which somebody does.

    In a container the launcher is process 1, and gets all that lose their parent: a dead rank's workers, what
    a script has left in the background. Unreaped they would count as processes of the container for ever.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child
        # One of its own that has ended hides the others until it is reaped.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


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
