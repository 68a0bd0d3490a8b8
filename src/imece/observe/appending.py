"""A file that grows by whole pieces only: a piece that the disk has no room for leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path


class Appending:
    """Appends bytes to a file, each piece with one system call, so that what was written survives a kill."""

    def __init__(self, path: Path) -> None:
        """Makes the folder. OSError if that fails, or if the file cannot be opened."""
        self._path = path
        self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._size_bytes = os.fstat(self._file.fileno()).st_size

    def write(self, piece: bytes) -> None:
        """Append all of `piece`; on OSError the file is as before. A file that was removed is made anew."""
        if not os.fstat(self._file.fileno()).st_nlink:  # bytes written to a removed file would be lost
            removed = self._file
            self._open()
            removed.close()
        try:
            written = 0
            while written < len(piece):
                written += self._file.write(piece[written:])
        except OSError:
            # Half a piece would make the next one unreadable too; truncating needs no room.
            self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(piece)

    def close(self) -> None:
        """Close the file; everything is already written."""
        self._file.close()
