"""SIGUSR1 makes a rank print what it is doing, unless the program uses that signal itself."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

from imece.collectives import recorder


def listen() -> None:
    """From now on `kill -USR1 PID` prints this rank's stacks and last calls (recorder.install_signal).

    Does nothing if the program handles the signal already, or outside of the main thread, where Python allows
    no handlers. A handler that the program sets later replaces this one.
    """
    if threading.current_thread() is threading.main_thread() and not _in_use(signal.SIGUSR1):
        recorder.install_signal()


def _in_use(number: int) -> bool:
    """Whether the signal does anything else than end this process."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    try:  # Python's own table leaves out what C has set, for instance faulthandler.register
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:  # not Linux: the table is all there is
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
