"""Which ranks are silent, judged from a series of observations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from imece.launch.processes import busy_s_of
from imece.launch.silence import Silence


def test_one_that_beats_no_more() -> None:
    silence = Silence(10.0)
    found, suspected = [], []
    for now in range(20):
        found.append(silence.look({0: now, 1: min(now, 5)}, float(now)))
        suspected.append(silence.suspects())
    assert found.index([1]) == 15 and all(each in ([], [1]) for each in found)
    assert suspected.index([1]) == 10, "half of that"


def test_nobody_is_silent_because_nobody_looked() -> None:
    """The launcher was stopped for an hour, or looks late again and again."""
    silence = Silence(10.0)
    for now in (0.0, 1.0, 2.0, 3600.0, 3601.0, 3602.0, 3603.0):
        assert silence.look({0: 1}, now) == []
    silence = Silence(10.0)
    assert [silence.look({0: 1}, 1000.0 * count) for count in range(4)] == [[]] * 4


def test_it_begins_with_the_first_beat_and_may_be_switched_off() -> None:
    silence = Silence(2.0)
    assert all(silence.look({}, float(now)) == [] for now in range(100))
    never = Silence(0.0)
    assert all(never.look({0: 1}, float(now)) == [] for now in range(100))


def test_forgiven() -> None:
    silence = Silence(4.0)
    assert [bool(silence.look({0: 1}, now / 2)) for now in range(10)] == [False] * 8 + [True] * 2
    silence.forgive()
    assert [bool(silence.look({0: 1}, 5 + now / 2)) for now in range(10)] == [False] * 8 + [True] * 2


def test_one_that_is_busy_has_ten_times_as_long() -> None:
    """C code keeps Python's lock, on a core that others need too; one that waits for the lock uses little."""
    for share, expected in ((1.0, 100), (0.1, 100), (0.02, 10), (0.0, 10)):
        silence = Silence(10.0)
        found = [silence.look({0: 1}, float(now), {0: 3.0 + share * now}) for now in range(110)]
        assert found.index([0]) in (expected, expected + 1), share
    silence = Silence(10.0)
    found = [silence.look({0: 1}, float(now), {0: float(min(now, 50))}) for now in range(110)]
    assert found.index([0]) in (55, 56), "it is stopped after it has computed for 50 s"


def test_for_how_long_a_process_was_busy() -> None:
    counts = "sum(range(1 << 18)); print(flush=True); sum(range(1 << 60))"  # the latter with the lock
    with subprocess.Popen([sys.executable, "-c", counts], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            first, until = busy_s_of(process.pid), time.monotonic() + 30
            while busy_s_of(process.pid) < first + 0.1:
                assert time.monotonic() < until
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = busy_s_of(process.pid)
            time.sleep(0.1)
            assert busy_s_of(process.pid) == stopped
        finally:
            process.kill()
    assert busy_s_of(process.pid) == 0


def test_one_that_others_keep_from_the_cores_is_busy() -> None:
    """Two that compute on one core, of which one gets a seventieth of it."""
    counts = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); sum(range(1 << 60))"
    starts = counts, f"import os; os.nice(19); {counts}"
    crowd = [subprocess.Popen([sys.executable, "-c", text]) for text in starts]
    pid = crowd[1].pid
    try:
        until = time.monotonic() + 60
        while (busy_s := busy_s_of(pid)) < 1:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert psutil.Process(pid).cpu_times().user < busy_s / 2
    finally:
        for process in crowd:
            process.kill()
            process.wait()
