"""How a step's time divides into its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds of each phase of the step under way.

    On a GPU the host only orders the work: there a phase is the time between two events on its stream, and
    reading them waits until the step is over, which the loop does anyhow to see the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time within to `name`."""
        if self._on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """More time of a phase; less than none takes it back."""
        self._times[name] = self._times.get(name, 0.0) + seconds

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last lap, and those of each phase in it."""
        for name, begin, end in self._events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1e3)
        now = time.perf_counter()
        whole, phases = now - self._began, self._times
        self._began, self._times, self._events = now, {}, []
        return whole, phases
