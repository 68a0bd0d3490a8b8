"""Files that are whole or absent, whatever happens while they are written; and who writes them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from imece.errors import UserError

DIGEST_BYTES = 16


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among all processes that ask for this file, which is made, and its folder too.

    The kernel gives the lock back when its holder dies, however that happens. OSError if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the file must not be deleted afterwards: others may wait for this very one


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside, then renames: whoever opens `path` sees all of the old content or all of the new.

    OSError if it cannot be written; then nothing is left beside.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            sync(file)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """All that was written to it is on the disk, not only on its way."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Renames and deletions in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def other_place(error: OSError) -> str:
    """What to do about a folder that cannot be written to."""
    return f"{'make room or ' if error.errno in (errno.ENOSPC, errno.EDQUOT) else ''}name another"


def digest(content: bytes) -> str:
    """A checksum that no two contents share, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def file_digest(path: Path) -> tuple[str, int]:
    """The same of a file's content, and its size in bytes. UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            total = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
            return total.hexdigest(), file.tell()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check the path") from error
