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
_TAKEN_BYTES = select.PIPE_BUF  # that a pipe which is ready for any takes without waiting
_LONGEST_BYTES = 65_536  # a longer line is passed on in pieces, of which each is shown as one
_KEPT_LINES = 100
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)  # no red: that is for what went wrong
_TORCHS_PREFIX = re.compile(rb"^\[rank\d+\]: ")  # before tracebacks
_FAILURE_STARTS = (b"Traceback (most recent call last)", b"Fatal Python error")


def unbuffered(stream: TextIO) -> BinaryIO:
    """Where it writes to. Its buffer would keep what a full disk has refused, and fail again at the end."""
    target: BinaryIO = getattr(stream.buffer, "raw", stream.buffer)
    return target


class Outlet:
    """One of our own outputs. Nobody waits for who reads it: what it does not take at once is kept here.

    What a full disk or a terminal that is gone does not take is lost, and ends no rank.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        """That it has not taken yet."""
        self._tells = True  # once, of what is lost
        self._ready: select.poll | None = None
        with contextlib.suppress(OSError, ValueError):  # it is in memory
            number = file.fileno()
            self._ready = select.poll()
            self._ready.register(number, select.POLLOUT)

    def write(self, data: bytes) -> None:
        """After all that waits. Raises BrokenPipeError if nobody reads it any more."""
        self._waiting.append(memoryview(data))
        self.waiting_bytes += len(data)
        self.pass_on()

    def pass_on(self) -> None:
        """As much as it takes now. Raises BrokenPipeError, as `write` does."""
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
                return  # somebody has made it one that does not wait, and it is full

    def finish(self) -> None:
        """Wait till all is taken, as most programs do. Raises BrokenPipeError, as `write` does."""
        while self._waiting:
            if self._ready is not None:
                self._ready.poll()
            self.pass_on()

    def drop(self) -> None:
        """Nobody will take what waits."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def _takes(self) -> bool:
        """Whether a write of few bytes would not wait, or would say that it is of no use."""
        return self._ready is None or bool(self._ready.poll(0))

    def _tell(self, error: OSError) -> None:
        if self._tells:
            self._tells = False
            say(f"imece: output cannot be written ({error.strerror}), so what ranks print is lost")


def say(line: str) -> None:
    """One line of the launcher's own, without a crew whose output it could come after."""
    with contextlib.suppress(OSError):
        unbuffered(sys.stderr).write(own_line(line))


def own_line(line: str) -> bytes:
    """As stderr shows it."""
    return f"{line}\n".encode(sys.stderr.encoding, "backslashreplace")


@dataclass
class Printed:
    """How much all ranks together have printed, to know which line came after which."""

    lines: int = 0


class LogFile:
    """A file to which a rank's output is appended, whichever process is that rank."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be opened."""
        self._path = path
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115  (as long as the job)

    def begin(self, rank: int, pid: int) -> None:
        """From here on it is another process' output."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.write(b"--- rank %d is pid %d since %s\n" % (rank, pid, now.encode()))

    def write(self, data: bytes) -> None:
        """Append it. A full disk ends the file and not the job."""
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
    """One stream of one rank: bytes come in as they are read, prefixed lines go out, and into `log` as well.

    Both "\\n" and "\\r" end a line, so that a progress bar neither waits for ever nor is lost.
    """

    rank: int
    target: Outlet
    printed: Printed
    log: LogFile | None = None
    _partial: bytes = b""
    _kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def __post_init__(self) -> None:
        self._coloured = self.target.file.isatty() and not os.environ.get("NO_COLOR")

    def feed(self, data: bytes) -> None:
        """Pass on every line that is now complete. Raises BrokenPipeError, as Outlet.write does."""
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
        """Write one line with the rank in front, coloured for a person who looks on."""
        prefix = b"[rank %d]" % self.rank
        if self._coloured:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[self.rank % len(_COLOURS)], prefix)
        self.target.write(b"%s %s\n" % (prefix, line))

    def _line(self, line: bytes, *, ends: bool = True) -> None:
        """ends: or it is a piece of one that goes on."""
        line = _TORCHS_PREFIX.sub(b"", line)
        self.printed.lines += 1
        self._kept.append((self.printed.lines, line))
        if self.log is not None:
            self.log.write(line + b"\n" if ends else line)
        self.show(line)
