"""How the ranks that save together find each other, and hear the outcome of a save: by small files alone.

    checkpoints/.ranks/00000.json   rank 0: its session, who it is, whom it has heard, why attempts failed
    checkpoints/.ranks/00001.json   rank 1: its number

A killed job leaves such files too, and nobody may mistake them for this job's. So rank 0 draws a session at
random and every other rank a number; rank 0 lists the numbers that it finds; and a rank believes a session
only if its own number is in the list. From then on the session is in the name of every folder that they
write.

Rank 0 finds its own session in the file as long as no other job has begun to save in the folder. The job that
began last owns the folder, since a restarted job must not wait for remains of the one before, and no lock
tells on all file systems whether that one lives. The older job writes and removes nothing there any more.

Its manifest tells that an attempt succeeded, rank 0's file that it failed. On a full disk these files take
the room that was kept for them before the first save, in checkpoints/.ranks/00000.room and so on. A rank that
has no room either tells its failure by an empty file, 00000.mute-3 at its third save: that takes no block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from imece.checkpoint.manifest import seal, unseal
from imece.reading import Json
from imece.writing import NO_SPACE, leftovers, write_whole

_SHORTEST_S, _LONGEST_S = 0.01, 0.5  # between two looks at what others have written
_MOST_FAILURES = 16  # failures remembered: ranks are never more than one attempt apart
_MOST_BYTES = 64 << 20
_ROOM_BYTES, _ROOM_BYTES_A_RANK = 4096, 64  # of a note, and of the list of ranks that rank 0 has heard


class NotSavedError(Exception):
    """Why an attempt fails."""


class TakenOverError(NotSavedError):
    """Another job has begun to save in the folder."""


class Stop(threading.Event):
    """Set when no save can complete any more."""

    why = "training ended"
    """What happened before the save was complete, for messages."""

    def because(self, why: str) -> None:
        """Set it, with the reason."""
        self.why = why
        self.set()


class Patience:
    """Waits between looks, and gives up when they have shown the same for `limit_s`."""

    def __init__(self, limit_s: float, stop: Stop) -> None:
        self._limit_s, self._stop = limit_s, stop
        self._seen: object = self  # equal to nothing
        self._since, self._pause_s = 0.0, _SHORTEST_S

    def wait(self, seen: object, whom: str) -> None:
        """NotSavedError if it is time to give up, or if `stop` is set."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since, self._pause_s = seen, now, _SHORTEST_S
        if now - self._since > self._limit_s:
            raise NotSavedError(
                f"nothing came from {whom} for {self._limit_s:g} s; do all ranks see the same folder?"
            )
        if self._stop.wait(self._pause_s):
            raise NotSavedError(f"{self._stop.why} before it was complete")
        self._pause_s = min(_LONGEST_S, 1.5 * self._pause_s)


