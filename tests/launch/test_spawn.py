"""`imece.spawn`. Most functions here are closures, which start in a fork of this process and so at once."""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import imece
from imece.errors import UserError
from imece.launch.endings import Ending
from imece.launch.spawn import RankFailedError, _Crew, spawn
from imece.store import listen, serve
from tests.launch.launcher import Launcher


def sum_in_a_fresh_process(factor: float) -> dict[str, Any]:
    mesh = imece.init()
    tensor = torch.full((3,), factor * (mesh.rank + 1))
    dist.all_reduce(tensor)
    return {"rank": mesh.rank, "sum": tensor, "pair": (mesh.world_size, os.environ["EXTRA"])}


def test_results_in_the_order_of_ranks() -> None:
    results = spawn(sum_in_a_fresh_process, (2.0,), ranks=2, timeout_s=200, env={"EXTRA": "e"})
    assert [result["rank"] for result in results] == [0, 1]
    assert all(torch.equal(result["sum"], torch.full((3,), 6.0)) for result in results)
    assert results[1]["pair"] == (2, "e")


def test_a_closure_runs_in_copies_of_this_process() -> None:
    factor, ours = 10, int(Path("/proc/self/oom_score_adj").read_text())

    def here() -> list[int]:
        mesh = imece.init(backend="gloo")
        tensor = torch.tensor([factor**mesh.rank])
        dist.all_reduce(tensor)
        likelier = int(Path("/proc/self/oom_score_adj").read_text()) - ours  # the kernel ends these first
        return [mesh.rank, int(tensor), torch.get_num_threads(), likelier > 0]

    torch.set_num_threads(2)  # which are not in a copy
    try:
        with ThreadPoolExecutor(1) as pool:  # as asyncio.to_thread has: at its end Python joins all of these
            results = pool.submit(spawn, here, ranks=3, timeout_s=200).result()
        assert results == [[0, 111, 1, True], [1, 111, 1, True], [2, 111, 1, True]]
    finally:
        torch.set_num_threads(1)
    assert not dist.is_initialized(), "the parent itself takes no part"


def failing(fault: Callable[[], Any], *, ranks: int = 3) -> RankFailedError:
    """The error if rank 1 does `fault` while the others wait for it."""

    def body() -> None:
        imece.init(backend="gloo")
        if os.environ["RANK"] == "1":
            fault()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailedError) as caught:
        spawn(body, ranks=ranks, timeout_s=200)
    assert caught.value.rank == 1
    return caught.value


def raise_value_error() -> None:
    raise ValueError("the cause")


def test_the_traceback_of_the_first_failing_rank() -> None:
    message = str(failing(raise_value_error))
    assert "rank 1 (pid " in message and "ValueError: the cause" in message
    assert "in raise_value_error" in message and "Traceback" in message


def differ_in_length() -> None:
    imece.all_reduce(torch.ones(2 + imece.init().rank))


def test_the_traceback_of_an_error_of_imece_is_that_of_the_program() -> None:
    with pytest.raises(RankFailedError) as caught:
        spawn(differ_in_length, ranks=2, timeout_s=200)
    message = str(caught.value)
    assert "in differ_in_length" in message and "errors.MismatchError: " in message
    assert "_run_rank" not in message and "ops.py" not in message


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda: os.kill(os.getpid(), 9), "killed by signal 9 (SIGKILL)"),
        (lambda: os._exit(0), "left early with exit status 0"),
        (lambda: os._exit(7), "failed with exit status 7"),
        (lambda: sys.exit(7), "SystemExit: 7"),
    ],
)
def test_other_ways_to_fail(fault: Callable[[], Any], said: str) -> None:
    assert said in str(failing(fault))


def test_a_failure_without_a_word_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as redirect_stderr does, where nothing comes of it
    with pytest.raises(RankFailedError, match=r"around its call of spawn$"):
        _Crew()._raise(Ending(1, 4711, 1, 0.0))


