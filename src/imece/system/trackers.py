"""multiprocessing's resource tracker outlives the ranks of a launcher that was killed, for a moment.

The tracker takes named semaphores (a loader's workers have some) and shared memory out of /dev/shm once the
rank and its workers have gone. When a launcher dies the kernel kills the process groups that its ranks lead
(launch/processes.py). So the tracker belongs to the launcher's own group.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

# What a terminal sends to the launcher's group. The tracker itself ignores SIGINT and SIGTERM.
_OF_TERMINALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
_start = util.spawnv_passfds


def outlive_launcher() -> None:
    """In a rank that leads its process group: trackers that start from here on will not belong to it. Who
    leads a session, too, cannot leave its group."""
    if os.getpgrp() == os.getpid() != os.getsid(0):
        util.spawnv_passfds = _start_outside


def _start_outside(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a program as multiprocessing does. A tracker is born into the launcher's group, which only it
    itself could enter later."""
    if os.getpgrp() != os.getpid() or not any("resource_tracker import main" in str(each) for each in args):
        return _start(path, args, passfds)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
    try:
        with contextlib.suppress(OSError):  # the launcher has just died
            os.setpgid(0, os.getpgid(os.getppid()))
        return _start(path, args, passfds)
    finally:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
