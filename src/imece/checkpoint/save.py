"""Saving in the background: training stands still only while the tensors are copied.

The steps of a save, in order. On the training's thread: wait for the save before; copy what this rank writes.
On a thread of its own: write it, and say so; rank 0 waits until all have said so, and makes a checkpoint of
it; the others wait for that. So every rank knows what became of it before it begins the next one.
"""

from __future__ import annotations

import contextlib
import operator
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imece import mesh as meshes
from imece.checkpoint import commit, deal, files
from imece.checkpoint.commit import Part
from imece.checkpoint.manifest import MANIFEST, File, Json, Kind, Piece, begins, file_name, header
from imece.checkpoint.meeting import Meeting, NotSavedError, Patience, Stop, TakenOverError
from imece.checkpoint.room import Room
from imece.checkpoint.states import as_json, from_json
from imece.errors import PeerLostError, UserError
from imece.writing import NO_SPACE, NOT_ALLOWED, sync_folder, try_folder

# After which a folder that is neither partial nor in place is taken for removed: file systems of several
# hosts may show a new name late.
_GONE_S = 60.0


@dataclass(frozen=True)
class _Content:
    """What one rank has to save, as it was when `save` was called."""

    kinds: dict[str, Kind]
    sliced: frozenset[str]
    pieces: tuple[Piece, ...]
    buffer: torch.Tensor  # uint8 [bytes of all pieces]
    state: Json
    rank_state: Any


@dataclass(frozen=True)
class _Job:
    """One attempt, as the thread gets it from `save`."""

    number: int  # of this `Checkpoints`, the same on all ranks
    step: int
    content: _Content | Exception  # the latter: why this rank has none, and the others are to hear of it
    metric: float | None
    keep_all: bool

    @property
    def is_told(self) -> bool:
        """Whether `save` has raised what is wrong with it on this rank."""
        return isinstance(self.content, Exception) and not isinstance(self.content, NotSavedError)

    def written(self) -> _Content:
        """What this rank writes. NotSavedError if it has none."""
        if isinstance(self.content, Exception):
            raise NotSavedError(_why(self.content))
        return self.content


_worlds = 0  # that the mesh has had
_following: weakref.WeakSet[Checkpoints] = weakref.WeakSet()
_following_lock = threading.Lock()  # another thread looks through them


def _count_worlds() -> None:
    global _worlds
    _worlds += 1


def _end_waits(why: str) -> None:
    with _following_lock:
        following = list(_following)
    for each in following:
        each._lose(why)


meshes.once_arranged.append(_count_worlds)
meshes.once_lost.append(_end_waits)


