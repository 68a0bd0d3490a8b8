"""Records the times of one step (trace.py), only on request, since it costs a thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from imece.data_parallel.reducing.trace import BucketTrace, StepTrace

_LOOK_EVERY_S = 0.0003
_SELDOM_S = 0.002  # on a GPU: each look holds up the host, which queues work meanwhile


class Watch:
    """The reducer tells it what happens; `last` is the latest complete step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.computed: torch.cuda.Event | None = None
        """On a GPU, in the latest backward: recorded when its stream has the last gradient, before
        it waits."""
        self.last: StepTrace | None = None
        self._step = StepTrace(time.perf_counter())
        self._lock = threading.Lock()
        self._underway: list[tuple[BucketTrace, Any]] = []

    def forward(self) -> None:
        self._step = StepTrace(time.perf_counter())

    def backward(self) -> None:
        self._step.backward_start_s = time.perf_counter()
        self._step.buckets.clear()

    def left(self, trace: BucketTrace, bucket: Any) -> None:
        """A bucket has left. bucket: its `work` is under way, or over already."""
        self._step.buckets.append(trace)
        if bucket.work is None:
            trace.done_s = time.perf_counter()
            return
        with self._lock:
            first = not self._underway
            self._underway.append((trace, bucket.work))
        if first:
            threading.Thread(target=self._look, name="imece-watch", daemon=True).start()

    def backward_ended(self) -> None:
        self._step.backward_end_s = time.perf_counter()
        if self._device.type == "cuda":
            self.computed = torch.cuda.Event(enable_timing=True)
            self.computed.record(torch.cuda.current_stream(self._device))

    def ended(self) -> None:
        self._step.end_s = time.perf_counter()
        with self._lock:
            for trace, _ in self._underway:
                trace.done_s = self._step.end_s
            self._underway.clear()
        self.last = self._step

    def give_up(self) -> None:
        """What is under way will never be done."""
        with self._lock:
            self._underway.clear()

    def _look(self) -> None:
        """Notes when buckets are done, by asking: works of all backends can be asked, few of them tell."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # asking an event of another device makes a context there
        while True:
            with self._lock:
                now = time.perf_counter()
                left = []
                for trace, work in self._underway:
                    if work.done():
                        trace.done_s = now
                    else:
                        left.append((trace, work))
                self._underway = left
                if not left:
                    return
            time.sleep(_LOOK_EVERY_S if self._device.type == "cpu" else _SELDOM_S)
