"""What belongs to a step besides tensors, after a death: of one rank, the others and the engine played."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from imece.data_parallel.sharded import ShardedDataParallel
from imece.membership import recovery as recoveries
from imece.membership.borders import Borders
from imece.membership.recovery import Recovery
from imece.membership.states import packed


class Alone:
    """A Recovery of a sharded model in which nobody has copies, and what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fallback: int) -> None:
        self.state: dict[str, Any] = {"rate": 0.25, "seen": [1]}
        self.taken: list[dict[str, Any]] = []
        self.steps_when_resilient: list[int] = []
        monkeypatch.setattr(recoveries, "gather_json", lambda mine, *_: [mine])
        monkeypatch.setattr(recoveries, "Needs", mock.Mock())
        made = self.recovery = Recovery.__new__(Recovery)
        made.member, made._copies = mock.Mock(steps=0, generation=1), mock.Mock()
        made._copies.recovered.return_value = None
        made._copies.exchange.return_value = ""
        made.member.move.return_value.leaving = ()
        made.member.goes_on = lambda: self.steps_when_resilient.append(made.member.steps)
        made._model, made._sharded = mock.Mock(), True
        made._model.__class__ = ShardedDataParallel  # type: ignore[assignment]
        made._model.sharding.groups.shard.size.return_value = 1
        made._training_state, made._optimizers, made._borders = mock.Mock(), [], Borders()
        made._state, made._take = lambda: self.state, self.taken.append
        made._fallback, made._patience_s = lambda: fallback, 1.0
        made._states, made._again, made.without_copies, made._block = {}, None, "", None


def test_a_step_s_state_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch, fallback=4)
    alone.recovery.note_state(3)
    alone.state["seen"].append(2)
    assert alone.recovery._states == {"3": packed({"rate": 0.25, "seen": [1]})}


def test_after_a_checkpoint_a_rank_that_joins_gets_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch, fallback=4)
    alone.recovery._states = {"7": packed({"rate": 0.5})}
    assert alone.recovery._take_over(7) == (4, 3)
    assert alone.taken == [alone.state], "of the rank that was furthest, as the checkpoint left it"
    assert alone.recovery._states == {"4": packed(alone.state)}, "for whoever joins before a step is made"


def test_resilient_before_the_launcher_counts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch, fallback=4)
    assert alone.recovery.recover(None, -1).step == 4
    assert alone.recovery.member.steps == 4 and alone.steps_when_resilient == [0]
