"""How a step's time divides into its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from imece.collectives.waited import waited_s


@dataclass(frozen=True)
class Lap:
    """One step's time on this rank, in seconds."""

    seconds: float
    phases: dict[str, float]
    own: dict[str, float]
    """Of each phase, and of "other" (what is in none), what was not spent in collectives, where a rank waits
    for the slowest: so the slowest is who has the most of it. Without "exposed", which is nothing else."""


class Clock:
    """Seconds of each phase of the step under way.

    On a GPU the host only orders the work: there a phase is the time between two events on its stream, and
    reading them waits until the step is over, which the loop does anyhow to see the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start()

    def _start(self) -> None:
        self._times: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)  # of these, in collectives
        self._exposed: float | None = None  # of backward
        self._events.clear()
        self._began, self._waited_before = time.perf_counter(), waited_s()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time within to `name`."""
        waited = waited_s()
        if self._on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._times[name] += time.perf_counter() - began
        self._waited[name] += waited_s() - waited

    def exposed(self, seconds: float) -> None:
        """So much of "backward" belongs to "exposed"."""
        self._exposed = (self._exposed or 0.0) + seconds

    def lap(self) -> Lap:
        """What was since the last one."""
        for name, begin, end in self._events:
            end.synchronize()
            self._times[name] += begin.elapsed_time(end) / 1e3
        phases, waited = dict(self._times), self._waited
        own = {name: max(0.0, phases[name] - waited[name]) for name in phases if name != "exposed"}
        whole = time.perf_counter() - self._began
        own["other"] = max(0.0, whole - (waited_s() - self._waited_before) - sum(own.values()))
        if self._exposed is not None:
            phases["exposed"] = phases.get("exposed", 0.0) + self._exposed
            phases["backward"] = phases.get("backward", 0.0) - self._exposed
        self._start()
        return Lap(whole, phases, own)
