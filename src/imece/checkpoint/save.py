"""Saving in the background: training stands still only while the tensors are copied.

The phases of a save, in order. On the training thread: wait for the save before; copy what this rank writes.
On a thread of its own: write it, and say so; rank 0 waits until all have said so, and makes a checkpoint of
it; the others wait for that. So every rank knows the outcome before it begins the next save.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from imece import mesh as meshes
from imece import moments
from imece.checkpoint import commit, deal
from imece.checkpoint.meeting import NotSavedError, Stop
from imece.checkpoint.states import as_json, from_json
from imece.checkpoint.writer import Content, Request, Writer, why_of
from imece.errors import PeerLostError, UserError
from imece.listing import kind_of
from imece.reading import Json
from imece.saying import say
from imece.writing import try_folder

_worlds = 0  # number of worlds that the mesh has had
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


moments.once_arranged.append(_count_worlds)
moments.once_lost.append(_end_waits)


class Checkpoints:
    """The checkpoints that the ranks of one job write into one folder, which all of them see."""

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        keep: int = 2,
        alarm: Callable[[str], None] = say,
        limit_s: float = 300.0,
    ) -> None:
        """keep: how many of the newest stay, fewer if the disk has no room for one more; the one with the
        lowest metric stays as well. Of later steps than the newest, what this object has saved is removed,
        and what others have saved is set aside, in a new folder left-1, left-2, ... within this one, with
        an alarm.

        alarm: called with one line when a save failed, once on every rank on which `save` raised nothing; on
        rank 0 also when an older checkpoint had to go, or one was set aside. Mostly from another thread.
        limit_s: how long rank 0 waits while nothing new comes from the others; they wait twice as long for
        rank 0. UserError if the folder cannot be made.

        Before the first save only some KB are written: room for messages between ranks if the disk is full by
        then. From the first save on, the folder belongs to this object: each save of a `Checkpoints` that
        began to save here earlier is an alarm.

        rank, world_size: by default the mesh's. If these are the mesh's and the mesh changes (imece.steps),
        they follow it. A save under way then fails, with an alarm; the next one is of the new ranks. `save`
        and `finish` raise PeerLostError if they would wait for a rank that is gone.
        """
        if rank is None or world_size is None:
            mesh = meshes.current()
            rank = mesh.rank if rank is None else rank
            world_size = mesh.world_size if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: ranks are 0, 1, ... below world_size")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep={keep!r}: a whole number, at least 1")
        self._folder, self._keep = Path(folder), keep
        self._alarm, self._limit_s = alarm, limit_s
        self._thread: threading.Thread | None = None
        self._saved = True  # the newest save, if any
        self._closed = False
        self._mesh: meshes.Mesh | None = None  # the mesh that is followed
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
        """UserError if nothing may be written in the folder: otherwise the first save would be an alarm,
        much later.

        A full disk is no error: there may be room by then.
        """
        try:
            try_folder(self._folder)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def _open(self, rank: int, world_size: int) -> None:
        """Begin with these ranks, none of which has saved anything."""
        self._rank, self._world_size, self._worlds = rank, world_size, _worlds
        self._writer = Writer(
            self._folder, rank, world_size, keep=self._keep, limit_s=self._limit_s, alarm=self._alarm
        )
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lost = ""  # why, if a rank was lost while a save was under way
        self._saves = 0

    def _follow_mesh(self) -> None:
        """The mesh has other ranks: a rank that is gone writes nothing any more, and saves are counted from
        here on."""
        if self._mesh is not None and self._worlds != _worlds and not self._closed:
            self._give_up("the ranks changed")
            self._open(self._mesh.rank, self._mesh.world_size)

    def _lose(self, why: str) -> None:
        """Some of these ranks are gone, but the mesh has not changed yet."""
        if self.is_saving and self._worlds == _worlds:
            self._lost = why
            self._writer.stop.because("a rank was gone")

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | deal.Slice],
        state: Json,
        rank_state: Any = None,
        *,
        metric: float | None = None,
        keep_all: bool = False,
    ) -> None:
        """Every rank calls this with the same step; on return the tensors may change.

        tensors: on any device. A Tensor is whole and equal on all ranks, which divide the bytes of all such
        among themselves; of a Slice each rank writes its own. state: a dict, the same on all ranks.
        rank_state: this rank's own. Both may hold numbers (also infinite), texts, None, lists, tuples, dicts
        (also with numbers as keys), and tensors and arrays of up to 1 MiB each; all come back as they were,
        tensors on the CPU.
        metric: the lower the better; one that is not finite counts as none. It is compared with those of the
        same state["metric_on"] and state["metric_over"], if given. keep_all: remove no older checkpoint for
        this one; a later save without it removes surplus ones.

        Waits for the save before, if it is still under way. Makes one copy of what this rank writes, and
        keeps that memory for the next save. Errors of the disk are not raised: see `finish`.

        ValueError or TypeError, with the name, for a tensor that cannot be saved, a slice that is not within
        its tensor, and for what a state cannot hold; on the other ranks this is an alarm. If ranks disagree
        on their tensors, it is an alarm on all.
        """
        self._follow_mesh()
        self._wait()
        self._saves += 1  # also if this save is refused here: the other ranks count it
        self._saved = False
        step = _whole(step)
        if step < 0 or self._closed:
            why = "not after close()" if self._closed else "steps are counted from 0 on"
            raise ValueError(f"step {step}: {why}")
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
        """Wait for the save under way, on all ranks, and say whether the newest save is on the disk.

        All ranks get the same answer. True if there was no save.
        """
        self._follow_mesh()
        self._wait()
        return self._saved

    def close(self, why: str = Stop.why) -> None:
        """Give up a save under way, with an alarm (call `finish` first, if there is time). Frees the memory.

        why: for that alarm, what has happened before it was complete.
        """
        self._closed = True
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._writer.stop.because(why)
        self._join()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

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
    ) -> Content:
        """A copy of all that this rank has to save. NotSavedError if there is no memory for it."""
        if not isinstance(state, dict):
            raise TypeError(f"state: a dict, not {kind_of(state)}; {{}} if there is nothing to hand in")
        kinds = deal.kinds(tensors)
        pieces = deal.deal(tensors, kinds, self._rank, self._world_size)
        now = {
            name: from_json(as_json(each, name))
            for name, each in (("state", state), ("rank_state", rank_state))
        }
        buffer = self._memory(sum(piece.nbytes for piece in pieces))
        deal.copy_into(buffer, tensors, pieces)
        sliced = frozenset(name for name, value in tensors.items() if isinstance(value, deal.Slice))
        return Content(kinds, sliced, pieces, buffer, **now)

    def _begin(self, step: int, content: Content | Exception, metric: float | None, keep_all: bool) -> None:
        request = Request(self._saves, step, content, metric, keep_all)
        # A daemon: a rank that fails must be able to end, and half-written files are never read.
        self._thread = threading.Thread(target=self._run, args=(request,), name="imece-save", daemon=True)
        self._thread.start()

    def _memory(self, nbytes: int) -> torch.Tensor:
        """The buffer for one save, the last save's if it fits. No save may be under way."""
        if self._buffer.numel() != nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # never both at once
            try:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            except (MemoryError, RuntimeError) as error:  # torch raises the latter
                raise NotSavedError(
                    f"no memory for a copy of the {nbytes} bytes that this rank writes"
                ) from error
        return self._buffer

    def _run(self, request: Request) -> None:
        """Runs on the thread of a save."""
        try:
            self._writer.save(request)
            self._saved = True
        except BaseException as error:
            if not request.is_told:
                self._alarm(f"the checkpoint of step {request.step} was not saved: {why_of(error)}")
            if not isinstance(error, NotSavedError):  # a mistake of imece's: with its traceback
                raise


def _unusable(folder: Path, error: OSError) -> UserError:
    why = f"checkpoints cannot be written there ({error.strerror}): check the path and its permissions"
    return UserError(f"{folder}: {why}")


def _whole(step: int) -> int:
    """The step as an int, from any integer type. TypeError for 2.7, which would be another step."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step {step!r}: a whole number of steps") from None
