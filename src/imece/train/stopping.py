"""SIGINT and SIGTERM end a run at the next step border, where everything can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The signal that came, 0 if none."""

    def __init__(self, launched: bool = False) -> None:
        """launched: by a launcher that passes signals on, and kills a rank that takes too long."""
        self.signal = 0
        self._launched = launched

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal is noted. A second one acts as usual, but does nothing in a launched rank. Signals
        that this process was started to ignore stay ignored; those that it was started to block
        (launch/crew.py) are unblocked."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python runs handlers on the main thread only
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        self._before = before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._launched:  # systemd, SLURM and pkill signal ranks and launcher alike: it comes twice
            self.signal = self.signal or number
            return
        self.signal = number
        for each, handler in self._before.items():
            signal.signal(each, handler)
