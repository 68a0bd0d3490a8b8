"""Who is behind gets everything, however many tensors that is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from imece.checkpoint.training_state import TrainingState
from imece.collectives import ops, texts
from imece.membership.behind import catch_up
from imece.membership.pieces import Pieces


class Alone:
    """The group of a single rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class State:
    """20 tensors; loads into `loaded`."""

    def __init__(self) -> None:
        self.held = {f"optimizer/blocks.{n}.weight/exp_avg": torch.full((2, n), float(n)) for n in range(20)}
        self.loaded: dict[str, torch.Tensor] = {}

    def own(self) -> dict[str, torch.Tensor]:
        return self.held

    def load(self, pieces: Pieces) -> None:
        self.loaded = {name: pieces.tensor(name) for name in pieces.names()}


def test_no_name_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(texts, "_MOST_BYTES", 200)
    monkeypatch.setattr(ops, "all_gather", lambda out, mine, **_: out.copy_(mine))
    monkeypatch.setattr(ops, "broadcast", broadcast)
    state = State()
    catch_up(cast(TrainingState, state), 0, True, cast(dist.ProcessGroup, Alone()), torch.device("cpu"))
    assert state.loaded.keys() == state.held.keys()
    assert all(torch.equal(state.loaded[name], each) for name, each in state.held.items())
