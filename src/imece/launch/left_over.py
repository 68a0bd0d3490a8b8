"""What a job leaves behind on its host: processes, and files in /dev/shm."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_MARK = "IMECE_MARK"
_SHM = Path("/dev/shm")
_ENDING_S = 1.0  # a process that was just killed may take a moment to go


class Traces:
    """Create it before a job is started with its `environ`; ask it after the job's end."""

    def __init__(self) -> None:
        self.environ = {_MARK: secrets.token_hex(16)}
        """Variables that mark the job, and everything it starts, in their environment."""
        self._files_before = set(_own_files())

    def left(self) -> list[str]:
        """A few words for each process and file that is left."""
        until = time.monotonic() + _ENDING_S
        while (found := list(self._processes())) and time.monotonic() < until:
            time.sleep(0.05)
        files = [name for name in _own_files() if name not in self._files_before]
        if files:
            used = _files_in_use()
            found += [f"/dev/shm/{name}" for name in files if f"/dev/shm/{name}" not in used]
        return found

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(_MARK) == self.environ[_MARK]
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"process {process.pid} ({process.name()})"
            except (psutil.Error, OSError):  # the process has gone, or belongs to another user
                continue


def _own_files() -> list[str]:
    """The names of this user's files in /dev/shm."""
    found = []
    for path in _SHM.glob("*"):
        try:
            if path.lstat().st_uid == os.getuid():
                found.append(path.name)
        except OSError:
            continue
    return sorted(found)


def _files_in_use() -> set[str]:
    """Names of files in /dev/shm that a process has mapped: those of programs that run at the same time."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue
        used |= {line[line.index("/dev/shm/") :] for line in text.splitlines() if "/dev/shm/" in line}
    return used
