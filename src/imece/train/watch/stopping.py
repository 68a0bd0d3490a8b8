"""SIGINT and SIGTERM end a run at the next step border, where everything can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The first signal that came, 0 if none. Later ones do nothing: systemd, SLURM and pkill signal ranks and
    their launcher alike, which passes it on, and kills a rank that takes too long."""

    def __init__(self) -> None:
        self.signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While open, signals are noted. Those that this process was started to ignore stay ignored; those
        that it was started to block (launch/crew.py) are unblocked."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python runs handlers on the main thread only
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
