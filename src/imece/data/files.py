"""Locks and checksums of files that several processes may write."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imece.errors import UserError
from imece.writing import lock

DIGEST_BYTES = 16


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold this file's lock, alone among all processes. Makes the file and its folder.

    The kernel frees the lock when its holder dies, however that happens. OSError if the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        lock(file.fileno(), fcntl.LOCK_EX)
        yield  # the file is never deleted: others may wait for its lock


def digest(content: bytes) -> str:
    """A checksum that differs for different contents, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def file_digest(path: Path) -> tuple[str, int]:
    """(`digest` of a file's content, its size in bytes). UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            total = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
            return total.hexdigest(), file.tell()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check the path") from error
