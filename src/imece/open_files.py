"""How many files a process may have open. Sockets, and memory and processes of other ranks, are files too."""

from __future__ import annotations

import contextlib
import resource

_MANY = 65_536  # of a thousand ranks; not more, as children may close each number up to the limit


def allow_open_files() -> None:
    """Raise the limit of this process and its children as far as the system admits. Most shells give 1,024,
    and a launcher of 128 ranks, or a rank among them with several groups, needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else min(_MANY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