class DiesWhenRead:
    """An argument with which a fresh process dies, before it has read what follows."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGKILL,)


def test_a_rank_that_dies_before_it_has_read_large_arguments() -> None:
    """More than fits into a pipe of which this process itself has the other end."""
    with pytest.raises(RankFailedError, match="was killed by signal 9"):
        spawn(print, (DiesWhenRead(), bytes(1 << 20)), ranks=1, timeout_s=200)


def test_a_rank_that_returns_before_it_has_met_the_others() -> None:
    def body() -> None:
        if os.environ["RANK"] == "0":
            imece.init()

    with pytest.raises(RankFailedError, match="rank 0 of 2 waits for rank 1, which ended with exit status 0"):
        spawn(body, ranks=2, timeout_s=200)


def test_one_failure_ends_ranks_that_wait_for_nothing() -> None:
    def body() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="the cause"):
        spawn(body, ranks=3)
    assert time.monotonic() - begin < 60


def test_a_copy_does_not_destroy_what_its_parent_holds() -> None:
    """The end of a TCPStore joins its thread, which the copy of a process does not have."""

    def body() -> list[Any]:
        imece.init(backend="gloo")
        collected = gc.collect() >= 0
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return [collected, tensor.item()]

    gc.disable()
    try:
        for _ in range(5):
            holder: dict[str, Any] = {"store": serve(listen())}
            holder["cycle"] = holder
        del holder  # garbage now, which the next collection finds: in the rank, if it may
        assert spawn(body, ranks=2, timeout_s=20) == [[True, 2.0]] * 2
    finally:
        gc.enable()


class Cycle:
    """Garbage that goes to file descriptor `told` by itself, and says there in which process."""

    def __init__(self, told: int) -> None:
        self.me, self.told = self, told

    def __del__(self) -> None:
        os.write(self.told, b"%d\n" % os.getpid())


garbage_at_fork: list[int] = []  # descriptors
os.register_at_fork(before=lambda: [Cycle(told) for told in garbage_at_fork])


def test_a_copy_does_not_destroy_garbage_of_its_parent() -> None:
    """Not even before it runs anything of ours: its own first lines, or multiprocessing's, may collect."""

    def body() -> bool:
        return gc.isenabled()

    told, tell = os.pipe()
    thresholds = gc.get_threshold()
    gc.collect()
    garbage_at_fork.append(tell)
    gc.set_threshold(1, 1, 1)
    try:
        assert spawn(body, ranks=2, timeout_s=200) == [True, True]
    finally:
        garbage_at_fork.clear()
        gc.set_threshold(*thresholds)
    gc.collect()
    os.close(tell)
    with os.fdopen(told) as file:
        assert {int(line) for line in file} == {os.getpid()}
    assert gc.isenabled()


def test_a_copy_that_crashes_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        ctypes.string_at(0)

    with pytest.raises(RankFailedError, match=r"^rank 0 .* signal 11 \(SIGSEGV\), a segmentation fault$"):
        spawn(body, ranks=1, timeout_s=200)
    said = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in said and "in body" in said


def test_what_cannot_be_returned() -> None:
    with pytest.raises(RankFailedError, match="returned a set"):
        spawn(lambda: {1}, ranks=1, timeout_s=200)


def test_a_users_mistake_stays_one() -> None:
    def body() -> None:
        imece.init({"replicate": 3})

    with pytest.raises(UserError, match=r"^rank [01]: replicate 3 = 3 ranks, but the world has 2$"):
        spawn(body, ranks=2, timeout_s=200)


def test_more_ranks_than_may_have_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imece.system.open_files.allow_open_files", lambda: 30)
    with pytest.raises(UserError, match=r"^9 ranks need \d+ open files, and 30 are allowed \(ulimit -Hn\): "):
        spawn(is_never_called, ranks=9)


def test_in_a_process_that_may_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"a daemonic one of multiprocessing, .* with daemon=False$"):
        spawn(is_never_called, ranks=1)


def is_never_called() -> None:
    raise AssertionError("no rank is to start")


def test_a_copy_of_a_process_that_has_asked_for_gpus() -> None:
    """torch tells that to the copy alone, which goes on as long as it needs none."""

    def body(uses: bool) -> int:
        torch.cuda._is_in_bad_fork = lambda: True
        if uses:
            torch.cuda.init()
        return 1

    assert spawn(body, (False,), ranks=1, timeout_s=200) == [1]
    told = (
        r"^rank 0: <function .*body.*> cannot be imported by .*is_available.*: move the function to a module$"
    )
    with pytest.raises(UserError, match=told):
        spawn(body, (True,), ranks=1, timeout_s=200)