class Meeting:
    """One rank's side. Every method may raise OSError.

    number: drawn by this rank; rank 0's is the session. all_met: set by rank 0 once all others have found it;
    any number that it finds later is not of this job.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder / ".ranks", rank, world_size
        self.number = secrets.token_hex(8)
        self._session = self.number if rank == 0 else None
        self._heard: dict[str, str] = {}  # rank -> number
        self._failed: dict[str, str] = {}  # attempt -> why
        self._there = False
        self.all_met = world_size == 1

    def keep_room(self) -> None:
        """Keep room for this rank's messages, for when the disk is full; impossible if it already is."""
        if self._world_size == 1:
            return  # there is nobody to tell
        room = b" " * (_ROOM_BYTES + _ROOM_BYTES_A_RANK * self._world_size)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob(f"{self._rank:05d}.mute-*"):  # also those of a job before this one
                old.unlink(missing_ok=True)
            write_whole(self._room, room, durable=True)

    def arrive(self) -> None:
        """Make this rank known to rank 0; on rank 0, hear who has come since.

        TakenOverError, on rank 0, if another job has begun to save here since this one did.
        """
        if not self._there:
            for leftover in leftovers(self._folder, f"{self._rank:05d}.*"):
                leftover.unlink(missing_ok=True)
        if self._rank == 0:
            mine = self._read(0)
            if self._there and mine is not None and (other := self._other(mine)) is not None:
                raise TakenOverError(other)
            heard = {} if self.all_met else self._listen()
            if not self._there or mine is None or not heard.items() <= self._heard.items():
                self._heard |= heard
                self._tell()
        elif not self._there:
            self._publish(seal({"number": self.number}))
        self._there = True

    def all_heard(self, save: int) -> bool:
        """Whether every other rank has come, as far as rank 0 knows, or cannot at its save of this number."""
        return all(str(rank) in self._heard or self.mute(rank, save) for rank in range(1, self._world_size))

    def be_mute(self, save: int) -> None:
        """Tell that this rank's save of this number fails, where more cannot be told. Never an OSError."""
        with contextlib.suppress(OSError):
            self._mute(self._rank, save).touch()

    def mute(self, rank: int, save: int) -> str | None:
        """Why the save of this number fails, if `rank` has said so by `be_mute`."""
        if self._mute(rank, save).exists():
            return f"rank {rank} failed, and could write no more than that; its disk may be full"
        return None

    def session(self) -> str | None:
        """What all ranks of this job know, and only they. None until rank 0 has heard this rank."""
        if self._session is None and (note := self._of_rank_0()) is not None:
            self._session = str(note["session"])
        return self._session

    def failed(self, attempt: str, why: str) -> None:
        """Rank 0 tells the others that `attempt` will fail."""
        if self._world_size > 1:
            self._failed[attempt] = why
            self._failed = dict(list(self._failed.items())[-_MOST_FAILURES:])
            try:
                self._tell()
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._failed = {attempt: why}  # drop older ones: the file must not grow beyond its room
                self._tell()

    def failure(self, attempt: str) -> str | None:
        """Why `attempt`, of this session, fails: if rank 0 says so, or if another job has begun to
        save here."""
        note = self._read(0)
        if note is None:
            return None
        why: str | None = self._other(note) or note["failed"].get(attempt)
        return why

    def _tell(self) -> None:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        note = {"session": self._session, "who": who, "heard": self._heard, "failed": self._failed}
        self._publish(seal(note))

    def _publish(self, note: bytes) -> None:
        """Write this rank's file. On a full disk, into the room that it has or that was kept; whoever reads
        it meanwhile finds it damaged, and looks again.
        """
        path = self._path(self._rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, note)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            with contextlib.suppress(FileNotFoundError):  # it was taken before
                os.replace(self._room, path)
            if not path.exists():
                raise
            with path.open("r+b") as file:
                file.write(note.ljust(path.stat().st_size))
        else:
            if not self._room.exists():
                self.keep_room()

    def _other(self, note: Json) -> str | None:
        """Whose note rank 0's file is, if it is not of the session that this rank knows."""
        if note.get("session") == self._session:
            return None
        who = note.get("who", "of another imece")
        return f"another job ({who}) has begun to save in {self._folder.parent}: give each its own folder"

    def _listen(self) -> dict[str, str]:
        return {
            str(rank): str(note.get("number"))
            for rank in range(1, self._world_size)
            if (note := self._read(rank)) is not None
        }

    def _of_rank_0(self) -> Json | None:
        note = self._read(0)
        ours = note is not None and note.get("heard", {}).get(str(self._rank)) == self.number
        return note if ours else None

    def _read(self, rank: int) -> Json | None:
        try:
            with self._path(rank).open("rb") as file:
                # Its size first: to read at most so many bytes, Python takes memory for all of them.
                nbytes = min(_MOST_BYTES, os.fstat(file.fileno()).st_size)
                return unseal(file.read(nbytes).rstrip(b" "))
        except FileNotFoundError:
            return None
        except ValueError:  # cut off by an old power failure
            return None

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank:05d}.json"

    def _mute(self, rank: int, save: int) -> Path:
        return self._folder / f"{rank:05d}.mute-{save}"

    @property
    def _room(self) -> Path:
        return self._path(self._rank).with_suffix(".room")
