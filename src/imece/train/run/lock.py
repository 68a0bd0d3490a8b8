"""A lock that lets only one command at a time train in a run folder; all processes of a run share it.

A command that begins a run asks for the lock exclusively, so it is refused while any process of another run
lives. The kernel frees each process' part when it ends; child processes do not inherit it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from imece.errors import UserError

FILE = ".lock"
"""The lock file in the run folder. It stays there, and says who began the current run."""
HELD = "IMECE_RUN_HELD"
"""Set to 1 in the environment of ranks whose launcher holds the lock as long as any of them lives."""
_STARTED_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_MOST_BYTES = 200  # of the file's text


class RunLock:
    """This process' part of the lock, until its block is left.

    If files cannot be locked (no locks on this file system, or a read-only folder), nobody is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._descriptor: int | None = None
        self._said = False

    def begin(self) -> None:
        """Take the lock before anything in the existing folder changes. UserError if a run is under way in
        it.

        A restarted job is never refused: the lock's holder may be its own earlier process, still ending, or
        on a lost host, whose locks a file server keeps for minutes.
        """
        if os.environ.get(HELD) == "1":
            return
        try:
            self._lock(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            self._say_who()
            self._lock(os.O_RDWR, fcntl.LOCK_SH)
        except BlockingIOError:
            if any(os.environ.get(name, "0") != "0" for name in _STARTED_AGAIN):
                self.join()
                return
            raise UserError(
                f"a run is under way in {self._path.parent} ({self._who()}): wait for its end or stop it, or "
                "name another folder with --run"
            ) from None
        except OSError:  # locks are not available
            pass

    def join(self) -> None:
        """Join the lock as one more rank of a run that has begun."""
        if os.environ.get(HELD) != "1":
            with contextlib.suppress(OSError):  # no lock on this host, or it cannot be taken
                self._lock(os.O_RDONLY, fcntl.LOCK_SH)

    def _lock(self, flags: int, kind: int) -> None:
        """BlockingIOError if others hold it, another OSError if locks are not available."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, flags | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)

    def _say_who(self) -> None:
        assert self._descriptor is not None
        with contextlib.suppress(OSError):  # a full disk: the lock is held without the text
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._said = True

    def _who(self) -> str:
        assert self._descriptor is not None
        said = os.pread(self._descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()
        return f"begun by {said}" if said else "begun by another process"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is None:
            return
        if self._said:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # the folder is as it was if nothing else was done in it
        os.close(self._descriptor)
        self._descriptor = None
