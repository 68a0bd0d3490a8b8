"""How long this thread has been in collectives; the rest of a span of time is the rank's own work.

    began, waited = time.perf_counter(), waited_s()
    ...
    own = (time.perf_counter() - began) - (waited_s() - waited)

Ranks that wait for a slow one take as long for a step as it does; only their own work tells them apart.
"""

from __future__ import annotations

import threading
import time


class _Here(threading.local):
    depth = 0  # a collective may be made of others
    began = 0.0
    seconds = 0.0


here = _Here()


class _Waiting:
    """A context for anything that blocks until other ranks have come."""

    def __enter__(self) -> None:
        here.depth += 1
        if here.depth == 1:
            here.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        here.depth -= 1
        if not here.depth:
            here.seconds += time.perf_counter() - here.began


waiting = _Waiting()


def count(seconds: float) -> None:
    """Add time waited in calls of others, such as those that torch's pipelines make."""
    here.seconds += seconds


def waited_s() -> float:
    """Seconds that this thread has been in collectives since it began."""
    return here.seconds
