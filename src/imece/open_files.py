"""How many files a process may have open: sockets, and memory and processes of other ranks, are files too."""

from __future__ import annotations

import contextlib
import resource

_MANY = 65_536  # of a thousand ranks; what a rank starts may close each number up to its limit, one by one


def allow_open_files() -> None:
    """Let this process, and what it starts, have as many as the system admits: shells give mostly 1,024, and
    a launcher of 128 ranks, or a rank among them with several groups, has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else min(_MANY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that has a limit of its own below
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
