"""How many cores a process may use, as its control groups say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imece import cores
from imece.launch.processes import worker_environment


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /sys/fs/cgroup, of a machine with 64 cores."""
    monkeypatch.setattr(cores, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cores, "_TREES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(f"{text}\n")


def test_where_nothing_limits_them_it_is_those_it_may_run_on(trees: Path) -> None:
    assert cores.usable_cores() == 64
    (trees / "proc").write_text("4:memory:/pods/one\n9:cpuset,cpu:/pods/one\n0::/pods/one\n")
    assert cores.usable_cores() == 64
    write(trees / "pods/one", max="max 100000")
    write(trees / "cpu/pods/one", cfs_quota_us="-1", cfs_period_us="100000")
    assert cores.usable_cores() == 64


@pytest.mark.parametrize(("quota_us", "expected"), [(400_000, 4), (150_000, 1), (20_000, 1), (10**7, 64)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_a_group_or_of_one_above_it(
    trees: Path, version: int, quota_us: int, expected: int
) -> None:
    if version == 2:
        (trees / "proc").write_text("0::/pods/one\n")
        write(trees / "pods/one", max="max 100000")
        write(trees / "pods", max=f"{quota_us} 100000")
    else:
        (trees / "proc").write_text("4:memory:/\n3:cpu,cpuacct:/pods/one\n0::/\n")
        write(trees / "cpu/pods", cfs_quota_us=str(quota_us), cfs_period_us="100000")
    assert cores.usable_cores() == expected


def test_ranks_share_out_what_they_may_use(trees: Path) -> None:
    (trees / "proc").write_text("0::/\n")
    write(trees, max="800000 100000")
    assert worker_environment({}, 0, 2, 29500, "job")["OMP_NUM_THREADS"] == "4"
