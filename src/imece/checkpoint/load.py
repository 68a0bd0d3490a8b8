"""Reading: a rank of any world reads the elements that it needs, from the files that have them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from imece.checkpoint import files
from imece.checkpoint.commit import by_metric
from imece.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    MOST_BYTES,
    Kind,
    Manifest,
    UnknownVersionError,
    decode,
    file_name,
    header,
)
from imece.checkpoint.parts import whole_and_parts
from imece.errors import UserError
from imece.model_parallel.divided import places_in_parts
from imece.reading import Json
from imece.saying import say
from imece.writing import NOT_ALLOWED

_ADVICE = ": use an older checkpoint"
_CHUNK = 4 << 20  # elements read at a time
_MOST_OPEN = 256  # at once, whatever the number of ranks: a process may often have 1024


class Source(Protocol):
    """Where named tensors come from, whole or in part: a checkpoint, or the memory of other ranks."""

    @property
    def folder(self) -> Path:
        """Names the source in messages."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements [start, stop) of the flat tensor, 1-D [stop - start], on the CPU."""

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU. Errors as from `slice`."""
        shape = self.shape(name)
        return self.slice(name, 0, math.prod(shape)).view(shape)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, name: str, start: int = 0) -> None:
        """Fill all of `target`, on any device and of any dtype, with its elements from `start` on.

        Needs only a fixed buffer besides. Errors as from `slice`.
        """
        if not target.is_contiguous():
            target.copy_(self.slice(name, start, start + target.numel()).view(target.shape))
            return
        flat = target.detach().view(-1)
        for at in range(0, len(flat), _CHUNK):
            part = flat[at : at + _CHUNK]
            part.copy_(self.slice(name, start + at, start + at + len(part)))


class Saved(Source):
    """One checkpoint on disk. Tensors are read when asked for, into new memory.

    Files are read and never mapped: a mapped page counts as this process's memory as long as it is mapped.
    Files stay open: the run that wrote them may go on, and remove them at any moment.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self.step, self.metric = folder, manifest.step, manifest.metric
        self.state: Json = manifest.state
        self.rank_states: list[Any] = list(manifest.rank_states)
        """One state of each rank that saved."""
        self.attempt = manifest.attempt
        """A name that no two checkpoints share, even of one step."""
        self._manifest = manifest
        self._kinds, self._parts = whole_and_parts(manifest.kinds)
        self._opened: dict[int, int] = {}  # rank -> descriptor of its file, if it stays open
        weakref.finalize(self, _close, self._opened)

    @property
    def folder(self) -> Path:
        return self._folder

    def __repr__(self) -> str:
        return f"Saved({str(self.folder)!r}, step {self.step})"

    def names(self) -> list[str]:
        return list(self._kinds)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor. UserError if there is none of this name."""
        return self._kind(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """UserError if there is no tensor of this name."""
        return DTYPES[self._kind(name).dtype]

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements [start, stop) of the flat tensor, 1-D [stop - start], on the CPU.

        UserError if there is no tensor of this name, or a file cannot be read. ValueError for elements that
        it does not have.
        """
        out = torch.empty(max(stop - start, 0), dtype=self.dtype(name), device="cpu")
        self._read(name, start, stop, out)
        return out

    @torch.no_grad()
    def fill(self, target: torch.Tensor, name: str, start: int = 0) -> None:
        """As any source, but without a buffer where the file's bytes are those of `target`."""
        if not target.is_contiguous() or target.device.type != "cpu" or target.dtype != self.dtype(name):
            super().fill(target, name, start)
            return
        self._read(name, start, start + target.numel(), target.detach().view(-1))
        if not target.is_inference():  # torch does not see that a file is read into it
            torch.autograd.graph.increment_version(target)

    def _kind(self, name: str) -> Kind:
        try:
            return self._kinds[name]
        except KeyError:
            raise UserError(
                f"{self.folder}: it has no tensor {name!r}, but {len(self._kinds)} others: "
                "is it of another model?"
            ) from None

    def _read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """out: 1-D [stop - start], of its dtype, on the CPU."""
        numel = self._kind(name).numel
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"[{start}, {stop}) is not within the {numel} elements of {name!r}")
        parts = self._parts.get(name)
        if parts is None:
            self._read_pieces(name, start, stop, out)
            return
        at, shape = 0, self._kind(name).shape
        for part, first, length in places_in_parts(shape, parts.dim, len(parts.names), start, stop):
            self._read_pieces(parts.names[part], first, first + length, out[at : at + length])
            at += length

    def _read_pieces(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As `_read`, for a tensor that is in the files by this name."""
        for rank, at, piece in self._manifest.pieces.get(name, []):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                where = at + (low - piece.start) * piece.kind.itemsize
                self._read_bytes(rank, where, out[low - start : high - start])

    def _read_bytes(self, rank: int, at: int, out: torch.Tensor) -> None:
        path = self.folder / file_name(rank)
        left = out.view(torch.uint8).numpy().data
        try:
            with self._file(rank) as descriptor:
                while left:
                    got = os.preadv(descriptor, [left], at)
                    if not got:
                        raise UserError(
                            f"{path}: cannot be read (it has become shorter): use another checkpoint"
                        )
                    left, at = left[got:], at + got
        except FileNotFoundError:
            raise UserError(
                f"{path}: removed meanwhile, by a run that goes on and keeps the newest: try again"
            ) from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): use another checkpoint") from error

    @contextlib.contextmanager
    def _file(self, rank: int) -> Iterator[int]:
        """A descriptor of a rank's file, which stays open unless there are too many. OSError."""
        descriptor = self._opened.get(rank)
        if descriptor is not None:
            yield descriptor
            return
        descriptor = os.open(self.folder / file_name(rank), os.O_RDONLY | os.O_CLOEXEC)
        keep = len(self._opened) < _MOST_OPEN
        if keep:
            self._opened[rank] = descriptor
        try:
            yield descriptor
        finally:
            if not keep:
                os.close(descriptor)

    def seen(self) -> str:
        """Equal for all who see these very files, on whatever host; "" if they are gone.

        A copy on another disk has other times of change, whatever else was copied.
        """
        paths = [self.folder / file_name(rank) for rank in range(len(self._manifest.files))]
        try:
            found = [(status.st_ino, status.st_ctime_ns) for status in map(os.stat, paths)]
        except OSError:
            return ""
        return hashlib.sha256(f"{self.attempt} {found}".encode()).hexdigest()

    def check(self, verify: bool, share: int = 0, shares: int = 1) -> None:
        """UserError, naming the file, unless all files are what the manifest says; see `open_checkpoint`.

        share: which of `shares` equal shares of the files to verify; others verify the rest.
        """
        for rank, file in enumerate(self._manifest.files):
            path = self.folder / file_name(rank)
            try:
                if (found := _size(path)) != file.nbytes:
                    raise _damaged(path, f"it has {found} bytes, not {file.nbytes}")
                expected = header(file.pieces)
                with self._file(rank) as descriptor, open(descriptor, "rb", closefd=False) as opened:
                    opened.seek(0)  # it may have been read before
                    if opened.read(len(expected)) != expected:
                        raise _damaged(path, "its header does not say what the manifest says")
                    if verify and rank % shares == share:
                        opened.seek(0)
                        if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                            raise _damaged(path, "its checksum is not that of its content")
            except OSError as error:
                raise _unreadable(path, error) from error


def _close(opened: dict[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def open_checkpoint(folder: Path | str, *, verify: bool = True) -> Saved:
    """Open a checkpoint. UserError, naming the file and what is wrong with it, unless it is complete.

    verify: read all files and compare their checksums. Otherwise only the manifest's checksum is compared;
    for the other files, sizes and headers.
    """
    folder = Path(folder)
    manifest = _manifest(folder / MANIFEST)
    promised = files.step_of(folder)
    if promised is not None and promised != manifest.step:
        raise _damaged(folder / MANIFEST, f"it is of step {manifest.step}")
    saved = Saved(folder, manifest)
    saved.check(verify)
    return saved


def newest(folder: Path | str, damaged: Callable[[str], None] = say) -> Saved | None:
    """The newest checkpoint that is undamaged to the last byte; None if there is none, or no such folder.

    damaged: called with one line for each newer one that is damaged. UserError if the folder cannot be read.
    """
    return first_whole(lambda: [path for _, path in files.step_folders(Path(folder))], damaged)


def best(folder: Path | str, damaged: Callable[[str], None] = say) -> Saved | None:
    """The undamaged checkpoint with the lowest metric; None if none has one, or if there is no such folder.

    damaged: called with one line for each damaged one whose metric is lower or cannot be read. UserError if
    the folder cannot be read.
    """

    def ranked() -> list[Path]:
        found = []
        for _, path in files.step_folders(Path(folder)):
            try:
                found.append((path, _manifest(path / MANIFEST)))
            except UserError as error:
                if identity(path) is not None:  # else a job has just removed it
                    damaged(what_is_wrong(error))
        return [path for path, _ in by_metric(found)]

    return first_whole(ranked, damaged)


def of_step(folder: Path | str, step: int, damaged: Callable[[str], None]) -> Saved | None:
    """The checkpoint of a step; None if there is none, or if it is damaged.

    damaged: called with one line then. UserError if the folder cannot be read.
    """
    return first_whole(
        lambda: [path for number, path in files.step_folders(Path(folder)) if number == step], damaged
    )


def all_steps(folder: Path | str) -> list[int]:
    """The steps that have a checkpoint, ascending, including damaged ones. Empty if there is no
    such folder."""
    return sorted({step for step, _ in files.step_folders(Path(folder))})


def first_whole(
    paths: Callable[[], list[Path]], damaged: Callable[[str], None], *, verify: bool = True
) -> Saved | None:
    """The first undamaged checkpoint, in the order of `paths`, which is called again if folders
    change meanwhile."""
    while True:
        for path in paths():
            before = identity(path)
            try:
                return open_checkpoint(path, verify=verify)
            except UserError as error:
                if identity(path) != before or before is None:  # a job has just replaced or removed it
                    break
                damaged(what_is_wrong(error))
        else:
            return None


def _manifest(path: Path) -> Manifest:
    try:
        if not path.parent.is_dir():
            if path.parent.is_symlink():
                raise _damaged(path.parent, f"a link to {os.readlink(path.parent)}, which is no folder here")
            if path.parent.exists():
                raise _damaged(path.parent, "it is no folder")
            raise UserError(f"{path.parent}: no such checkpoint: check the path")
        if files.step_of(path.parent) is None and not path.exists():
            raise UserError(
                f"{path.parent}: it is no checkpoint, it has no {path.name}: name one of the folders "
                "step-..., or take `newest` of a folder of them"
            )
        if (found := _size(path)) > MOST_BYTES:
            raise _damaged(path, f"it has {found} bytes, and may have {MOST_BYTES}")
        return decode(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnknownVersionError as error:
        raise UserError(f"{path}: {error}: use the imece that wrote it") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def identity(folder: Path) -> tuple[int, int] | None:
    """Identifies the folder itself: another folder of the same name differs. None if there is none."""
    try:
        status = os.stat(folder) if folder.exists() else os.lstat(folder)  # a link to nowhere
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _size(path: Path) -> int:
    """The file's size. UserError unless it is a plain file: opening a pipe would wait forever."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(path, "it is no plain file")
    return status.st_size


def _unreadable(path: Path, error: OSError) -> UserError:
    if error.errno in NOT_ALLOWED:
        return UserError(f"{path}: cannot be read ({error.strerror}): check its permissions")
    return _damaged(path, str(error.strerror))


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged ({what}){_ADVICE}")


def what_is_wrong(error: UserError) -> str:
    """For whoever looks for another checkpoint, and may find none: without the advice to use one."""
    return str(error).removesuffix(_ADVICE)
