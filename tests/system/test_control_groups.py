"""What containers, jobs and units allow: cores and memory, in both versions of control groups."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from imece.bench import here
from imece.collectives.shared_memory import segment
from imece.launch.environment import worker_environment
from imece.system import control_groups

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT = {V2: "max", V1: "9223372036854771712"}

Tell = Callable[[str], Path]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Makes /proc/self/cgroup say this, and returns the folder that stands for /sys/fs/cgroup, on a machine
    with 64 cores and 9,000 bytes."""

    def say(lines: str) -> Path:
        (tmp_path / "proc").write_text(lines)
        return tmp_path

    monkeypatch.setattr(control_groups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(control_groups, "_TREES", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=9000, available=8000))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return say


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(f"{text}\n")


def test_where_nothing_limits_them_cores_are_those_it_may_run_on(tell: Tell, tmp_path: Path) -> None:
    assert control_groups.usable_cores() == 64, "no control groups"
    trees = tell("4:memory:/pods/one\n9:cpuset,cpu:/pods/one\n0::/pods/one\n")
    assert control_groups.usable_cores() == 64
    write(trees / "pods/one", max="max 100000")
    write(trees / "cpu/pods/one", cfs_quota_us="-1", cfs_period_us="100000")
    assert control_groups.usable_cores() == 64


@pytest.mark.parametrize(("quota_us", "expected"), [(400_000, 4), (150_000, 1), (20_000, 1), (10**7, 64)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_a_group_or_of_one_above_it(
    tell: Tell, version: int, quota_us: int, expected: int
) -> None:
    if version == 2:
        trees = tell("0::/pods/one\n")
        write(trees / "pods/one", max="max 100000")
        write(trees / "pods", max=f"{quota_us} 100000")
    else:
        trees = tell("4:memory:/\n3:cpu,cpuacct:/pods/one\n0::/\n")
        write(trees / "cpu/pods", cfs_quota_us=str(quota_us), cfs_period_us="100000")
    assert control_groups.usable_cores() == expected


def test_ranks_share_out_the_cores_they_may_use(tell: Tell) -> None:
    write(tell("0::/\n"), max="800000 100000")
    assert worker_environment({}, 0, 2, 29500, "job")["OMP_NUM_THREADS"] == "4"


def group(folder: Path, names: tuple[str, str, str], most: object, used: int, unused: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(names, (most, used), strict=False):
        (folder / name).write_text(f"{content}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {unused}\n")


def test_what_was_read_of_files_is_not_in_use(tell: Tell) -> None:
    """A container that has read its data: the kernel drops that before it refuses memory."""
    group(tell("0::/\n"), V2, 1000, 990, 600)
    assert segment.available_bytes() == 610
    assert here._memory(2, SimpleNamespace(type="cpu")) == 500  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "tree", "names"),
    [
        ("0::/slurm/job_7/step_0\n", "", V2),
        ("9:cpu:/\n4:cpuset,memory:/slurm/job_7/step_0\n0::/\n", "memory", V1),
    ],
    ids=["v2", "v1"],
)
def test_the_least_of_all_groups_above_counts(
    lines: str, tree: str, names: tuple[str, str, str], tell: Tell
) -> None:
    job = tell(lines) / tree / "slurm" / "job_7"
    group(job / "step_0", names, NO_LIMIT[names], 500, 0)
    group(job, names, 2000, 1500, 100)
    group(job.parent, names, 3000, 1500, 100)
    assert (segment.available_bytes(), control_groups.allowed_bytes()) == (600, 2000)
    group(job.parent, names, 3000, 2990, 100)  # other jobs
    assert (segment.available_bytes(), control_groups.allowed_bytes()) == (110, 2000)
    group(job, names, 1000, 1500, 100)  # lowered below what is in use
    assert segment.available_bytes() == 0


def test_without_a_limit_it_is_the_machine_s(tell: Tell, tmp_path: Path) -> None:
    for lines in ("", "0::/\n", "0::/not/seen/here\n", "9:cpu:/\n"):
        tell(lines)
        assert (segment.available_bytes(), control_groups.allowed_bytes()) == (8000, 9000)
    (tmp_path / "proc").unlink()
    assert (segment.available_bytes(), control_groups.allowed_bytes()) == (8000, 9000)


def test_a_container_that_shows_its_own_root_only(tell: Tell) -> None:
    """Docker with version 1: the path is that of the host."""
    group(tell("4:memory:/docker/0123\n") / "memory", V1, 1000, 300, 0)
    assert segment.available_bytes() == 700


@pytest.mark.parametrize("version", [1, 2])
def test_how_many_more_threads_may_be_started(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    trees = tell("5:pids:/pods/one\n0::/\n" if version == 1 else "0::/pods/one\n")
    group = trees / ("pids/pods/one" if version == 1 else "pods/one")
    group.mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert control_groups.free_threads() is None
    (group / "pids.max").write_text("max\n")
    (group / "pids.current").write_text("30\n")
    assert control_groups.free_threads() is None
    (group / "pids.max").write_text("100\n")
    assert control_groups.free_threads() == 70


def test_a_limit_of_the_users_threads_counts_those_that_there_are(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    users = [(1000, 7), (1000, 3), (0, 90)]
    found = [
        SimpleNamespace(info={"uids": SimpleNamespace(real=user), "num_threads": count})
        for user, count in users
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: found)
    assert control_groups.free_threads() == 40
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert control_groups.free_threads() is None, "root has no such limit"
