"""The memory that a container, a SLURM job or a systemd unit allows: the limits of this process'
control groups.

A limit holds for a group and all below it, so each ancestor counts. Version 2 has one tree, version 1 one for
memory. In a container the path may be that of the host, of which only the root is visible: missing groups are
passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_PROC, _TREES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """The memory limit of one control group."""

    most_bytes: int
    used_bytes: int
    """Without cached files that were not read recently: the kernel drops them before it refuses memory."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.most_bytes - self.used_bytes)


def allowed_bytes() -> int:
    """Bytes of memory, in use or not: the machine's, or what this process may have of it if that is less."""
    return min([psutil.virtual_memory().total, *(each.most_bytes for each in limits())])


def limits() -> list[Limit]:
    """The limits of this process' groups and their ancestors; empty if nothing is limited."""
    try:
        lines = _PROC.read_text().splitlines()
    except OSError:
        return []  # no control groups here
    return list(_limits(lines))


def _limits(lines: list[str]) -> Iterator[Limit]:
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            tree = _TREES
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tree = _TREES / "memory"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            found = _limit(tree / group, *files)
            if found is not None:
                yield found


def _limit(group: Path, most: str, used: str, unused: str) -> Limit | None:
    try:
        allowed, taken = (group / most).read_text().strip(), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # a root, which has no limit, or a group that cannot be seen from here
    return None if allowed == "max" else Limit(int(allowed), max(0, taken - int(stat.get(unused, 0))))
