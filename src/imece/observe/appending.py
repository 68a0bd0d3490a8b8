"""A file that only grows by whole pieces: one that the disk has no room for is not there in part."""

from __future__ import annotations

import os
from pathlib import Path


class Appending:
    """Bytes appended to a file, each time with a system call of its own: what was written outlives a kill."""

    def __init__(self, path: Path) -> None:
        """The folder is made. OSError if it cannot be, or if the file cannot be opened."""
        self._path = path
        self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._size_bytes = os.fstat(self._file.fileno()).st_size

    def write(self, piece: bytes) -> None:
        """All of `piece`, or OSError and the file as it was before; one that was removed begins anew."""
        if not os.fstat(self._file.fileno()).st_nlink:  # whatever is written to it goes with it
            removed = self._file
            self._open()
            removed.close()
        try:
            written = 0
            while written < len(piece):
                written += self._file.write(piece[written:])
        except OSError:
            # Half a piece would make the next one unreadable as well; making a file shorter needs no room.
            self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(piece)

    def close(self) -> None:
        """Close the file; nothing is left to be written."""
        self._file.close()
