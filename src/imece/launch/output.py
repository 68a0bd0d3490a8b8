"""The ranks' output, passed on line by line with the rank in front."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import BinaryIO

_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_BYTES = 65_536  # a longer line is passed on in pieces
_KEPT_LINES = 100
_FAILURE_STARTS = (b"Traceback (most recent call last)", b"Fatal Python error")


@dataclass
class Printed:
    """How much all ranks together have printed, to know which line came after which."""

    lines: int = 0


@dataclass
class RankOutput:
    """One stream of one rank: bytes come in as they are read, prefixed lines go out.

    Both "\\n" and "\\r" end a line, so that a progress bar neither waits for ever nor is lost.
    """

    rank: int
    target: BinaryIO
    printed: Printed
    _partial: bytes = b""
    _kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def feed(self, data: bytes) -> None:
        """Pass on every line that is now complete. Raises OSError if the target is gone."""
        data = self._partial + data
        pieces = _LINE_END.split(data)
        # A carriage return at the very end may be the first half of "\r\n".
        if data.endswith(b"\r"):
            pieces[-2:] = [pieces[-2] + b"\r"]
        self._partial = pieces.pop()
        for piece in pieces:
            self._line(piece)
        while len(self._partial) > _LONGEST_BYTES:
            self._line(self._partial[:_LONGEST_BYTES])
            self._partial = self._partial[_LONGEST_BYTES:]

    def finish(self) -> None:
        """Pass on the last line, which had no end."""
        rest, self._partial = self._partial, b""
        if rest:
            self._line(rest.removesuffix(b"\r"))

    def failure_lines(self) -> list[bytes]:
        """The traceback among the last lines, or nothing if it is the last thing a person sees anyway."""
        kept = list(self._kept)
        starts = [index for index, (_, line) in enumerate(kept) if line.startswith(_FAILURE_STARTS)]
        if not starts:
            return []
        traceback = kept[starts[0] :]
        if self.printed.lines - traceback[0][0] < len(traceback):  # no other rank spoke in between
            return []
        return [line for _, line in traceback]

    def show(self, line: bytes) -> None:
        """Write one line with the rank in front."""
        self.target.write(b"[rank %d] %s\n" % (self.rank, line))
        self.target.flush()

    def _line(self, line: bytes) -> None:
        line = line.removeprefix(b"[rank%d]: " % self.rank)  # torch's own, before tracebacks
        self.printed.lines += 1
        self._kept.append((self.printed.lines, line))
        self.show(line)
