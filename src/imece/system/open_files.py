"""How many files a process may have open. Sockets, and memory and processes of other ranks, are files too."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import NamedTuple

from imece.errors import UserError
from imece.listing import many

_MANY = 65_536  # of a thousand ranks; not more, as children may close each number up to the limit


class Files(NamedTuple):
    """How many a process that starts ranks has open at the least, as counted in /proc while they ran."""

    each: int  # for a rank: pipes, what it notes, its process, its connections to the store
    own: int  # beside those that it has at the beginning, and 4 for what is open for a moment


SPAWN = Files(5, 16)
LAUNCH = Files(8, 18)  # of a script with imece.steps; a plain one has 6 for each rank
HOST_0, OTHER_HOST = Files(8, 24), Files(12, 24)  # ranks reach the store through their launchers
TRAIN = Files(8, 14)  # ranks that go on when others die have more connections


def allow_open_files() -> int:
    """Raise the limit of this process and its children as far as the system admits, and return it.

    Most shells give 1,024, and a launcher of 128 ranks, or a rank among them with several groups, needs more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else min(_MANY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def check_proc() -> None:
    """UserError where /proc does not show this process by its own number: what is read there of memory, open
    files and other ranks would be of no process, or of a stranger."""
    try:
        shown = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        shown = False
    if not shown:
        raise UserError(
            "/proc does not show this process: it is not mounted here, or is that of other processes, and "
            "ranks find each other and their memory there: mount -t proc proc /proc (or unshare --mount-proc)"
        )


def check_open_files(ranks: int, files: Files) -> None:
    """UserError where this process may not open what so many ranks need. A store that can take no more
    connections says nothing, and ranks would wait for it. Nor without a /proc, in which they are counted."""
    check_proc()
    if (why := lacking(ranks, files, allow_open_files())) is not None:
        raise UserError(why)


def lacking(ranks: int, files: Files, allowed: int) -> str | None:
    """Why this process could not start so many, and what to do about it; or None."""
    needed = _beside(files) + ranks * files.each
    if needed <= allowed:
        return None
    most = most_ranks(files, allowed)
    fewer = f", or start {most:,} at most" if most > 0 else ""
    return (
        f"{many(ranks, 'rank')} need {needed:,} open files, and {allowed:,} are allowed "
        f"(ulimit -Hn): raise that limit (ulimit -n, LimitNOFILE, docker run --ulimit nofile=65536){fewer}"
    )


def most_ranks(files: Files, allowed: int) -> int:
    """How many this process can start; not above 0 if none."""
    return (allowed - _beside(files)) // files.each


def _beside(files: Files) -> int:
    return files.own + len(os.listdir("/proc/self/fd")) - 1  # without the list's own
