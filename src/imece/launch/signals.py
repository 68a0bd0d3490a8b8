"""The signals that a launcher gets: as bytes on a socket that a selector can wait for, or as an exception."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""What batch systems send before a job's time is over, to all its processes. They are for scripts."""


@contextlib.contextmanager
def signals_as_bytes(selector: selectors.BaseSelector) -> Iterator[None]:
    """While open, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 only wake `selector`, with one byte each.
    Signals that this process was started to ignore, as by nohup, stay ignored; whoever calls the launcher
    keeps its own handlers of the last two."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    heard += [number for number in NOTICES if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, _note) for number in heard}
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    selector.register(reader, selectors.EVENT_READ, None)
    try:
        yield
    finally:
        selector.unregister(reader)
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """While open, the first SIGTERM or SIGHUP raises SystemExit(128 + number), so that `finally` runs
    as after Ctrl-C; later ones do not interrupt that. Signals that this process was started to ignore
    stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hear_all() -> None:
    """In a child: stop ignoring signals. Its launcher may pass on one that it ignores itself, but another
    host has got."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; this only replaces Python's default handler."""
