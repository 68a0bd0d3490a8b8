"""The thread that records a step's times."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imece.data_parallel.reducing.trace import BucketTrace
from imece.data_parallel.reducing.watch import Watch


def test_it_asks_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0, where a context of each rank would take memory."""
    current, asked = threading.local(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))

    def done() -> bool:
        asked.append(getattr(current, "device", None))
        return True

    trace = BucketTrace(0, 4, 0.0, 0.0)
    bucket: Any = SimpleNamespace(work=SimpleNamespace(done=done))
    before = set(threading.enumerate())
    for device in (torch.device("cuda", 5), torch.device("cpu")):
        Watch(device).left(trace, bucket)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
    assert asked == [torch.device("cuda", 5), None] and trace.done_s > 0
