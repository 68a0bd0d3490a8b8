"""Writing a checkpoint, on a thread of its own: rank 0 leads, and the others follow."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imece.checkpoint import commit, files
from imece.checkpoint.commit import Part
from imece.checkpoint.manifest import MANIFEST, File, Kind, Piece, begins, file_name, header
from imece.checkpoint.meeting import Meeting, NotSavedError, Patience, Stop, TakenOverError
from imece.checkpoint.room import Room
from imece.errors import UserError
from imece.listing import rank_words
from imece.reading import Json
from imece.writing import NO_SPACE, NOT_ALLOWED, TOO_LARGE, sync_folder

# After this long, a folder that is neither partial nor in place counts as removed: file systems of several
# hosts may show a new name late.
_GONE_S = 60.0


@dataclass(frozen=True)
class Content:
    """What one rank has to save, as it was when `save` was called."""

    kinds: dict[str, Kind]
    sliced: frozenset[str]
    pieces: tuple[Piece, ...]
    buffer: torch.Tensor  # uint8 [bytes of all pieces]
    state: Json
    rank_state: Any


@dataclass(frozen=True)
class Request:
    """One save, as it was asked for."""

    number: int  # of this `Checkpoints`, the same on all ranks
    step: int
    content: Content | Exception  # an Exception says why this rank has no content; the others hear of it
    metric: float | None
    keep_all: bool

    @property
    def is_told(self) -> bool:
        """Whether `save` has raised the error on this rank."""
        return isinstance(self.content, Exception) and not isinstance(self.content, NotSavedError)

    def written(self) -> Content:
        """What this rank writes. NotSavedError if it has nothing."""
        if isinstance(self.content, Exception):
            raise NotSavedError(why_of(self.content))
        return self.content


class Writer:
    """One rank's part of every save, while the ranks stay the same. Runs on the thread of a save."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        *,
        keep: int,
        limit_s: float,
        alarm: Callable[[str], None],
    ) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._limit_s, self._alarm = limit_s, alarm
        self.stop = Stop()
        self._meeting = Meeting(folder, rank, world_size)
        self._meeting.keep_room()
        self._room = Room(folder, keep, self._meeting.number, alarm)

    def save(self, request: Request) -> None:
        """NotSavedError, on all ranks, if the save fails."""
        if self._rank == 0:
            self._lead(request)
        else:
            self._follow(request)

    def _lead(self, request: Request) -> None:
        """Rank 0's part. NotSavedError once everything written is removed and the others are told."""
        attempt = f"{self._meeting.session()}-{request.number}"
        partial = files.partial_folder(self._folder, request.step, attempt)
        final = files.step_folder(self._folder, request.step)
        try:
            content = request.written()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._meeting.arrive()  # or another job has the folder, and nothing in it is ours to clean
            files.clean(self._folder, but=attempt)
            if not request.keep_all:
                self._room.make(partial)
            parts = [self._write(content, partial), *self._await_parts(request, partial, attempt)]
            self._meeting.all_met = True
            manifest = commit.put_together(request.step, attempt, request.metric, content.state, parts)
            self._meeting.arrive()
            commit.commit(partial, final, manifest)
        except BaseException as error:
            why = why_of(error)
            if isinstance(request.content, Content):
                why += self._room.lacking(request.content.kinds, partial)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                self._hear_all(request)
                self._meeting.failed(attempt, why)
            except TakenOverError as other:  # and perhaps its clean-up made us fail
                why = str(other)
            except (OSError, MemoryError, NotSavedError):
                self._meeting.be_mute(request.number)
            if isinstance(error, OSError | ValueError | UserError | NotSavedError):
                raise NotSavedError(why) from error
            raise
        # What can be loaded counts as saved, on all ranks; but nothing is removed before it is sure to stay.
        try:
            sync_folder(self._folder)
            files.drop_old(final)
            self._room.taken_by(request.step, request.keep_all)
        except (OSError, UserError) as error:
            self._alarm(f"{final} is saved, but older checkpoints were not removed: {why_of(error)}")

    def _follow(self, request: Request) -> None:
        """Any other rank's part. NotSavedError, with rank 0's reason if there is one."""
        patience = Patience(2 * self._limit_s, self.stop)
        while (session := self._session(request)) is None:
            if (why := self._meeting.mute(0, request.number)) is not None:
                raise NotSavedError(why)
            patience.wait(None, "rank 0")
        attempt = f"{session}-{request.number}"
        partial = files.partial_folder(self._folder, request.step, attempt)
        own = self._write_or_excuse(request, partial, attempt)
        self._await_verdict(request, partial, attempt, patience, own)

    def _write_or_excuse(self, request: Request, partial: Path, attempt: str) -> str:
        """Writes this rank's part, or in its place why it cannot, and returns that; "" if it is written."""
        try:
            if self._failure(request, attempt) is None:
                self._write_in_time(request, partial, attempt)
            return ""
        except Exception as error:
            own = why_of(error)
            try:
                (partial / file_name(self._rank)).unlink(missing_ok=True)  # makes room for the excuse
                commit.write_excuse(partial, self._rank, own)
            except FileNotFoundError:  # rank 0 has removed the folder, and is about to say why
                pass
            except OSError:  # the outcome is known here
                self._meeting.be_mute(request.number)
                if isinstance(error, OSError | NotSavedError):
                    raise NotSavedError(f"rank {self._rank}: {own}") from error
            if not isinstance(error, OSError | NotSavedError):
                raise
            return own

    def _await_verdict(
        self, request: Request, partial: Path, attempt: str, patience: Patience, own: str
    ) -> None:
        """Waits until the checkpoint is in place. NotSavedError if it will not be. own: why, if it is this
        rank's fault."""
        final = files.step_folder(self._folder, request.step)
        there_at = time.monotonic()
        while not _is_of(final, attempt):
            if (theirs := self._failure(request, attempt)) is not None:
                shutil.rmtree(partial, ignore_errors=True)  # written by this rank after rank 0 removed it
                raise NotSavedError(theirs)
            if partial.exists():
                there_at = time.monotonic()
            elif time.monotonic() - there_at > _GONE_S:
                raise NotSavedError(f"{partial} was removed while it was written")
            try:
                patience.wait(_sizes(partial), "rank 0")
            except NotSavedError as error:
                # One of two renames comes first: either rank 0 cannot put it in place any more, or it has.
                if not self.stop.is_set() and not files.withdraw(partial) and _is_of(final, attempt):
                    return
                raise NotSavedError(f"rank {self._rank}: {own}" if own else str(error)) from error

    def _write_in_time(self, request: Request, partial: Path, attempt: str) -> None:
        """On a full disk rank 0 makes room before it writes; a rank that wrote too early writes again."""
        content = request.written()
        try:
            self._write(content, partial)
            return
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        (partial / file_name(self._rank)).unlink(missing_ok=True)
        patience = Patience(2 * self._limit_s, self.stop)
        while not (partial / file_name(0)).exists():
            if self._failure(request, attempt) is not None:
                return
            patience.wait(_sizes(partial), "rank 0")
        self._write(content, partial)

    def _write(self, content: Content, partial: Path) -> Part:
        """Write this rank's tensors, then the note that they are there."""
        partial.mkdir(parents=True, exist_ok=True)
        chunks = (header(content.pieces), content.buffer.numpy().data)
        nbytes, sha256 = files.write(partial / file_name(self._rank), chunks, self._go_on)
        file = File(nbytes, sha256, content.pieces)
        part = Part(content.kinds, content.sliced, file, content.rank_state)
        commit.write_part(partial, self._rank, part)
        return part

    def _hear_all(self, request: Request) -> None:
        """Wait for all ranks: one that was not heard yet would not believe what rank 0 says about
        an attempt."""
        patience = Patience(self._limit_s, self.stop)
        self._meeting.arrive()
        while not self._meeting.all_heard(request.number):
            patience.wait(None, "the other ranks")
            self._meeting.arrive()

    def _await_parts(self, request: Request, partial: Path, attempt: str) -> list[Part]:
        """The parts of ranks 1, 2, ...: returns when all have come, or one cannot come or saves
        another step."""
        patience = Patience(self._limit_s, self.stop)
        parts: dict[int, Part] = {}
        while missing := [rank for rank in range(1, self._world_size) if rank not in parts]:
            for rank in missing:
                found = commit.read_part(partial, rank)
                if isinstance(found, str):
                    raise NotSavedError(f"rank {rank}: {found}")
                if found is None and (why := self._meeting.mute(rank, request.number)) is not None:
                    raise NotSavedError(why)
                if found is not None:
                    parts[rank] = found
            if len(parts) + 1 < self._world_size:
                if not (partial / file_name(0)).exists():
                    raise NotSavedError(f"{partial} was removed while it was written")
                steps = [path.name.partition(".")[0] for path in files.folders_of(self._folder, attempt)]
                if len(steps) > 1:
                    raise NotSavedError(f"ranks save {', '.join(steps)}: call save on all with the same step")
                self._meeting.arrive()
                missing = [rank for rank in missing if rank not in parts]
                patience.wait(_sizes(partial), rank_words(missing))
        return [parts[rank] for rank in range(1, self._world_size)]

    def _session(self, request: Request) -> str | None:
        try:
            self._meeting.arrive()
            return self._meeting.session()
        except OSError as error:
            if error.errno in (*NOT_ALLOWED, *NO_SPACE):  # rank 0 does not hear this rank
                self._meeting.be_mute(request.number)
                raise NotSavedError(f"rank {self._rank}: {why_of(error)}") from error
            return None  # looked at again until time is up

    def _failure(self, request: Request, attempt: str) -> str | None:
        """Why this save fails, if rank 0 says so."""
        with contextlib.suppress(OSError):
            if (why := self._meeting.failure(attempt)) is not None:
                return why
        return self._meeting.mute(0, request.number)

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise NotSavedError(f"{self.stop.why} before it was written")


def _is_of(final: Path, attempt: str) -> bool:
    """Whether the checkpoint in place is that of this attempt."""
    expected = begins(attempt)
    try:
        with (final / MANIFEST).open("rb") as file:
            return file.read(len(expected)) == expected
    except OSError:
        return False


def _sizes(partial: Path) -> list[tuple[str, int]]:
    """Changes as long as any rank writes."""
    try:
        return sorted((path.name, path.stat().st_size) for path in partial.iterdir())
    except OSError:  # not there yet, or no more; a file was renamed meanwhile
        return []


def why_of(error: BaseException) -> str:
    if isinstance(error, OSError):
        name = f"{Path(str(error.filename)).name}: " if error.filename else ""
        return f"{name}{error.strerror}{f': {TOO_LARGE}' if error.errno == errno.EFBIG else ''}"
    plain = isinstance(error, NotSavedError | ValueError | TypeError | UserError)
    return str(error) if plain else repr(error)
