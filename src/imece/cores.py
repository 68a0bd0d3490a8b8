"""The cores that this process may use, within quotas of CPU time (Kubernetes' limits.cpu, docker's
--cpus). A process that runs more threads than its quota allows is stopped, with all of them, for the rest
of each period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC, _TREES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of cores this process may run on, or fewer if a control group has a quota; at least 1."""
    known = hasattr(os, "sched_getaffinity")
    there = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, int(min([there, *_quotas()])))


def _quotas() -> Iterator[float]:
    """The quotas, in cores, of this process' control groups and all above them: version 2, or version 1's
    cpu tree."""
    try:
        lines = _PROC.read_text().splitlines()
    except OSError:
        return  # no control groups here
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        tree = _TREES / "cpu" if controllers else _TREES
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            try:
                quota_us, period_us = " ".join((tree / group / name).read_text() for name in files).split()
            except OSError:
                continue  # a root, which has none, or a group that cannot be seen from here
            if quota_us not in ("max", "-1"):
                yield int(quota_us) / int(period_us)
