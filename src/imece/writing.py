"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Of an OSError: the disk is full, or what this user may take of it."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Of an OSError: nothing can be written there, however long one waits."""


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """`path` has its old content or this one, never a part; if `durable`, after a power failure too.

    OSError, with the file's name: then it has the old content, and nothing is left beside it.
    """
    with whole_file(path, durable=durable) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """The same for content that comes by and by: `path` has it at the end of the block, unless that raises.

    It lies beside until then, as NAME.PID.partial, which is left there only by a process that is killed.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                sync(file)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        sync_folder(path.parent)


def try_folder(folder: Path) -> None:
    """OSError where nothing may be written in it. A full disk is none: there may be room later."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise


def leftovers(folder: Path, name: str = "*") -> set[Path]:
    """What killed processes have left beside the file of that name, or beside all files of a folder.

    Who removes them knows that no process is writing there.
    """
    return set(folder.glob(f"{name}.[0-9]*.partial"))


def sync(file: BinaryIO) -> None:
    """All that was written to it is on the disk, not only on its way."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """What was created, renamed and removed in it is so on the disk. OSError, with its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
