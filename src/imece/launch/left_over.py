"""What a job leaves behind on its host: processes, and files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_MARK = "IMECE_MARK"
_SHM = Path("/dev/shm")
_ENDING_S = 1.0  # what was just killed, and what cleans up after it, may take a moment to go


class Traces:
    """Create it before a job is started with its `environ`; ask it after the job's end."""

    def __init__(self) -> None:
        self.environ = {_MARK: secrets.token_hex(16)}
        """Variables that mark the job, and everything it starts, in their environment."""
        self._files_before = set(_own_files())

    def left(self) -> list[str]:
        """A few words for each process and file that is left."""
        until = time.monotonic() + _ENDING_S
        while (found := [*self._processes(), *self._files()]) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _files(self) -> list[str]:
        """New files that nobody uses. Other programs make some as well, and may just be done with them."""
        files = [name for name in _own_files() if name not in self._files_before]
        used = _files_in_use() if files else set()
        unused = [_SHM / name for name in files if f"{_SHM}/{name}" not in used]
        return [str(path) for path in unused if os.path.lexists(path)]  # not those that went meanwhile

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
    """Paths in /dev/shm that a process has mapped or open: those of programs that run at the same time."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            text = (process / "maps").read_text(errors="replace")
            used |= {line[line.index("/dev/shm/") :] for line in text.splitlines() if "/dev/shm/" in line}
            for each in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed
                    used.add(os.readlink(each))
    return used
