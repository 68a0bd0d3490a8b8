"""Memory limits of containers, jobs and units, found in both versions of cgroups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from imece.bench import here
from imece.collectives.shared_memory import cgroup, segment

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT = {V2: "max", V1: "9223372036854771712"}

Tell = Callable[[str], Path]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Makes /proc/self/cgroup say this, and returns the folder that stands for /sys/fs/cgroup."""

    def say(lines: str) -> Path:
        (tmp_path / "proc").write_text(lines)
        return tmp_path

    monkeypatch.setattr(cgroup, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroup, "_TREES", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=9000, available=8000))
    return say


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
    assert (segment.available_bytes(), cgroup.allowed_bytes()) == (600, 2000)
    group(job.parent, names, 3000, 2990, 100)  # other jobs
    assert (segment.available_bytes(), cgroup.allowed_bytes()) == (110, 2000)
    group(job, names, 1000, 1500, 100)  # lowered below what is in use
    assert segment.available_bytes() == 0


def test_without_a_limit_it_is_the_machine_s(tell: Tell, tmp_path: Path) -> None:
    for lines in ("", "0::/\n", "0::/not/seen/here\n", "9:cpu:/\n"):
        tell(lines)
        assert (segment.available_bytes(), cgroup.allowed_bytes()) == (8000, 9000)
    (tmp_path / "proc").unlink()
    assert (segment.available_bytes(), cgroup.allowed_bytes()) == (8000, 9000)


def test_a_container_that_shows_its_own_root_only(tell: Tell) -> None:
    """Docker with version 1: the path is that of the host."""
    group(tell("4:memory:/docker/0123\n") / "memory", V1, 1000, 300, 0)
    assert segment.available_bytes() == 700
