"""A clock for tests of what waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Stands for the module `time`: seconds pass when a test says so, or when somebody sleeps."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
