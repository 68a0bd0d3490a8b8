"""How a rank waits, tested without another rank."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imece.collectives.fingerprint import pack
from imece.collectives.shared_memory import SharedMemoryGroup, waiting
from imece.collectives.shared_memory.waiting import Operation, Patience
from imece.errors import CollectiveError, CollectiveTimeoutError
from tests.clock import Clock


def test_the_time_for_which_all_were_stopped_is_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `docker pause`, or when SLURM suspends a job."""
    clock = Clock(1000.0)
    monkeypatch.setattr(waiting, "time", clock)
    board: Any = SimpleNamespace(
        rank=0, crowded=True, others=[1], words=[[0] * 8] * 2, peers=[SimpleNamespace(pid=7)] * 2,
        names=[0, 1], bell=lambda: 0, sleep=lambda seen, limit_s: clock.sleep(limit_s), dead=list,
    )  # fmt: skip
    steps: Any = iter(())
    barrier = Operation(steps, pack("barrier", "", None, 0), lambda: "number 3", lambda: [1])
    patience = Patience(board, 60.0, hot=False)
    while clock.now < 1030:
        patience.wait([barrier])
    clock.sleep(3600)
    while clock.now < 4650:
        patience.wait([barrier])
    with pytest.raises(CollectiveTimeoutError, match="rank 0 waited 60 s for rank 1"):
        while clock.now < 4700:
            patience.wait([barrier])
    assert 4655 < clock.now < 4665


def test_a_call_begins_while_another_thread_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, one way or the other; it was queued for a worker that had ended."""
    group = SharedMemoryGroup(dist.HashStore(), 0, 1, timedelta(seconds=60))
    group.allreduce([torch.ones(3)]).wait()
    leaving, refused = threading.Thread(target=group.shutdown), group._runner._refused

    def left_meanwhile(finish: Any) -> bool:
        found = refused(finish)
        leaving.start()
        leaving.join(0.3)
        return found

    monkeypatch.setattr(group._runner, "_refused", left_meanwhile)
    try:
        group.allreduce([torch.ones(3)]).wait(timedelta(seconds=10))
    except CollectiveError as error:
        assert str(error) == "this group has been destroyed"
    leaving.join()
