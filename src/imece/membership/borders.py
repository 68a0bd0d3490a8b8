"""At which borders between steps ranks ask each other whether all should move on.

Asking is a collective, in which fast ranks wait for slow ones. Asking seldom loses nothing: nobody waits for
a member that is to be taken in or to leave, and whatever waits for a dead rank notices its death.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 0.5
_MOST_STEPS = 8  # steps may become slower after this was agreed


class Borders:
    """Counts steps, so that all ranks come to the same borders though their clocks differ."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.begin(0)

    def begin(self, step: int) -> None:
        """All ranks are here, with `step` finished steps; how long a step takes is not known yet."""
        self._met, self._met_at = step, self._now()
        self._next = step + 1

    def is_due(self, step: int) -> bool:
        """Whether all ranks ask each other after `step` steps: the same on all ranks."""
        return step >= self._next

    def wished(self, step: int) -> int:
        """After how many more steps this rank would ask again; all take the smallest of these numbers."""
        step_s = (self._now() - self._met_at) / max(1, step - self._met)
        return max(1, min(_MOST_STEPS, int(_EVERY_S / max(step_s, 1e-9))))

    def agreed(self, step: int, count: int) -> None:
        """The ranks have asked each other, and will again after `count` steps more."""
        self.begin(step)
        self._next = step + count
