"""SIGINT and SIGTERM end a run at the next step border, where everything can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Which signal came, 0 for none."""

    def __init__(self, launched: bool = False) -> None:
        """launched: by somebody who passes signals on, and kills a rank that takes too long."""
        self.signal = 0
        self._launched = launched

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal is noted; a second one acts as it would have without us, or does nothing in a rank
        that was launched. One that this process was started to ignore stays ignored; one that it was started
        to hold back (launch/crew.py) is heard from now on."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python has handlers on the main thread alone
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
