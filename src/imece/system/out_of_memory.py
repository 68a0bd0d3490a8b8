"""The kernel's out-of-memory killer: whether it has ended a process, and which one it takes first."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

from imece.system.control_groups import allowed_bytes, kills

_LAUNCHER_BYTES = 256 << 20  # more than a launcher has beyond a rank that has just begun
_MOST = 1000  # what the kernel takes: thousandths of all memory, as if the process had so much more
_VMSTAT, _PREFERENCE = Path("/proc/vmstat"), Path("/proc/self/oom_score_adj")


class Killer:
    """Looks whether it has struck.

    A kill is counted before its victim ends, in the victim's control group and for the whole machine, whether
    it was the group or the machine that had no more.
    """

    def __init__(self) -> None:
        self._in_groups, self._anywhere = kills(), _of_machine()

    def struck(self) -> bool | None:
        """Whether it has ended a process of this one's groups since the last call; None if that cannot be
        said: the groups do not show it, and the victim may have been another's."""
        before, here_before = self._anywhere, self._in_groups
        self._in_groups, self._anywhere = kills(), _of_machine()
        if self._in_groups > here_before:
            return True
        return False if self._anywhere is not None and self._anywhere == before else None


def preference() -> str:
    """For `take_first`: with it a launcher's children are taken, and the launcher lives to say so, though it
    may be the larger one while they begin."""
    more = math.ceil(_MOST * _LAUNCHER_BYTES / max(1, allowed_bytes()))
    with contextlib.suppress(OSError, ValueError):  # no such file on this system
        return str(min(_MOST, int(_PREFERENCE.read_text()) + more))
    return ""


def take_first(preferred: str) -> None:
    """In a child. preferred: its launcher's `preference()`."""
    with contextlib.suppress(OSError):
        if preferred:
            _PREFERENCE.write_text(preferred)


def _of_machine() -> int | None:
    """The machine's count; None if it is not shown, as in some sandboxes."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE):
            return int(found[1])
    return None
