"""Writing files so that each is whole or absent, whatever happens meanwhile; and values as TOML."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from imece.errors import UserError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean: the disk is full, or this user's quota is."""
TOO_LARGE = "raise the limit of a file's size (ulimit -f)"
"""What to do after EFBIG: neither room nor another place helps."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers that mean: nothing can be written there, however long one waits."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Give `path` this content. It has the old or the new content, never a part; if `durable`, after a power
    failure too.

    OSError, with the file's name: then the old content is still there, and nothing is left beside it.
    """
    with whole_file(path, durable=durable) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """The same for content that comes bit by bit: `path` gets it at the end of the block, unless the
    block raises.

    Until then it lies beside `path` as NAME.PID.partial; only a process that is killed leaves that behind.
    Where `path` leads to a file, that one gets the content. A device or a pipe gets it as it comes.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    place = Path(os.path.realpath(path))
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                sync(file)
        os.replace(partial, place)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        sync_folder(place.parent)


@contextmanager
def asked_for(path: Path) -> Iterator[None]:
    """For a file that a person has named: makes its folder, and turns an OSError inside into a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:  # where a file is in the place of a folder, mkdir says that it exists
        said = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write {path}: {said}") from None


def other_place(error: OSError, place: str = "") -> str:
    """Advice for a `place` that cannot be written to, such as a folder."""
    if error.errno == errno.EFBIG:
        return TOO_LARGE
    return f"{'make room or ' if error.errno in NO_SPACE else ''}name another {place}".rstrip()


def try_folder(folder: Path) -> None:
    """OSError if nothing may be written in `folder`. A full disk is no error: there may be room later."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise


NO_TEMPORARY = "no folder takes temporary files: set TMPDIR to one that can be written"
"""What to say where `temporary_files` finds nothing."""


def temporary_files() -> bool:
    """Whether any folder takes temporary files. None does where the whole file system is read-only, as in
    many containers."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return False
    return True


def leftovers(folder: Path, name: str = "*") -> set[Path]:
    """The files that killed processes left beside the file of that name, or beside all files of a folder.

    Before removing them the caller must know that no process is writing there.
    """
    return set(folder.glob(f"{name}.[0-9]*.partial"))


def lock(descriptor: int, kind: int) -> None:
    """flock. OSError, which says so where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise OSError(error.errno, "no file locks there: Lustre has them if mounted with flock") from None


def sync(file: BinaryIO) -> None:
    """Wait until everything written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until all creations, renames and removals in `folder` are on the disk. OSError, with its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)


def as_toml(value: Any) -> str:
    """One value in TOML."""
    if value is None:
        return "None"  # only for messages, as options write it: a file leaves it out
    # JSON's strings, lists, numbers and booleans are valid TOML, except that TOML must escape DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
