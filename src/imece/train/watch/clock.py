"""Measures how a step's time is divided among its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from imece.collectives.waited import waited_s
from imece.model_parallel.schedules import Mark


@dataclass(frozen=True)
class Lap:
    """One step's times on this rank, in seconds."""

    seconds: float
    phases: dict[str, float]
    own: dict[str, float]
    """For each phase, and for "other" (the rest), the time not spent in collectives. In collectives a rank
    waits for the slowest, so the slowest rank has the most time of its own. Without "exposed", which is only
    waiting."""


class Clock:
    """Seconds of each phase of the present step.

    A GPU's host only queues the work, so there a phase is the time between two events on the stream. Reading
    them waits until the step is over, which the loop does anyway to see the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start()

    def _start(self) -> None:
        self._times: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)  # of these times, the part in collectives
        self._exposed: float | None = None  # the exposed part of backward
        self._computed: list[
            tuple[torch.cuda.Event, torch.cuda.Event]
        ] = []  # end of compute, and of backward
        self._events.clear()
        self._busy: list[Mark] = []
        self._began, self._waited_before = time.perf_counter(), waited_s()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to the phase `name`."""
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

    def exposed(self, seconds: float, computed: torch.cuda.Event | None = None) -> None:
        """Count this part of the last "backward" as "exposed"; a step may have several.

        computed: on a GPU, an event after the computation; there the stream waits, and hardly ever the host.
        """
        self._exposed = (self._exposed or 0.0) + (seconds if computed is None else 0.0)
        if computed is not None:
            self._computed.append((computed, self._events[-1][2]))

    def busy(self, marks: Sequence[Mark]) -> None:
        """These spans of the step's "exposed" time were this rank's own work; count them where they
        belong."""
        self._busy += marks

    def lap(self) -> Lap:
        """The times since the last call."""
        for name, begin, end in self._events:
            end.synchronize()
            self._times[name] += begin.elapsed_time(end) / 1e3
        for mark in self._busy:
            self._times[mark.what] += mark.seconds
            self._times["exposed"] -= mark.seconds
        # The host notices the stream's waiting only because the whole takes longer.
        on_stream = max(0.0, self._times.get("exposed", 0.0)) if self._on_gpu else 0.0
        if self._computed:
            waited = sum(computed.elapsed_time(end) for computed, end in self._computed) / 1e3
            self._exposed = (self._exposed or 0.0) + waited
            on_stream += waited
            self._waited["backward"] = max(self._waited["backward"], waited)  # includes the host's own wait
        phases = dict(self._times)
        own = {name: max(0.0, phases[name] - self._waited[name]) for name in phases if name != "exposed"}
        whole = time.perf_counter() - self._began
        own["other"] = max(0.0, whole - (waited_s() - self._waited_before) - on_stream - sum(own.values()))
        if self._exposed is not None:
            phases["exposed"] = phases.get("exposed", 0.0) + self._exposed
            phases["backward"] = phases.get("backward", 0.0) - self._exposed
        self._start()
        return Lap(whole, phases, own)
