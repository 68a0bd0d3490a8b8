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

    def __init__(self) -> None:
        self.signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal is noted; a second one acts as it would have without us."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python has handlers on the main thread alone
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._before = before
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each, handler in self._before.items():
            signal.signal(each, handler)
