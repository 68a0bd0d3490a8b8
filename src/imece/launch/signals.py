"""The signals that end a job, as bytes on a socket that a selector can wait for."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_as_bytes(selector: selectors.BaseSelector) -> Iterator[None]:
    """While open, SIGINT, SIGTERM and SIGHUP only wake `selector`, one byte for each. Those that this process
    was started to ignore, as nohup does it, stay ignored."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
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


def hear_all() -> None:
    """Called in a child: its launcher may pass on what it ignores itself, but another host has got."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; this only keeps Python's default handler from acting."""
