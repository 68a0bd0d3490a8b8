"""How much memory of its device a rank reports."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch

from imece.train.watch.used_memory import UsedMemory
from tests.meshes import FakeMesh


def test_on_a_gpu_it_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the context and libraries, which torch does not count, and for which nobody looks in each step."""
    peak, free, now, looks = 300, 500, 100.0, 0

    def stats(_: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"peak": peak, "current": 1}},
            "reserved_bytes": {"all": {"peak": 999, "current": 400}},
        }

    def mem_get_info(_: torch.device) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return free, 1000

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    alone, shared = (UsedMemory(FakeMesh(device="cuda", backend=name)) for name in ("nccl", "gloo"))
    assert (alone.most_bytes(), shared.most_bytes(), looks) == (400, 300, 1)
    peak, free, now = 350, 450, now + 0.9
    assert (alone.most_bytes(), shared.most_bytes(), looks) == (450, 350, 1)
    now += 0.2
    assert (alone.most_bytes(), shared.most_bytes(), looks) == (500, 350, 2)


def test_on_a_cpu_it_is_what_the_process_has() -> None:
    found = UsedMemory(FakeMesh()).most_bytes()
    assert found == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
