"""How long this thread has been in collectives: what is left of a span of time is the rank's own work.

    began, waited = time.perf_counter(), waited_s()
    ...
    own = (time.perf_counter() - began) - (waited_s() - waited)

The ranks that wait for a slow one need as long for a step as it does; only their own work tells them apart.
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
    """A context for whatever blocks until other ranks have come."""

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
    """So much was waited in calls of others, as torch's pipelines make them."""
    here.seconds += seconds


def waited_s() -> float:
    """Seconds that this thread has been in collectives, since it began."""
    return here.seconds
