"""Which members have not been heard of for too long: pure, from what is seen at each look.

Only time in which somebody looked counts: if the launcher itself was stopped or starved, all beats are old.

A thread in Python beats, and is not heard while C code holds Python's lock, or others keep the cores. A
member in that state is busy, it computes or would, while one that is stopped, or waits for a disk, is not:
time in which it is busy counts a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LOOKS = 8  # looks within the time after which a member counts as silent
_BUSY = 0.05  # of a core, at least: threads that wait for Python's lock wake 200 times a second
_PATIENCE = 10  # times as long for one that is busy


@dataclass
class _Watched:
    beats: int
    busy_s: float
    silent_s: float = 0.0


class Silence:
    """Watches the beats of members, from the first beat of each."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: how long a member may be silent; 0: forever."""
        self.limit_s = limit_s
        self.interval_s = min(1.0, limit_s / _LOOKS) if limit_s else 1.0
        """Seconds between looks."""
        self._watched: dict[int, _Watched] = {}
        self._last_s: float | None = None

    def look(
        self, beats: Mapping[int, int], now: float, busy_s: Mapping[int, float] | None = None
    ) -> list[int]:
        """The silent members. beats: how often each member has beaten, of those that should; busy_s: for
        how long each was busy so far, all its threads together."""
        since_s = 0.0 if self._last_s is None else now - self._last_s
        # However late a look comes, it takes at least half of _LOOKS to find a member silent.
        passed_s = min(since_s, 2 * self.interval_s)
        self._last_s = now
        before, self._watched = self._watched, {}
        for member, count in beats.items():
            watched = self._watched[member] = _Watched(count, (busy_s or {}).get(member, 0.0))
            last = before.get(member)
            if last is not None and last.beats == count:
                busy = watched.busy_s - last.busy_s > _BUSY * since_s
                watched.silent_s = last.silent_s + (passed_s / _PATIENCE if busy else passed_s)
        return self._silent_for(self.limit_s) if self.limit_s else []

    def suspects(self) -> list[int]:
        """Members that have been silent for at least half the limit: others may be waiting for one
        of them."""
        return self._silent_for(self.limit_s / 2)

    def forgive(self) -> None:
        """Count anew for all: a member that waits for a silent one may be silent too."""
        self._watched = {}

    def _silent_for(self, limit_s: float) -> list[int]:
        return [member for member, watched in self._watched.items() if watched.silent_s >= limit_s]
