"""The cores, the memory and the threads that this process may use: what a container, a SLURM job or a systemd
unit allows.

A limit holds for a control group and all below it, so each ancestor counts. Version 2 has one tree, version 1
one for each kind of limit. In a container the path may be that of the host, of which only the root is
visible: missing groups are passed over.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

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


def usable_cores() -> int:
    """The number of cores this process may run on, or fewer if a control group has a quota (Kubernetes'
    limits.cpu, docker's --cpus); at least 1.

    A process that runs more threads than its quota allows is stopped, with all of them, for the rest of each
    period.
    """
    known = hasattr(os, "sched_getaffinity")
    there = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, int(min([there, *_quotas()])))


def allowed_bytes() -> int:
    """Bytes of memory, in use or not: the machine's, or what this process may have of it if that is less."""
    return min([psutil.virtual_memory().total, *(each.most_bytes for each in limits())])


def limits() -> list[Limit]:
    """The memory limits of this process' groups; empty if nothing is limited."""
    found = []
    for group, version in _groups("memory"):
        most, used, unused = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        try:
            allowed, taken = (group / most).read_text().strip(), int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # a root, which has no limit, or a group that cannot be seen from here
        if allowed != "max":
            found.append(Limit(int(allowed), max(0, taken - int(stat.get(unused, 0)))))
    return found


def kills() -> int:
    """How many processes of this process' groups the kernel has ended for want of memory."""
    found = 0
    for group, version in _groups("memory"):
        with contextlib.suppress(OSError):  # as above
            lines = (group / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
            found += int(dict(line.split() for line in lines.splitlines()).get("oom_kill", 0))
    return found


def free_threads() -> int | None:
    """How many more processes and threads may be started: by this process' groups, and by its user, whose
    threads in all groups count. None if neither is limited."""
    left: list[int] = []
    for group, _ in _groups("pids"):
        with contextlib.suppress(OSError):  # as above
            if (allowed := (group / "pids.max").read_text().strip()) != "max":
                left.append(int(allowed) - int((group / "pids.current").read_text()))
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and (user := os.getuid()) != 0:  # root has no such limit
        used = 0
        for process in psutil.process_iter(["uids", "num_threads"]):
            if process.info["uids"] is not None and process.info["uids"].real == user:
                used += process.info["num_threads"] or 0
        left.append(most - used)
    return max(0, min(left)) if left else None


def _quotas() -> Iterator[float]:
    """The quotas of CPU time, in cores."""
    for group, version in _groups("cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota_us, period_us = " ".join((group / name).read_text() for name in files).split()
        except OSError:
            continue  # as above
        if quota_us not in ("max", "-1"):
            yield int(quota_us) / int(period_us)


def _groups(controller: Literal["cpu", "memory", "pids"]) -> Iterator[tuple[Path, int]]:
    """The folders of this process' groups and of all above them, each with its version, 1 or 2."""
    try:
        lines = _PROC.read_text().splitlines()
    except OSError:
        return  # no control groups here
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tree = _TREES / controller if controllers else _TREES
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield tree / group, 1 if controllers else 2
