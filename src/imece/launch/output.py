"""The ranks' output, passed on line by line with the rank in front."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

_LINE_END = re.compile(rb"\r\n|\n|\r")
_TAKEN_BYTES = select.PIPE_BUF  # a ready pipe takes this many without blocking
_LONGEST_BYTES = 65_536  # a longer line is passed on in pieces, each shown as a line
_KEPT_LINES = 100
_NEAR_LINES = 10  # of other ranks: who reads the last line sees what came before so few
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)  # no red: that is for failures
_TORCHS_PREFIX = re.compile(rb"^\[rank\d+\]: ")  # in front of tracebacks
_FAILURE_STARTS = (b"Traceback (most recent call last)", b"Fatal Python error")


def unbuffered(stream: TextIO) -> BinaryIO:
    """The raw file under a stream. The stream's buffer would keep what a full disk has refused, and fail
    again at the end."""
    target: BinaryIO = getattr(stream.buffer, "raw", stream.buffer)
    return target


class Outlet:
    """One of our own outputs. Nobody waits for its reader: what it does not take at once is kept here.

    What a full disk or a vanished terminal does not take is lost, and ends no rank.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        """Bytes that it has not taken yet."""
        self._tells = True  # warns once of lost output
        self._ready: select.poll | None = None
        with contextlib.suppress(OSError, ValueError):  # a file in memory has no descriptor
            number = file.fileno()
            self._ready = select.poll()
            self._ready.register(number, select.POLLOUT)

    def write(self, data: bytes) -> None:
        """Write after everything that waits. BrokenPipeError if nobody reads it any more."""
        self._waiting.append(memoryview(data))
        self.waiting_bytes += len(data)
        self.pass_on()

    def pass_on(self) -> None:
        """Write as much as it takes now. BrokenPipeError, as in `write`."""
        while self._waiting and self._takes():
            head = self._waiting.popleft()
            try:
                taken = self.file.write(head[:_TAKEN_BYTES])
            except BrokenPipeError:
                self.drop()
                raise
            except OSError as error:
                self.drop()
                self._tell(error)
                return
            self.waiting_bytes -= taken or 0
            if (taken or 0) < len(head):
                self._waiting.appendleft(head[taken or 0 :])
            if not taken:
                return  # somebody has made it non-blocking, and it is full

    def finish(self) -> None:
        """Wait until all is taken, as most programs do. BrokenPipeError, as in `write`."""
        while self._waiting:
            if self._ready is not None:
                self._ready.poll()
            self.pass_on()

    def drop(self) -> None:
        """Drop what waits: nobody will take it."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def _takes(self) -> bool:
        """Whether a write of few bytes would not block, or would fail at once."""
        return self._ready is None or bool(self._ready.poll(0))

    def _tell(self, error: OSError) -> None:
        if self._tells:
            self._tells = False
            say(f"imece: output cannot be written ({error.strerror}), so what ranks print is lost")


def say(line: str) -> None:
    """Print one line of the launcher's, if there is no crew whose output it should come after."""
    with contextlib.suppress(OSError):
        unbuffered(sys.stderr).write(own_line(line))


def own_line(line: str) -> bytes:
    """The line as stderr shows it."""
    return f"{line}\n".encode(sys.stderr.encoding, "backslashreplace")


@dataclass
class Printed:
    """Counts what all ranks together have printed, to know which line came after which."""

    lines: int = 0


class LogFile:
    """A file to which the output of a rank is appended, whichever process the rank is."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self._path = path
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115  (as long as the job)

    def begin(self, rank: int, pid: int) -> None:
        """Mark the beginning of another process' output."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.write(b"--- rank %d is pid %d since %s\n" % (rank, pid, now.encode()))

    def write(self, data: bytes) -> None:
        """Append data. A full disk ends the file and not the job."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.close()
            say(f"imece: {self._path} is not written any more: {error.strerror}")

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class RankOutput:
    """One stream of one rank: bytes come in as they are read, prefixed lines go out, and also into `log`.

    Both "\\n" and "\\r" end a line, so that a progress bar neither waits forever nor is lost.
    """

    rank: int
    target: Outlet
    printed: Printed
    log: LogFile | None = None
    _partial: bytes = b""
    _kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def __post_init__(self) -> None:
        dumb = os.environ.get("TERM", "dumb") == "dumb"  # as that of an editor, which shows the codes
        self._coloured = self.target.file.isatty() and not dumb and not os.environ.get("NO_COLOR")

    def feed(self, data: bytes) -> None:
        """Pass on every line that is now complete. BrokenPipeError, as in Outlet.write."""
        data = self._partial + data
        pieces = _LINE_END.split(data)
        # A carriage return at the very end may be the first half of "\r\n".
        if data.endswith(b"\r"):
            pieces[-2:] = [pieces[-2] + b"\r"]
        self._partial = pieces.pop()
        for piece in pieces:
            self._line(piece)
        while len(self._partial) > _LONGEST_BYTES:
            self._line(self._partial[:_LONGEST_BYTES], ends=False)
            self._partial = self._partial[_LONGEST_BYTES:]

    def finish(self) -> None:
        """Pass on the last line, which had no end."""
        rest, self._partial = self._partial, b""
        if rest:
            self._line(rest.removesuffix(b"\r"))

    def failure_lines(self) -> list[bytes]:
        """The traceback among the last lines; empty if people see it anyway, as little came after it."""
        kept = list(self._kept)
        starts = [index for index, (_, line) in enumerate(kept) if line.startswith(_FAILURE_STARTS)]
        if not starts:
            return []
        traceback = kept[starts[0] :]
        if self.printed.lines - traceback[0][0] + 1 - len(traceback) <= _NEAR_LINES:
            return []
        return [line for _, line in traceback]

    def show(self, line: bytes) -> None:
        """Write one line with the rank in front, coloured on a terminal."""
        prefix = b"[rank %d]" % self.rank
        if self._coloured:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[self.rank % len(_COLOURS)], prefix)
        self.target.write(b"%s %s\n" % (prefix, line))

    def _line(self, line: bytes, *, ends: bool = True) -> None:
        """ends: False for a piece of a line that goes on."""
        line = _TORCHS_PREFIX.sub(b"", line)
        self.printed.lines += 1
        self._kept.append((self.printed.lines, line))
        if self.log is not None:
            self.log.write(line + b"\n" if ends else line)
        self.show(line)
