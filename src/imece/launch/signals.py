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
    """While open, SIGINT, SIGTERM and SIGHUP only wake `selector`, one byte for each."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    before = {number: signal.signal(number, _note) for number in ENDING}
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


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; this only keeps Python's default handler from acting."""
