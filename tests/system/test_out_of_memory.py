"""Whether the kernel has ended a process for want of memory, by both versions of control groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from imece.system import control_groups, out_of_memory
from imece.system.out_of_memory import Killer, preference

Count = Callable[[int, int | None], None]


@pytest.fixture(params=["one/memory.events", "memory/one/memory.oom_control"])
def count(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Count:
    """Sets how many have been killed in the group, and on the machine (None: it does not show that)."""
    v2 = request.param.endswith("events")
    (tmp_path / "proc").write_text("0::/one\n" if v2 else "4:memory:/one\n0::/\n")
    monkeypatch.setattr(control_groups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(control_groups, "_TREES", tmp_path)
    monkeypatch.setattr(out_of_memory, "_VMSTAT", tmp_path / "vmstat")
    file = tmp_path / request.param
    file.parent.mkdir(parents=True)

    def say(here: int, machine: int | None) -> None:
        before = "low 0\nhigh 0\nmax 7\noom 3\n" if v2 else "oom_kill_disable 0\nunder_oom 0\n"
        file.write_text(f"{before}oom_kill {here}\n")
        shown = "" if machine is None else f"oom_kill {machine}\n"
        (tmp_path / "vmstat").write_text(f"nr_free_pages 17\n{shown}drop_pagecache 5\n")

    return say


def test_each_kill_counts_once(count: Count) -> None:
    count(2, 5)
    killer = Killer()
    assert killer.struck() is False
    count(3, 6)
    assert killer.struck() is True and killer.struck() is False


def test_a_kill_elsewhere_may_have_been_ours(count: Count) -> None:
    count(2, 5)
    killer = Killer()
    count(2, 6)
    assert killer.struck() is None and killer.struck() is False


def test_a_machine_that_shows_nothing(count: Count) -> None:
    count(2, None)
    killer = Killer()
    assert killer.struck() is None
    count(3, None)
    assert killer.struck() is True


@pytest.mark.parametrize(
    ("own", "total", "preferred"),
    [("0", 64 << 30, "4"), ("0", 512 << 20, "500"), ("-1000", 64 << 30, "-996"), ("900", 512 << 20, "1000")],
)
def test_children_are_taken_before_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, total: int, preferred: str
) -> None:
    monkeypatch.setattr(out_of_memory, "_PREFERENCE", tmp_path / "oom_score_adj")
    monkeypatch.setattr(control_groups, "limits", list)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    assert preference() == "", "a system without it"
    (tmp_path / "oom_score_adj").write_text(f"{own}\n")
    assert preference() == preferred


def test_a_child_writes_it() -> None:
    code = (
        "from imece.system.out_of_memory import preference, take_first\n"
        "take_first(wanted := preference())\n"
        "print(wanted == open('/proc/self/oom_score_adj').read().strip() != '0')"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=-1, text=True).stdout == "True\n"
