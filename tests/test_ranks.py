"""The helper of multi-process tests fails when it should: otherwise nobody would notice."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from imece.collectives import auto
from tests import _zygote_main, zygote
from tests.ranks import run_ranks, start_ranks, torchrun_variables

ROOT = Path(__file__).parent.parent
FORKED_AND_FRESH = pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="no zygotes there: every rank is fresh")


def what_a_rank_sees(word: str) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    seen: dict[str, object] = {name: int(os.environ[name]) for name in names}
    maybe = ("IMECE_HOST", "IMECE_TEST_EXTRA", "IMECE_TEST_GONE", "CUDA_VISIBLE_DEVICES")
    return seen | {"word": word, **{name: os.environ.get(name) for name in maybe}}


def _is_shared(descriptor: str) -> bool:
    """Not listdir's own, which is gone, nor a library's own file, which libffi opens."""
    try:
        return ".so" not in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return False


def what_a_start_leaves_behind() -> dict[str, object]:
    """What a fork could share by accident with other ranks, or with the process that forked it."""
    me = psutil.Process()
    return {
        "random": random.random(),
        "numpy": np.random.random(),
        "hash": hash("a word"),
        "environment": sorted(os.environ),
        "torch": torch.initial_seed(),
        "torch threads": torch.get_num_threads(),
        "tasks": len(me.threads()),
        "files": [os.readlink(f"/proc/self/fd/{fd}").split("/")[-1] for fd in range(3)],
        "more files": [file for file in os.listdir("/proc/self/fd") if int(file) > 2 and _is_shared(file)],
        "arguments": len(sys.argv),
        "folder": os.getcwd(),
        "parent": me.ppid(),
        "process group": os.getpgid(0),
        "ctrl-c": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "children": len(me.children()),
        "tests": [name for name in sys.modules if name.startswith("tests.test_")],
    }


def what_torch_and_imece_read_at_their_import() -> list[object]:
    return [torch.get_num_threads(), dist.get_debug_level().name, auto.FORCED]


def sum_of_ranks(factor: int) -> list[float]:
    tensor = torch.full((2,), float((dist.get_rank() + 1) * factor))
    dist.all_reduce(tensor)
    return tensor.tolist()


def fail_on_rank_1(how: str) -> None:
    if os.environ["RANK"] != "1":
        return None
    print("last words of rank 1")
    if how == "raise":
        raise ValueError("the cause is here")
    if how == "exit":
        os._exit(0)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "not json":
        return object()  # type: ignore[return-value]
    raise AssertionError(how)


def raise_everywhere(text: str) -> None:
    raise ValueError(f"{text} on rank {os.environ['RANK']}")


def hang_in_here(seconds: float) -> None:
    time.sleep(seconds)


def hang_except_on_rank_0() -> None:
    if os.environ["RANK"] != "0":
        time.sleep(60)


def rank_1_fails_others_hang() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 went first")
    time.sleep(60)


def leave_work_for_the_end() -> None:
    atexit.register(print, "at the end")
    threading.Timer(0.1, print, ["of a thread"]).start()


def test_results_come_back_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMECE_TEST_GONE", "before")
    (before,) = run_ranks(what_a_rank_sees, 1, args=("hi",), backend=None)
    assert before["IMECE_TEST_GONE"] == "before"
    monkeypatch.delenv("IMECE_TEST_GONE")
    results = run_ranks(
        what_a_rank_sees,
        3,
        args=("hi",),
        backend=None,
        env=lambda rank: {"IMECE_TEST_EXTRA": str(rank)},
        ranks_per_host=2,
    )
    assert [r["RANK"] for r in results] == [0, 1, 2]
    assert [r["LOCAL_RANK"] for r in results] == [0, 1, 0]
    assert [r["LOCAL_WORLD_SIZE"] for r in results] == [2, 2, 1]
    assert [r["GROUP_RANK"] for r in results] == [0, 0, 1]
    assert [r["IMECE_HOST"] for r in results] == ["host0", "host0", "host1"]
    assert [r["IMECE_TEST_EXTRA"] for r in results] == ["0", "1", "2"]
    assert [r["IMECE_TEST_GONE"] for r in results] == [None] * 3
    assert [r["CUDA_VISIBLE_DEVICES"] for r in results] == [""] * 3  # `imece.init()` would take a GPU
    assert all(r["WORLD_SIZE"] == 3 and r["OMP_NUM_THREADS"] == 1 and r["word"] == "hi" for r in results)


@FORKED_AND_FRESH
def test_a_rank_shares_nothing_by_accident(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = run_ranks(what_a_start_leaves_behind, 2 if fresh else 4, backend=None, fresh=fresh)
    for name in ("random", "numpy", "torch"):
        assert len({rank.pop(name) for rank in ranks}) == len(ranks), name
    hashes = [rank.pop("hash") for rank in ranks]
    assert hashes[0] != hashes[1]  # not all differ: ranks 0 and 2 have one zygote
    for number, rank in enumerate(ranks):
        assert rank.pop("files") == ["null", f"{number}.output", f"{number}.output"]
    zero = ranks[0]
    assert all(rank == zero for rank in ranks)
    assert zero == {
        "environment": sorted(os.environ.keys() | torchrun_variables(0, 2, 0, None)),
        "torch threads": 1,
        "tasks": 1,
        "more files": [],
        "arguments": 3,
        "folder": str(tmp_path),
        "parent": os.getpid(),
        "process group": os.getpgid(0),
        "ctrl-c": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": 0,
        "children": 0,
        "tests": ["tests.test_ranks"],
    }


def test_a_fork_does_at_its_end_what_an_interpreter_does() -> None:
    with start_ranks(leave_work_for_the_end, 2) as ranks:
        results = ranks.wait(30)
    assert [(each.returncode, each.output) for each in results] == [(0, "of a thread\nat the end\n")] * 2


@pytest.mark.slow
def test_what_is_read_at_an_import_has_fresh_ranks() -> None:
    assert run_ranks(what_torch_and_imece_read_at_their_import, 1, backend=None) == [[1, "OFF", ""]]
    env = {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "INFO", "IMECE_SCHEDULE": "ring"}
    with pytest.warns(UserWarning, match=f"fresh ranks, as {', '.join(sorted(env))} may be read"):
        results = run_ranks(what_torch_and_imece_read_at_their_import, 1, backend=None, env=env)
    assert results == [[2, "INFO", "ring"]]


@LINUX
def test_zygotes_are_two_that_stay_and_have_no_threads() -> None:
    run_ranks(sum_of_ranks, 3, args=(1,), backend="gloo")
    pids = zygote.zygotes()
    assert len(pids) == 2
    assert [psutil.Process(pid).num_threads() for pid in pids] == [1, 1]
    assert [psutil.Process(pid).name() for pid in pids] == ["imece-zygote"] * 2
    run_ranks(sum_of_ranks, 1, args=(1,), backend="gloo")
    assert zygote.zygotes() == pids


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    plugins = pytestconfig.pluginmanager.get_plugins()
    (found,) = (p for p in plugins if getattr(p, "__file__", None) == str(ROOT / "tests" / "conftest.py"))
    return found


@pytest.mark.parametrize("seen", [None, "1,2"])
def test_tests_for_gpus_see_those_that_were_seen_and_have_fresh_ranks(
    seen: str | None, conftest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_SEEN_GPUS", seen)
    variables = torchrun_variables(0, 1, 0, None)
    assert zygote.reason_against(os.environ | variables) is None
    conftest._show_gpus(monkeypatch)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
    assert zygote.reason_against(os.environ | variables) == "CUDA_VISIBLE_DEVICES may be read at an import"


@LINUX
def test_what_looks_for_leftovers_sees_ranks_and_no_zygotes(conftest: Any) -> None:
    """Both have the same command: a rank is told from its zygote by its name."""
    with start_ranks(hang_in_here, 1, args=(60,)) as ranks:
        seen = {process.pid for process in conftest._processes()}
        assert set(ranks.pids) <= seen and zygote.zygotes() and not seen & set(zygote.zygotes())


def test_a_process_with_threads_is_no_zygote() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(AssertionError, match="the zygote has threads"):
            _zygote_main.assert_no_threads()
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@LINUX
def test_a_zygote_that_died_is_told_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").write_text("raise SystemExit(3)")
    with monkeypatch.context() as patch:
        patch.setattr(zygote, "_MAIN", tmp_path / "main.py")
        patch.setattr(zygote, "_zygotes", {})
        with pytest.raises(AssertionError, match="the process that forks ranks ended with status 3"):
            run_ranks(sum_of_ranks, 1, args=(1,), backend="gloo")
    run_ranks(sum_of_ranks, 1, args=(1,), backend="gloo")
    before = zygote.zygotes()
    os.kill(before[0], signal.SIGKILL)
    while before[0] in zygote.zygotes():
        time.sleep(0.01)
    run_ranks(sum_of_ranks, 1, args=(1,), backend="gloo")
    assert before[0] not in zygote.zygotes()


def test_the_group_is_open_around_the_function() -> None:
    assert run_ranks(sum_of_ranks, 2, args=(10,), backend="gloo") == [[30.0, 30.0]] * 2


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["ValueError: the cause is here", 'raise ValueError("the cause is here")']),
        ("exit", ["exit status 0 in the midst of the function"]),
        ("signal", ["ended by signal 11", "in fail_on_rank_1"]),
        ("not json", ["is not JSON serializable"]),
    ],
)
def test_one_failing_rank_fails_the_test_and_is_shown(how: str, expected: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_on_rank_1, 2, args=(how,), backend=None)
    text = str(caught.value)
    assert text.startswith("1 of 2 ranks failed (fail_on_rank_1")
    for part in [*expected, "--- rank 1:", "last words of rank 1"]:
        assert part in text
    assert "--- rank 0" not in text


def test_expect_wants_the_error_on_every_rank() -> None:
    errors = run_ranks(raise_everywhere, 2, args=("boom",), backend=None, expect="ValueError: boom")
    assert [f"on rank {rank}" in error for rank, error in enumerate(errors)] == [True, True]
    with pytest.raises(AssertionError, match="2 of 2 ranks did not raise 'bang'"):
        run_ranks(raise_everywhere, 2, args=("boom",), backend=None, expect="bang")
    with pytest.raises(AssertionError, match="1 of 2 ranks did not raise 'the cause'"):
        run_ranks(fail_on_rank_1, 2, args=("raise",), backend=None, expect="the cause")


def test_time_up_shows_the_stacks_then_kills_and_reaps() -> None:
    ranks = start_ranks(hang_in_here, 2, args=(60,))
    with ranks:
        ranks.wait_entered()
        ranks.kill(1, signal.SIGSTOP)  # a stopped rank can show nothing, and must go all the same
        began = time.monotonic()
        results = ranks.wait(0.5)
    assert time.monotonic() - began < 50
    assert [r.hung for r in results] == [True, True]
    assert "in hang_in_here" in results[0].report()
    assert results[0].returncode == -signal.SIGABRT
    assert results[1].returncode == -signal.SIGKILL
    assert not any(map(psutil.pid_exists, ranks.pids))


def test_run_ranks_fails_when_time_is_up() -> None:
    with pytest.raises(AssertionError, match="rank 1: still running when time was up"):
        run_ranks(hang_in_here, 2, args=(60,), backend=None, timeout_s=1.5)


def test_the_first_failure_ends_the_wait_and_is_shown_first() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="2 of 2 ranks failed") as caught:
        run_ranks(rank_1_fails_others_hang, 2, backend=None, after_failure_s=2)
    text = str(caught.value)
    assert text.index("rank 1 went first") < text.index("rank 0: still running when time was up")
    assert time.monotonic() - began < 50  # the hanging rank would take 60


@FORKED_AND_FRESH
def test_a_rank_may_be_killed_as_soon_as_it_has_a_number(fresh: bool) -> None:
    with start_ranks(hang_in_here, 1, args=(60,), fresh=fresh) as ranks:
        ranks.kill(0)
        (result,) = ranks.wait(30)
    # Whether it has entered by then depends on who gets a core first.
    assert (result.returncode, result.output) == (-signal.SIGKILL, "")


def test_no_rank_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="no rank ran"):
        run_ranks(what_a_rank_sees, 0, args=("hi",), backend=None)
    with pytest.raises(AssertionError, match=r"no rank ran(.|\n)*before the function was called"):
        run_ranks(what_a_rank_sees, 1, args=("hi",), backend="no such backend")


def test_a_local_function_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a module-level function"):
        run_ranks(lambda: None, 1, backend=None)


def test_a_killed_rank_is_told_from_the_others() -> None:
    with start_ranks(hang_except_on_rank_0, 2) as ranks:
        ranks.wait_entered()
        ranks.kill(1)
        results = ranks.wait(30)
        with pytest.raises(AssertionError, match="rank 1 had already ended"):
            ranks.kill(1)
    assert [r.returncode for r in results] == [0, -signal.SIGKILL]
    assert [r.ok for r in results] == [True, False]


@pytest.mark.slow
def test_ranks_and_zygotes_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from tests import zygote\n"
        "from tests.ranks import start_ranks\n"
        "from tests.test_ranks import hang_in_here\n"
        "both = [start_ranks(hang_in_here, 1, args=(60,), fresh=fresh) for fresh in (False, True)]\n"
        "for ranks in both:\n"
        "    ranks.wait_entered()\n"
        "print(*both[0].pids, *both[1].pids, *zygote.zygotes(), flush=True)\n"
        "time.sleep(60)\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = os.environ | {
        "PYTHONPATH": paths,
        "TMPDIR": str(tmp_path),
    }  # SIGKILL leaves the ranks' folder behind
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == (3 if sys.platform == "linux" else 2) and all(map(_lives, pids))
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 10
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, pids))


def _lives(pid: int) -> bool:
    """Whether the process runs. A zombie whose new parent has yet to reap it does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@LINUX
