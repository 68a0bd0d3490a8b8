"""Which parameters any rank used: what ranks tell each other, and how rarely."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from imece.collectives import ops
from imece.data_parallel.reducing.used import Alike, Used


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    monkeypatch.setattr("imece.data_parallel.reducing.used.host_device", lambda *_: torch.device("cpu"))
    group: Any = None
    return Used(group, torch.device("cpu"), many=3)


def test_flags_move_only_when_they_change(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a GPU they wait for all that it has, at the end of each backward."""
    told: list[list[int]] = []
    moved: list[int] = []
    flags_of = torch.tensor

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        told.append(tensor.tolist()[:3])
        return tensor.fill_(9)

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        moved.append(len(told))
        return flags_of(*args, **options)

    monkeypatch.setattr(ops, "all_reduce", all_reduce)
    monkeypatch.setattr(torch, "tensor", noted)
    fired, nothing = array("i", [0, 0, 0]), array("i", [0, 0, 0])
    for now in ([1, 0, 0], [1, 0, 0], [2, 1, 0], [1, 0, 0]):
        fired[:] = array("i", now)  # in place, as the reducer counts
        used.exchange(fired, nothing, Alike(), async_op=False)
    assert told == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]], "each step's own, whatever came of the last"
    assert moved == [0, 2, 3]


def test_used_in_a_backward_before_counts(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "all_reduce", lambda tensor, *_, **__: tensor)
    used.exchange(array("i", [0, 2, 0]), array("i", [1, 0, 0]), Alike(), async_op=False)
    assert used.wait(read=True)
    assert used.anywhere == [1, 1, 0]


def test_nothing_is_waited_for_where_nothing_was_exchanged(used: Used) -> None:
    used.begin()
    assert not used.wait(read=True)
