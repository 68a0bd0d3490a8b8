"""Passes on what ranks print, to our own outputs and into files.

A reader of ours that takes nothing holds up the ranks that print, as it would those of any program, and
nobody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import stat
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import IO

from imece.errors import UserError
from imece.launch.output import LogFile, Outlet, Printed, RankOutput, own_line, unbuffered
from imece.writing import try_folder

_READ_BYTES = 65_536
_PIPE_READS = 1 + (1 << 20) // _READ_BYTES  # as much as the largest pipe that a user may make, and its end
_MOST_WAITING_BYTES = 4 << 20  # for a reader that does not read; beyond that the ranks that print wait for it


class Relay:
    """Pipes that ranks write into, and our outputs that take what comes."""

    def __init__(
        self, selector: selectors.BaseSelector, logs: Path | None, on_reader_gone: Callable[[], None]
    ) -> None:
        """selector: its owner passes events to `handle`, and calls `hold_back` after that."""
        if logs is not None:
            try:
                logs.mkdir(parents=True, exist_ok=True)
                try_folder(logs)
            except OSError as error:
                raise UserError(
                    f"the folder {str(logs)!r} for logs cannot be written: {error.strerror}"
                ) from None
        self._selector, self._on_reader_gone = selector, on_reader_gone
        self._logs = logs
        self._log_files: dict[int, LogFile] = {}
        self._open: dict[int, tuple[IO[bytes], RankOutput]] = {}  # pipes to read, by descriptor
        self._outlets = _outlets()  # stdout, stderr
        self._waited_for: dict[Outlet, int] = {}  # those that did not take all, by a descriptor
        self._holds_back = False  # ranks' pipes are not read, as too much waits
        self._is_released = self._is_closed = False
        self._read_by: set[int] = set()  # our own outputs that are pipes, if a rank writes to them directly
        self._printed = Printed()

    @property
    def is_open(self) -> bool:
        """Whether any pipe has not come to its end."""
        return bool(self._open)

    @property
    def waits(self) -> bool:
        """Whether an output has not taken everything."""
        return bool(self._waited_for)

    def outputs(self, slot: int, *, is_logged: bool) -> tuple[RankOutput, RankOutput]:
        """For stdout and stderr of a rank."""
        log = self._log_of(slot) if is_logged else None
        out, err = (RankOutput(slot, outlet, self._printed, log) for outlet in self._outlets)
        return out, err

    def follow(self, stream: IO[bytes], output: RankOutput) -> None:
        """Pass on what comes from this pipe."""
        os.set_blocking(stream.fileno(), False)
        self._open[stream.fileno()] = stream, output
        if not self._holds_back:
            self._selector.register(stream.fileno(), selectors.EVENT_READ, output)

    def handle(self, key: selectors.SelectorKey) -> None:
        """Something is ready; anything not registered here is ignored."""
        if isinstance(key.data, RankOutput):
            self._read(key.fd)
        elif isinstance(key.data, Outlet):
            self._write(key.data, key.data.pass_on)
        elif key.fd in self._read_by:
            self._reader_gone(key.fd)

    def take_rest(self, outputs: Collection[RankOutput]) -> None:
        """Take what a rank that has ended left, and no more: another process may go on writing."""
        for fd in [fd for fd, (_, output) in self._open.items() if any(output is own for own in outputs)]:
            for _ in range(_PIPE_READS):
                if not self._read(fd):
                    break

    def say(self, line: str) -> None:
        """Print one line of the launcher's, after what ranks have printed there."""
        stderr = self._outlets[1]
        self._write(stderr, partial(stderr.write, own_line(line)))

    def end_live_line(self) -> None:
        """A rank that writes to our own terminal was killed, and so has not ended its live line."""
        with contextlib.suppress(OSError, ValueError):  # closed, or in memory
            if self._outlets[0].file.isatty():
                self._write(self._outlets[0], partial(self._outlets[0].write, b"\n"))

    def show_failure(self, output: RankOutput) -> None:
        """Show the traceback again that a rank has printed, unless little came after it."""
        for line in output.failure_lines():
            self._write(output.target, partial(output.show, line))

    def release(self) -> None:
        """Ranks are being ended: read their pipes from here on, however much waits."""
        self._is_released = True
        self.hold_back()

    def end_lines(self) -> None:
        """Show the unfinished last lines of pipes that are still open."""
        for _, output in self._open.values():
            self._write(output.target, output.finish)

    def close(self) -> None:
        """Nobody looks at the selector any more: later output blocks until it is taken."""
        self._is_closed = True
        for stream, _ in self._open.values():
            stream.close()
        for log in self._log_files.values():
            log.close()
        for copy in self._waited_for.values():
            os.close(copy)

    def _read(self, fd: int) -> bool:
        """Pass on what is there; returns whether there may be more."""
        stream, output = self._open[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._write(output.target, partial(output.feed, data))
            return True
        if not self._holds_back:
            self._selector.unregister(fd)
        del self._open[fd]
        stream.close()
        self._write(output.target, output.finish)
        return False

    def _write(self, outlet: Outlet, write: Callable[[], None]) -> None:
        """Call `write`, which writes into this outlet. Its reader may have gone."""
        try:
            write()
        except BrokenPipeError:
            self._reader_gone(outlet.file.fileno())
        self._wait_for(outlet)

    def _wait_for(self, outlet: Outlet) -> None:
        """Get notified when the outlet takes more, if it has to."""
        if self._is_closed:
            self._wait_here(outlet)
        elif outlet.waiting_bytes and outlet not in self._waited_for:
            copy = os.dup(outlet.file.fileno())  # the file itself may be among `_read_by`
            self._waited_for[outlet] = copy
            self._selector.register(copy, selectors.EVENT_WRITE, outlet)
        elif not outlet.waiting_bytes and outlet in self._waited_for:
            copy = self._waited_for.pop(outlet)
            self._selector.unregister(copy)
            os.close(copy)

    def _wait_here(self, outlet: Outlet) -> None:
        if outlet in self._waited_for:  # the outlet has not taken the earlier output either
            outlet.drop()
        with contextlib.suppress(BrokenPipeError):
            outlet.finish()

    def hold_back(self) -> None:
        """Ranks whose output nobody takes wait, as those of any program do."""
        waiting_bytes = max(outlet.waiting_bytes for outlet in self._outlets)
        most_bytes = _MOST_WAITING_BYTES // (2 if self._holds_back else 1)
        holds_back = waiting_bytes > most_bytes and not self._is_released
        if holds_back != self._holds_back:
            self._holds_back = holds_back
            for fd, (_, output) in self._open.items():
                if holds_back:
                    self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ, output)

    def watch_readers(self) -> None:
        """Watch readers of pipes that a rank writes into directly: nobody here would see an error when they
        are gone."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
                fd = stream.fileno()
                writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
                if fd not in self._read_by and writes and stat.S_ISFIFO(os.fstat(fd).st_mode):
                    self._selector.register(fd, selectors.EVENT_READ, self)  # it tells of errors
                    self._read_by.add(fd)

    def _reader_gone(self, fd: int) -> None:
        """End, as any program in a pipeline does. Output goes nowhere from here on."""
        if fd in self._read_by:
            self._read_by.remove(fd)
            self._selector.unregister(fd)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
        self._on_reader_gone()

    def _log_of(self, slot: int) -> LogFile | None:
        if self._logs is None:
            return None
        if slot not in self._log_files:
            self._log_files[slot] = LogFile(self._logs / f"rank-{slot}.log")
        return self._log_files[slot]


def _outlets() -> tuple[Outlet, Outlet]:
    """Outlets of stdout and stderr; a single one if both are the same pipe or terminal, or their lines would
    be mixed."""
    out, err = (unbuffered(stream) for stream in (sys.stdout, sys.stderr))
    one = Outlet(out)
    with contextlib.suppress(OSError, ValueError):  # in memory
        if os.path.sameopenfile(out.fileno(), err.fileno()):
            return one, one
    return one, Outlet(err)