def test_half_a_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two zygotes the second does not answer in time; what the first forked is not left behind."""
    answer, asked = zygote._answer, []

    def answer_once(process: subprocess.Popen[bytes]) -> list[int]:
        asked.append(answer(process))
        if len(asked) == 2:  # nobody will know this one's number
            os.kill(asked[1][0], signal.SIGKILL)
            os.waitpid(asked[1][0], 0)
            raise AssertionError("late")
        return asked[0]

    monkeypatch.setattr(zygote, "_answer", answer_once)
    with pytest.raises(AssertionError, match="late"):
        start_ranks(hang_in_here, 2, args=(60,))
    assert not psutil.pid_exists(asked[0][0])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    assert "_GRACE_S = 20.0" in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace("_GRACE_S = 20.0", "_GRACE_S = 0.3"))
    (tmp_path / "test_leaks.py").write_text(
        "import os, pathlib, subprocess\n"
        "name = f'imece-test-{os.getpid()}'\n"
        "def test_shm(): pathlib.Path('/dev/shm', name).write_text('left')\n"
        "orphan = 'sleep 100 >/dev/null 2>&1 & echo $! > orphan; '\n"
        "begun = 'until grep -qax sleep.100. /proc/$!/cmdline; do :; done'\n"  # in exec it has no variables
        "def test_orphan(): subprocess.run(orphan + begun, shell=True)\n"
        "def test_zombie(): globals().update(kept=subprocess.Popen(['true']))\n"
        "def test_clean(): subprocess.run(['true'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    name = f"imece-test-{run.pid}"
    try:
        out, _ = run.communicate(timeout=200)
    finally:
        run.kill()
        (Path("/dev/shm") / name).unlink(missing_ok=True)
        if (tmp_path / "orphan").exists():
            os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)
    assert f"left in /dev/shm: {name}" in out
    assert out.count("processes left behind") >= 2
    assert "4 passed, 3 errors" in out