@pytest.mark.parametrize(
    ("ranks", "timeout_s"),
    [(0, None), (-1, None), (True, None), (2.0, None), (9999, None), (2, 0), (2, -1), (2, float("nan"))],
)
def test_arguments_that_make_no_sense(ranks: Any, timeout_s: Any) -> None:
    with pytest.raises(UserError):
        spawn(lambda: None, ranks=ranks, timeout_s=timeout_s)


@pytest.mark.parametrize("args", [3, "abc", None, torch.ones(2)])
def test_arguments_that_are_no_list_of_them(args: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^args=.*: the arguments of a call are wanted, as in spawn\(fn, \(1,"
    ):
        spawn(int, args, ranks=2)


def test_what_is_no_function_and_variables_that_are_no_strings() -> None:
    script: Any = "train.py"
    with pytest.raises(TypeError, match=r"^fn='train.py': a function is wanted"):
        spawn(script, ranks=2)
    env: Any = {"SEED": 1}
    with pytest.raises(TypeError, match=r"^env=\{'SEED': 1\}: names and values of variables are strings"):
        spawn(lambda: None, ranks=2, env=env)


def test_a_limit_of_any_length() -> None:
    for timeout_s in (float("inf"), 1e30):
        assert spawn(lambda: 3, ranks=1, timeout_s=timeout_s) == [3]


def test_time_is_up() -> None:
    def body() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"])  # conftest.py looks whether it outlives the rank
        if os.environ["RANK"] != "1":
            time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="after 1 s, ranks 0, 2 still ran"):
        spawn(body, ranks=3, timeout_s=1)
    assert time.monotonic() - begin < 60


def test_a_rank_whose_child_lives_on_has_ended() -> None:
    def body() -> int:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        return 5

    assert spawn(body, ranks=2, timeout_s=200) == [5, 5]


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_stops_or_dies_amid_its_result(dies: bool) -> None:
    """What it started elsewhere may hold the pipe open, whose end would never come."""

    def rank() -> None:
        writer = sys._getframe(1).f_locals["writer"]
        os.write(writer.fileno(), b"\0\0\0\x64abc")
        if dies:
            if not os.fork():
                os.setsid()
                time.sleep(4)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    began = time.monotonic()
    what, said = (RankFailedError, "killed by signal 9") if dies else (TimeoutError, "rank 0 still ran")
    with pytest.raises(what, match=said):
        spawn(rank, ranks=1, timeout_s=1)
    assert time.monotonic() - began < 3.5


def test_large_results() -> None:
    results = spawn(lambda: torch.arange(3_000_000), ranks=2, timeout_s=200)
    assert all(torch.equal(each, torch.arange(3_000_000)) for each in results)


def test_only_loopback_is_listened_on() -> None:
    def body() -> list[str]:
        imece.init(backend="gloo")
        dist.all_reduce(torch.ones(1))
        processes = [psutil.Process(), psutil.Process(os.getppid())]
        return [c.laddr.ip for p in processes for c in p.net_connections("tcp") if c.status == "LISTEN"]

    for addresses in spawn(body, ranks=2, timeout_s=200):
        assert len(addresses) >= 2, "Gloo and the store both listen"
        assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_ten_jobs_at_once_never_meet() -> None:
    """Ten parents, each a process of its own, as ten notebooks would be."""

    def body(number: int) -> list[int]:
        imece.init(backend="gloo")
        all_of_us = torch.empty(2, dtype=torch.long)
        dist.all_gather_into_tensor(all_of_us, torch.tensor([number]))
        return [int(each) for each in all_of_us]

    def job() -> list[list[int]]:
        return spawn(body, (int(os.environ["RANK"]),), ranks=2, timeout_s=200)

    assert spawn(job, ranks=10, timeout_s=200) == [[[number, number]] * 2 for number in range(10)]


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import imece, os, time\n"
        "def main():\n"
        "    imece.spawn(lambda: (os.write(1, b'%d\\n' % os.getpid()), time.sleep(1000)), ranks=2)\n"
        "main()\n"
    )
    with Launcher("--ranks", "1", script) as launcher:
        deadline = time.monotonic() + 60
        while launcher.out().count("\n") < 2:
            assert time.monotonic() < deadline, launcher.err()
            time.sleep(0.02)
        pids = [int(line.split()[-1]) for line in launcher.out().splitlines()]
        parent = psutil.Process(pids[0]).ppid()
        os.kill(parent, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            assert time.monotonic() < deadline, "ranks outlived their parent"
            time.sleep(0.02)
        assert launcher.wait().status == 128 + signal.SIGKILL
