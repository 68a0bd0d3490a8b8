"""A rank's own time excludes waiting, on the CPU and on a GPU's stream."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

from imece.collectives.waited import waited_s, waiting
from imece.model_parallel.schedules import Mark, Moment
from imece.train.config import MeshSection
from imece.train.loop import Loop
from imece.train.step import Outcome
from imece.train.watch.clock import Clock, Lap

WAIT_S = 0.02


def wait() -> None:
    with waiting, waiting:  # a collective made of others
        time.sleep(WAIT_S)


def test_waiting_is_nobodys_own() -> None:
    before = waited_s()
    clock = Clock(torch.device("cpu"))
    with clock.phase("backward"):
        time.sleep(WAIT_S)
        wait()
    with clock.phase("exposed"):
        wait()
    clock.exposed(WAIT_S / 2)
    wait()
    time.sleep(WAIT_S)
    lap = clock.lap()
    assert waited_s() - before >= 3 * WAIT_S
    assert lap.phases["backward"] >= 1.5 * WAIT_S and lap.phases["exposed"] >= 1.5 * WAIT_S
    assert lap.own.keys() == {"backward", "other"}
    assert min(lap.own.values()) >= WAIT_S
    assert lap.own["backward"] <= lap.phases["backward"] - WAIT_S / 2
    assert sum(lap.own.values()) <= lap.seconds - 3 * WAIT_S
    assert sum(lap.phases.values()) < lap.seconds
    assert clock.lap().own.keys() == {"other"}


class Event:
    """What Clock needs of torch.cuda.Event; the stream is at `now_s`."""

    now_s = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_a_stream_that_waits() -> None:
    with mock.patch("torch.cuda.Event", Event), mock.patch("time.perf_counter", lambda: Event.now_s):
        clock = Clock(torch.device("cuda"))
        for _ in range(2):  # micro-batches whose gradients are summed one by one
            with clock.phase("backward"):
                Event.now_s += 0.3
                computed: Any = Event(enable_timing=True)
                computed.record()
                Event.now_s += 0.2
            clock.exposed(0.001, computed)
        with clock.phase("optimizer"):
            Event.now_s += 0.1
        lap = clock.lap()
    assert lap.phases == pytest.approx({"backward": 0.6, "exposed": 0.4, "optimizer": 0.1})
    assert lap.own == pytest.approx({"backward": 0.6, "optimizer": 0.1, "other": 0})


def test_a_stage_on_a_stream_that_waits() -> None:
    """What a pipeline's stage computes is told apart from its waiting when the step is over."""
    device = torch.device("cuda")
    with mock.patch("torch.cuda.Event", Event), mock.patch("time.perf_counter", lambda: Event.now_s):
        clock = Clock(device)
        with clock.phase("exposed"):
            marks = []
            for what, waits_s, takes_s in (("forward", 0.1, 0.2), ("backward", 0.3, 0.4)):
                Event.now_s += waits_s
                start = Moment(device)
                Event.now_s += takes_s
                marks.append(Mark(what, 0, 0, start, Moment(device)))
        clock.busy(marks)
        marks.clear()  # as the next evaluation does
        lap = clock.lap()
    assert lap.phases == pytest.approx({"forward": 0.2, "backward": 0.4, "exposed": 0.4})
    assert lap.own == pytest.approx({"forward": 0.2, "backward": 0.4, "other": 0})


def test_more_rows_are_more_work() -> None:
    """After a death some ranks have a sequence more than others."""
    lap = Lap(1.0, {}, {"forward": 0.3, "backward": 0.6})
    loop = mock.Mock()
    loop._session.plan = mock.Mock(ranks=3, tokens=400, mesh=MeshSection())
    times = Loop._own_times(loop, lap, Outcome(0.0, 100, 1.0, computed=200))
    assert times == pytest.approx((0.0, 0.2, 0.4, 0.0, 0.0, 0.0))
    assert Loop._own_times(loop, lap, Outcome(0.0, 0, 1.0)) is None
