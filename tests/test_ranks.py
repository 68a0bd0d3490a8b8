"""The helper of multi-process tests fails when it should: nobody else would notice if it did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks, start_ranks

ROOT = Path(__file__).parent.parent


def what_a_rank_sees(word: str) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    seen: dict[str, object] = {name: int(os.environ[name]) for name in names}
    return seen | {"word": word, "host": os.environ.get("IMECE_HOST"), "extra": os.environ.get("EXTRA")}


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


def test_results_come_back_by_rank() -> None:
    results = run_ranks(
        what_a_rank_sees,
        3,
        args=("hi",),
        backend=None,
        env=lambda rank: {"EXTRA": str(rank)},
        ranks_per_host=2,
    )
    assert [r["RANK"] for r in results] == [0, 1, 2]
    assert [r["LOCAL_RANK"] for r in results] == [0, 1, 0]
    assert [r["LOCAL_WORLD_SIZE"] for r in results] == [2, 2, 1]
    assert [r["GROUP_RANK"] for r in results] == [0, 0, 1]
    assert [r["host"] for r in results] == ["host0", "host0", "host1"]
    assert [r["extra"] for r in results] == ["0", "1", "2"]
    assert all(r["WORLD_SIZE"] == 3 and r["OMP_NUM_THREADS"] == 1 and r["word"] == "hi" for r in results)


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
    assert time.monotonic() - began < 20
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
    assert time.monotonic() - began < 30  # the hanging rank would take 60


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


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from tests.ranks import start_ranks\n"
        "from tests.test_ranks import hang_in_here\n"
        "ranks = start_ranks(hang_in_here, 2, args=(60,))\n"
        "ranks.wait_entered()\n"
        "print(*ranks.pids, flush=True)\n"
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
        assert len(pids) == 2
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


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    name = f"imece-test-{os.getpid()}"
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_leaks.py").write_text(
        "import pathlib, subprocess\n"
        f"def test_shm(): pathlib.Path('/dev/shm/{name}').write_text('left')\n"
        "def test_orphan(): subprocess.run('sleep 20 >/dev/null 2>&1 & echo $! > orphan', shell=True)\n"
        "def test_zombie(): globals().update(kept=subprocess.Popen(['true']))\n"
        "def test_clean(): subprocess.run(['true'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    finally:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
        os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)
    assert f"left in /dev/shm: {name}" in done.stdout
    assert done.stdout.count("processes left behind") >= 2
    assert "4 passed, 3 errors" in done.stdout
