"""Saving in the background: training stands still only while the tensors are copied.

The steps of a save, in order. On the training's thread: wait for the save before; copy what this rank writes.
On a thread of its own: write it, and say so; rank 0 waits until all have said so, and makes a checkpoint of
it; the others wait for that. So every rank knows what became of it before it begins the next one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imece.checkpoint import commit, deal, files
from imece.checkpoint.commit import Part
from imece.checkpoint.manifest import MANIFEST, File, Json, Kind, Piece, begins, file_name, header
from imece.checkpoint.meeting import Meeting, NotSavedError, Patience
from imece.errors import UserError
from imece.writing import sync_folder


@dataclass(frozen=True)
class _Job:
    """One attempt, as the thread gets it from `save`."""

    number: int  # of this `Checkpoints`, the same on all ranks
    step: int
    kinds: dict[str, Kind]
    sliced: frozenset[str]
    pieces: tuple[Piece, ...]
    buffer: torch.Tensor | None  # uint8 [bytes of all pieces]; None if there was no memory for it
    state: Json
    rank_state: Any
    metric: float | None
    keep_all: bool


class Checkpoints:
    """The checkpoints that the ranks of one job write into one folder, which all of them see."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        keep: int = 2,
        alarm: Callable[[str], None],
        limit_s: float = 300.0,
    ) -> None:
        """keep: how many of the newest stay, fewer where the disk has no room for one more; the one with the
        lowest metric stays as well.

        alarm: called with one line when a save came to nothing, once on every rank, mostly from another
        thread. limit_s: how long rank 0 waits while nothing new comes from the others; they wait twice as
        long for it. UserError if the folder cannot be made or cleaned.
        """
        if not 0 <= rank < world_size or keep < 1:
            raise ValueError(f"rank {rank} of {world_size}, keep {keep}: keep at least 1")
        self._folder, self._rank, self._world_size, self._keep = folder, rank, world_size, keep
        self._alarm, self._limit_s = alarm, limit_s
        self._meeting = Meeting(folder, rank, world_size)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._saves = 0
        self._saved = True  # the newest save, if any
        self._newest: int | None = None  # the step of the last one that was put in place, known to rank 0
        self._told_of_room = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                files.clean(folder)
        except OSError as error:
            raise UserError(
                f"{folder}: checkpoints cannot be written there ({error.strerror}): check its permissions"
            ) from error

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | deal.Slice],
        state: Json,
        rank_state: Any,
        *,
        metric: float | None = None,
        keep_all: bool = False,
    ) -> None:
        """Every rank calls it with the same step; on return the tensors may change.

        tensors: on any device. A Tensor is whole and equal on all ranks, which deal the bytes of all such
        out among themselves; of a Slice each rank writes its own. state: JSON, the same on all ranks.
        rank_state: JSON, this rank's own. metric: the lower the better; not finite is as good as none. It is
        compared with those of the same state["metric_on"] and state["metric_over"], if these are given.
        keep_all: no older one goes away for this one; a later save without it removes what is too many.

        Waits for the save before, if it is still under way. Makes one copy of what this rank writes, and
        keeps that memory for the next save. Nothing that goes wrong on the disk is raised: see `finish`.

        ValueError or TypeError, with the name, for a tensor that cannot be saved, a slice that is not within
        its tensor, and for what is no JSON. That ranks disagree on their tensors is an alarm.
        """
        self._join()
        self._saves += 1  # also if this one is refused here: the other ranks count it
        step = int(step)
        if step < 0 or self._stop.is_set():
            raise ValueError(f"step {step}: at least 0, and not after close()")
        kinds = deal.kinds(tensors)
        pieces = deal.deal(tensors, kinds, self._rank, self._world_size)
        buffer = self._room(sum(piece.nbytes for piece in pieces))
        if buffer is not None:
            deal.copy_into(buffer, tensors, pieces)
        job = _Job(
            number=self._saves,
            step=step,
            kinds=kinds,
            sliced=frozenset(name for name, value in tensors.items() if isinstance(value, deal.Slice)),
            pieces=pieces,
            buffer=buffer,
            state=json.loads(json.dumps(state, allow_nan=False)),  # as it is now
            rank_state=json.loads(json.dumps(rank_state, allow_nan=False)),
            metric=commit.finite(metric),
            keep_all=keep_all,
        )
        self._saved = False
        # A daemon: a rank that fails must be able to end, and what is half-written is never read.
        self._thread = threading.Thread(target=self._run, args=(job,), name="imece-save", daemon=True)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> bool:
        """Waits for the save under way, on all ranks, and says whether the newest save is on the disk.

        All ranks get the same answer. True if there was none.
        """
        self._join()
        return self._saved

    def close(self) -> None:
        """Gives up a save under way, with an alarm (`finish` first, if there is time). Frees the memory."""
        self._stop.set()
        self._join()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """The buffer for one save, the one of the save before if it fits. No save is under way."""
        if self._buffer.numel() != nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never both at once
            try:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            except (MemoryError, RuntimeError):  # torch says the latter
                return None
        return self._buffer

    # From here on: the thread of a save.

    def _run(self, job: _Job) -> None:
        try:
            (self._lead if self._rank == 0 else self._follow)(job)
            self._saved = True
        except BaseException as error:
            self._alarm(
                f"the checkpoint of step {job.step} was not saved: {_why(error)}; older ones are as they were"
            )
            if not isinstance(error, NotSavedError):  # a mistake of ours: with its traceback
                raise

    def _lead(self, job: _Job) -> None:
        """Rank 0's part. NotSavedError once all that was written is removed and the others are told."""
        attempt = f"{self._meeting.session()}-{job.number}"
        partial = files.partial_folder(self._folder, job.step, attempt)
        final = files.step_folder(self._folder, job.step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.clean(self._folder, but=partial)
            if not job.keep_all:
                self._make_room(partial)
            self._meeting.arrive()
            parts = [self._write(job, partial), *self._await_parts(partial)]
            manifest = commit.put_together(job.step, attempt, job.metric, job.state, parts)
            commit.commit(partial, final, manifest)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError, NotSavedError):  # then the others wait until their time is up
                self._hear_all()
                self._meeting.failed(attempt, _why(error))
            if isinstance(error, OSError | ValueError | UserError):
                raise NotSavedError(_why(error)) from error
            raise
        # What can be loaded counts as saved, on all ranks; but nothing goes before it surely stays.
        self._newest = job.step
        try:
            sync_folder(self._folder)
            files.drop_old(final)
            commit.prune(self._folder, job.step, sys.maxsize if job.keep_all else self._keep)
        except (OSError, UserError) as error:
            self._alarm(f"{final} is saved, but older checkpoints were not removed: {_why(error)}")

    def _make_room(self, partial: Path) -> None:
        """Give up older checkpoints until the disk has room for one more: never the newest, nor the best.

        Only once one of our own is in place: of those before it nobody here knows which can be read.
        """
        if self._newest is None:
            return
        with contextlib.suppress(OSError, UserError):  # if it matters, the save itself will say so
            newest = files.step_folder(self._folder, self._newest)
            # Until the manifest is there, all ranks' parts of it are too.
            needed = files.taken(newest) + (newest / MANIFEST).stat().st_size
            for keep in range(self._keep - 1, 0, -1):
                # Free first: what other ranks write meanwhile counts twice, and nothing is given up for it.
                if shutil.disk_usage(self._folder).free + files.taken(partial) >= needed:
                    return
                commit.prune(self._folder, self._newest, keep)
                if not self._told_of_room:
                    self._told_of_room = True
                    self._alarm(f"no room for {self._keep} checkpoints: older ones make room for new ones")

    def _follow(self, job: _Job) -> None:
        """Any other rank's part. NotSavedError, with rank 0's reason if there is one."""
        patience = Patience(2 * self._limit_s, self._stop)
        while (session := self._session()) is None:
            patience.wait(None, "rank 0")
        attempt = f"{session}-{job.number}"
        partial = files.partial_folder(self._folder, job.step, attempt)
        final = files.step_folder(self._folder, job.step)
        own = ""
        try:
            if self._failure(attempt) is None:
                self._write(job, partial)
        except Exception as error:
            own = _why(error)
            with contextlib.suppress(OSError):  # then rank 0 waits until its time is up
                (partial / file_name(self._rank)).unlink(missing_ok=True)  # makes room for the excuse
                commit.write_excuse(partial, self._rank, own)
            if not isinstance(error, OSError | NotSavedError):
                raise
        while not _is_of(final, attempt):
            if (theirs := self._failure(attempt)) is not None:
                shutil.rmtree(partial, ignore_errors=True)  # what this rank wrote after rank 0 removed it
                raise NotSavedError(theirs)
            try:
                patience.wait(_sizes(partial), "rank 0")
            except NotSavedError as error:
                # Of two renames one comes first: either rank 0 cannot put it in place any more, or it has.
                if not self._stop.is_set() and not files.withdraw(partial) and _is_of(final, attempt):
                    return
                raise NotSavedError(f"rank {self._rank}: {own}" if own else str(error)) from error

    def _write(self, job: _Job, partial: Path) -> Part:
        """This rank's tensors, then its word that they are there."""
        partial.mkdir(parents=True, exist_ok=True)
        if job.buffer is None:
            total = sum(piece.nbytes for piece in job.pieces)
            raise NotSavedError(f"no memory for a copy of the {total} bytes that this rank writes")
        chunks = (header(job.pieces), job.buffer.numpy().data)
        nbytes, sha256 = files.write(partial / file_name(self._rank), chunks, self._go_on)
        part = Part(job.kinds, job.sliced, File(nbytes, sha256, job.pieces), job.rank_state)
        commit.write_part(partial, self._rank, part)
        return part

    def _hear_all(self) -> None:
        """A rank that has not been heard yet would not believe what rank 0 says of an attempt."""
        patience = Patience(self._limit_s, self._stop)
        self._meeting.arrive()
        while not self._meeting.all_heard:
            patience.wait(None, "the other ranks")
            self._meeting.arrive()

    def _await_parts(self, partial: Path) -> list[Part]:
        """Of ranks 1, 2, ...: as soon as all have come, or one cannot."""
        patience = Patience(self._limit_s, self._stop)
        parts: dict[int, Part] = {}
        while missing := [rank for rank in range(1, self._world_size) if rank not in parts]:
            for rank in missing:
                found = commit.read_part(partial, rank)
                if isinstance(found, str):
                    raise NotSavedError(f"rank {rank}: {found}")
                if found is not None:
                    parts[rank] = found
            if len(parts) + 1 < self._world_size:
                self._meeting.arrive()
                missing = [rank for rank in missing if rank not in parts]
                patience.wait(_sizes(partial), f"rank {', '.join(map(str, missing[:8]))}")
        return [parts[rank] for rank in range(1, self._world_size)]

    def _session(self) -> str | None:
        try:
            self._meeting.arrive()
            return self._meeting.session()
        except OSError:
            return None  # looked at again until time is up

    def _failure(self, attempt: str) -> str | None:
        try:
            return self._meeting.failure(attempt)
        except OSError:
            return None

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise NotSavedError("training ended before it was written")


def _is_of(final: Path, attempt: str) -> bool:
    """Whether the checkpoint in place is that of this attempt."""
    expected = begins(attempt)
    try:
        with (final / MANIFEST).open("rb") as file:
            return file.read(len(expected)) == expected
    except OSError:
        return False


def _sizes(partial: Path) -> list[tuple[str, int]]:
    """What changes as long as any rank writes."""
    try:
        return sorted((path.name, path.stat().st_size) for path in partial.iterdir())
    except OSError:  # not there yet, or no more; a file was renamed meanwhile
        return []


def _why(error: BaseException) -> str:
    if isinstance(error, OSError):
        name = f"{Path(str(error.filename)).name}: " if error.filename else ""
        return f"{name}{error.strerror}"
    return str(error) if isinstance(error, NotSavedError | ValueError | UserError) else repr(error)