class Checkpoints:
    """The checkpoints that the ranks of one job write into one folder, which all of them see."""

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int,
        world_size: int,
        keep: int = 2,
        alarm: Callable[[str], None],
        limit_s: float = 300.0,
    ) -> None:
        """keep: how many of the newest stay, fewer where the disk has no room for one more; the one with the
        lowest metric stays as well. What this object has saved of later steps than the newest goes away;
        what others have is set aside, in a folder left-1, left-2, ... in this one, with an alarm.

        alarm: called with one line when a save came to nothing, once on every rank to which `save` raised
        nothing; and on rank 0 when an older one had to go, or one was set aside. Mostly from another thread.
        limit_s: how long rank 0 waits while nothing new comes from the others; they wait twice as long for
        it. UserError if the folder cannot be made.

        Before the first save only some KB are written: room for what ranks tell each other if the disk is
        full by then. From the first save on every save of another `Checkpoints` that began to save here
        before is an alarm: the last one has the folder.

        rank, world_size: where these are the mesh's, and the mesh gets others (imece.steps), they follow it.
        A save that is under way then comes to nothing, with an alarm; the next one is of the ranks there are.
        `save` and `finish` raise PeerLostError where they would wait for a rank that is gone.
        """
        if not 0 <= rank < world_size or keep < 1:
            raise ValueError(f"rank {rank} of {world_size}, keep {keep}: keep at least 1")
        self._folder, self._keep = Path(folder), keep
        self._alarm, self._limit_s = alarm, limit_s
        self._thread: threading.Thread | None = None
        self._saved = True  # the newest save, if any
        self._closed = False
        self._mesh: meshes.Mesh | None = None  # that is followed
        with contextlib.suppress(UserError):  # there is none
            mesh = meshes.current()
            self._mesh = mesh if (mesh.rank, mesh.world_size) == (rank, world_size) else None
        if self._mesh is not None:
            with _following_lock:
                _following.add(self)
        self._open(rank, world_size)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"{folder}: it is a file: name a folder for checkpoints") from error
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def check_writable(self) -> None:
        """UserError where nothing may be written in the folder: the first save would be an alarm, much later.

        A full disk is no mistake: it may have room by then.
        """
        try:
            try_folder(self._folder)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def _open(self, rank: int, world_size: int) -> None:
        """For these ranks, of which nobody has saved anything."""
        self._rank, self._world_size, self._worlds = rank, world_size, _worlds
        self._meeting = Meeting(self._folder, rank, world_size)
        self._meeting.keep_room()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stop = Stop()
        self._lost = ""  # why, if a rank was while a save was under way
        self._saves = 0
        self._room = Room(self._folder, self._keep, self._meeting.number, self._alarm)

    def _follow_mesh(self) -> None:
        """A rank that is gone writes nothing any more, and others count its saves and theirs from here on."""
        if self._mesh is not None and self._worlds != _worlds and not self._closed:
            self._give_up("the ranks changed")
            self._open(self._mesh.rank, self._mesh.world_size)

    def _lose(self, why: str) -> None:
        """These ranks are no longer all there, but the mesh still is theirs."""
        if self.is_saving and self._worlds == _worlds:
            self._lost, self._stop.why = why, "a rank was gone"
            self._stop.set()

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
        out among themselves; of a Slice each rank writes its own. state: a dict, the same on all ranks.
        rank_state: this rank's own. Both of numbers, texts, None, lists, tuples, dicts, and of tensors and
        arrays, up to 1 MiB each, which come back as they were: infinities and keys that are numbers too, and
        tensors on the CPU.
        metric: the lower the better; not finite is as good as none. It is compared with those of the same
        state["metric_on"] and state["metric_over"], if these are given. keep_all: no older one goes away for
        this one; a later save without it removes what is too many.

        Waits for the save before, if it is still under way. Makes one copy of what this rank writes, and
        keeps that memory for the next save. Nothing that goes wrong on the disk is raised: see `finish`.

        ValueError or TypeError, with the name, for a tensor that cannot be saved, a slice that is not within
        its tensor, and for what a state cannot hold; on the other ranks that is an alarm, and so it is on all
        that they disagree on their tensors.
        """
        self._follow_mesh()
        self._wait()
        self._saves += 1  # also if this one is refused here: the other ranks count it
        self._saved = False
        step = _whole(step)
        if step < 0 or self._closed:
            raise ValueError(f"step {step}: at least 0, and not after close()")
        how = (commit.finite(metric), keep_all)
        try:
            self._begin(step, self._content(tensors, state, rank_state), *how)
        except Exception as error:
            self._begin(step, error, *how)
            if not isinstance(error, NotSavedError):
                raise

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> bool:
        """Waits for the save under way, on all ranks, and says whether the newest save is on the disk.

        All ranks get the same answer. True if there was none.
        """
        self._follow_mesh()
        self._wait()
        return self._saved

    def close(self, why: str = Stop.why) -> None:
        """Gives up a save under way, with an alarm (`finish` first, if there is time). Frees the memory.

        why: for that alarm, what has happened before it was complete.
        """
        self._closed = True
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._stop.why = why
        self._stop.set()
        self._join()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _wait(self) -> None:
        self._join()
        if self._lost:
            raise PeerLostError(self._lost)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _content(
        self, tensors: Mapping[str, torch.Tensor | deal.Slice], state: Json, rank_state: Any
    ) -> _Content:
        """A copy of all that this rank has to save. NotSavedError if there is no memory for it."""
        if not isinstance(state, dict):
            raise TypeError(
                f"state: a dict, not a {type(state).__name__}; {{}} if there is nothing to hand in"
            )
        kinds = deal.kinds(tensors)
        pieces = deal.deal(tensors, kinds, self._rank, self._world_size)
        now = {
            name: from_json(as_json(each, name))
            for name, each in (("state", state), ("rank_state", rank_state))
        }
        buffer = self._memory(sum(piece.nbytes for piece in pieces))
        deal.copy_into(buffer, tensors, pieces)
        sliced = frozenset(name for name, value in tensors.items() if isinstance(value, deal.Slice))
        return _Content(kinds, sliced, pieces, buffer, **now)

    def _begin(self, step: int, content: _Content | Exception, metric: float | None, keep_all: bool) -> None:
        job = _Job(self._saves, step, content, metric, keep_all)
        # A daemon: a rank that fails must be able to end, and what is half-written is never read.
        self._thread = threading.Thread(target=self._run, args=(job,), name="imece-save", daemon=True)
        self._thread.start()

    def _memory(self, nbytes: int) -> torch.Tensor:
        """The buffer for one save, the one of the save before if it fits. No save is under way."""
        if self._buffer.numel() != nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never both at once
            try:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            except (MemoryError, RuntimeError) as error:  # torch says the latter
                raise NotSavedError(
                    f"no memory for a copy of the {nbytes} bytes that this rank writes"
                ) from error
        return self._buffer

    # From here on: the thread of a save.

    def _run(self, job: _Job) -> None:
        try:
            (self._lead if self._rank == 0 else self._follow)(job)
            self._saved = True
        except BaseException as error:
            if not job.is_told:
                self._alarm(f"the checkpoint of step {job.step} was not saved: {_why(error)}")
            if not isinstance(error, NotSavedError):  # a mistake of ours: with its traceback
                raise

    def _lead(self, job: _Job) -> None:
        """Rank 0's part. NotSavedError once all that was written is removed and the others are told."""
        attempt = f"{self._meeting.session()}-{job.number}"
        partial = files.partial_folder(self._folder, job.step, attempt)
        final = files.step_folder(self._folder, job.step)
        try:
            content = job.written()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._meeting.arrive()  # or another job has the folder, and nothing in it is ours to clean
            files.clean(self._folder, but=attempt)
            if not job.keep_all:
                self._room.make(partial)
            parts = [self._write(content, partial), *self._await_parts(partial, attempt)]
            self._meeting.all_met = True
            manifest = commit.put_together(job.step, attempt, job.metric, content.state, parts)
            self._meeting.arrive()
            commit.commit(partial, final, manifest)
        except BaseException as error:
            why = _why(error)
            if isinstance(job.content, _Content):
                why += self._room.lacking(job.content.kinds, partial)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                self._hear_all()
                self._meeting.failed(attempt, why)
            except TakenOverError as other:  # and its clean-up is what has failed us, perhaps
                why = str(other)
            except (OSError, NotSavedError):  # then the others wait until their time is up
                pass
            if isinstance(error, OSError | ValueError | UserError | NotSavedError):
                raise NotSavedError(why) from error
            raise
        # What can be loaded counts as saved, on all ranks; but nothing goes before it surely stays.
        try:
            sync_folder(self._folder)
            files.drop_old(final)
            self._room.taken_by(job.step, job.keep_all)
        except (OSError, UserError) as error:
            self._alarm(f"{final} is saved, but older checkpoints were not removed: {_why(error)}")

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
                self._write_in_time(job.written(), partial, attempt)
        except Exception as error:
            own = _why(error)
            try:
                (partial / file_name(self._rank)).unlink(missing_ok=True)  # makes room for the excuse
                commit.write_excuse(partial, self._rank, own)
            except FileNotFoundError:  # rank 0 has removed the folder meanwhile, and is about to say why
                pass
            except OSError:  # then rank 0 waits until its time is up; but what becomes of it is known here
                if isinstance(error, OSError | NotSavedError):
                    raise NotSavedError(f"rank {self._rank}: {own}") from error
            if not isinstance(error, OSError | NotSavedError):
                raise
        there_at = time.monotonic()
        while not _is_of(final, attempt):
            if (theirs := self._failure(attempt)) is not None:
                shutil.rmtree(partial, ignore_errors=True)  # what this rank wrote after rank 0 removed it
                raise NotSavedError(theirs)
            if partial.exists():
                there_at = time.monotonic()
            elif time.monotonic() - there_at > _GONE_S:
                raise NotSavedError(f"{partial} was removed while it was written")
            try:
                patience.wait(_sizes(partial), "rank 0")
            except NotSavedError as error:
                # Of two renames one comes first: either rank 0 cannot put it in place any more, or it has.
                if not self._stop.is_set() and not files.withdraw(partial) and _is_of(final, attempt):
                    return
                raise NotSavedError(f"rank {self._rank}: {own}" if own else str(error)) from error

    def _write_in_time(self, content: _Content, partial: Path, attempt: str) -> None:
        """On a full disk rank 0 makes room before it writes: what was too early for that is written again."""
        try:
            self._write(content, partial)
            return
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        (partial / file_name(self._rank)).unlink(missing_ok=True)
        patience = Patience(2 * self._limit_s, self._stop)
        while not (partial / file_name(0)).exists():
            if self._failure(attempt) is not None:
                return
            patience.wait(_sizes(partial), "rank 0")
        self._write(content, partial)

    def _write(self, content: _Content, partial: Path) -> Part:
        """This rank's tensors, then its word that they are there."""
        partial.mkdir(parents=True, exist_ok=True)
        chunks = (header(content.pieces), content.buffer.numpy().data)
        nbytes, sha256 = files.write(partial / file_name(self._rank), chunks, self._go_on)
        file = File(nbytes, sha256, content.pieces)
        part = Part(content.kinds, content.sliced, file, content.rank_state)
        commit.write_part(partial, self._rank, part)
        return part

    def _hear_all(self) -> None:
        """A rank that has not been heard yet would not believe what rank 0 says of an attempt."""
        patience = Patience(self._limit_s, self._stop)
        self._meeting.arrive()
        while not self._meeting.all_heard:
            patience.wait(None, "the other ranks")
            self._meeting.arrive()

    def _await_parts(self, partial: Path, attempt: str) -> list[Part]:
        """Of ranks 1, 2, ...: as soon as all have come, or one cannot, or saves another step."""
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
                if not (partial / file_name(0)).exists():
                    raise NotSavedError(f"{partial} was removed while it was written")
                steps = [path.name.partition(".")[0] for path in files.folders_of(self._folder, attempt)]
                if len(steps) > 1:
                    raise NotSavedError(f"ranks save {', '.join(steps)}: call save on all with the same step")
                self._meeting.arrive()
                missing = [rank for rank in missing if rank not in parts]
                patience.wait(_sizes(partial), f"rank {', '.join(map(str, missing[:8]))}")
        return [parts[rank] for rank in range(1, self._world_size)]

    def _session(self) -> str | None:
        try:
            self._meeting.arrive()
            return self._meeting.session()
        except OSError as error:
            if error.errno in NOT_ALLOWED:  # rank 0 will never hear this one
                raise NotSavedError(f"rank {self._rank}: {_why(error)}") from error
            return None  # looked at again until time is up

    def _failure(self, attempt: str) -> str | None:
        try:
            return self._meeting.failure(attempt)
        except OSError:
            return None

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise NotSavedError(f"{self._stop.why} before it was written")


def _unusable(folder: Path, error: OSError) -> UserError:
    why = f"checkpoints cannot be written there ({error.strerror}): check the path and its permissions"
    return UserError(f"{folder}: {why}")


def _whole(step: int) -> int:
    """Of any type of integer. TypeError for 2.7, which would be another step."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step {step!r}: a whole number of steps") from None


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
    plain = isinstance(error, NotSavedError | ValueError | TypeError | UserError)
    return str(error) if plain else repr(error)
