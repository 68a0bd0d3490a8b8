"""Recovery of everything but tensors after a death: one real rank, stand-ins for others and the engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.errors import CollectiveError, PeerLostError
from imece.membership import recovery as recoveries
from imece.membership.aborting import Aborting
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
        made._model = made._sharded = mock.Mock()
        made._model.sharding.groups.shard.size.return_value = 1
        made._model.process_group.size.return_value = 1
        made._model.module.parameters.return_value = made._model.frozen_names = []
        made._training_state, made._optimizers, made._borders = mock.Mock(), [], Borders()
        made._state, made._take = lambda: self.state, self.taken.append
        made._fallback = lambda: fallback
        made._has_frozen = False
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


def test_one_that_is_alone_has_no_peer_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no copy since it is: back at the last one, all that it has learned alone would be undone."""
    alone = Alone(monkeypatch, fallback=4)
    error = RuntimeError("GET s3://data/part-7: Connection reset by peer")
    with pytest.raises(RuntimeError) as raised:
        alone.recovery.recover(error, 7)
    assert raised.value is error
    alone.recovery.member.move.assert_not_called()  # type: ignore[attr-defined]


def test_what_follows_an_abort_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no number, which could mean anything."""
    recovery = Alone(monkeypatch, fallback=4).recovery
    recovery.member.aborting = Aborting()
    recovery.member.newest = 1  # type: ignore[misc]
    recovery._borders.begin(4)
    failed = RuntimeError("CUDA error: operation failed")
    assert (
        recovery._patience(dist.DistBackendError("NCCL communicator was aborted on rank 1."))
        == recoveries._PATIENCE_S
    )
    with pytest.raises(RuntimeError, match="operation failed"):
        recovery._patience(failed)
    recovery.member.aborting._aborted = True
    assert recovery._patience(failed) == recoveries._PATIENCE_S
    recovery._asked, recovery._fits, recovery.without_copies = False, True, "none"
    recovery._model.device = torch.device("cpu")
    monkeypatch.setattr(ops, "all_reduce", lambda numbers, *_, **__: numbers.fill_(math.nan))
    with pytest.raises(PeerLostError):
        recovery.meet(4, anyway=True)


def test_a_border_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the last one: what still comes is not protected any more."""
    recovery = Alone(monkeypatch, fallback=4).recovery
    recovery.member.aborting = Aborting()
    recovery._borders.begin(4)
    recovery._asked, recovery._fits, recovery.without_copies = True, True, "none"
    recovery._model.device = torch.device("cuda")
    recovery._model.process_group = SimpleNamespace(  # type: ignore[assignment]
        _device_types=[torch.device("cpu"), torch.device("cuda")]
    )
    recovery.member.newest = 1  # type: ignore[misc]
    waits, said = list[int](), list[str]()
    gpu = SimpleNamespace(synchronize=lambda: waits.append(len(said)))
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    monkeypatch.setattr(ops, "all_reduce", lambda numbers, *_, **__: said.append(numbers.device.type))
    recovery.meet(4, anyway=False)
    recovery.meet(5, anyway=True)
    assert said == ["cpu", "cpu"] and waits == [1]


def test_nobody_goes_on_with_what_another_death_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers came over a GPU, which has not yet been there when the rank asks; and copies over none."""
    recovery = Alone(monkeypatch, fallback=4).recovery
    recovery.member.aborting = watched = Aborting()
    gpu: Any = SimpleNamespace(synchronize=lambda: setattr(watched, "_aborted", True))
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    recovery._model.device = torch.device("cuda")
    with pytest.raises(PeerLostError):
        recovery._take_over(7)
    watched.begin()
    gpu.synchronize = lambda: None
    assert recovery._take_over(7) == (4, 3)


def test_one_that_is_alone_makes_a_copy_before_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it did not come to the border: a group that it made there was superseded."""
    alone = Alone(monkeypatch, fallback=4)
    alone.recovery.member.steps = 7
    alone.recovery.recover(CollectiveError("generation 5 is over: a newer one is there"), 7)
    copied = alone.recovery._copies.exchange.call_args_list  # type: ignore[attr-defined]
    assert [call.args[0] for call in copied] == [7, 4]


def test_state_is_kept_for_as_long_as_copies_may_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has finished step 7 asks for new copies, all finish step 8, and then one dies."""
    alone = Alone(monkeypatch, fallback=4)
    for step in range(5, 9):
        alone.state["rate"] = step / 8
        alone.recovery.finished(step)
    alone.recovery._copies.recovered.return_value = 6, mock.Mock()  # type: ignore[attr-defined]
    monkeypatch.setattr("imece.collectives.ops.barrier", mock.Mock())
    assert alone.recovery._take_over(8) == (6, 2)
    assert alone.taken == [{"rate": 0.75, "seen": [1]}]


def test_state_is_kept_until_there_are_new_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, which alone had finished step 7, is gone before there are any: back to step 6."""
    alone = Alone(monkeypatch, fallback=4)
    alone.recovery._states = {"6": packed({"rate": 0.75}), "7": packed({"rate": 0.875})}
    monkeypatch.setattr("imece.collectives.ops.barrier", mock.Mock())
    copies = alone.recovery._copies
    copies.recovered.side_effect = [(7, mock.Mock()), (6, mock.Mock())]  # type: ignore[attr-defined]
    copies.exchange.side_effect = [PeerLostError("rank 0 is gone"), ""]  # type: ignore[attr-defined]
    with pytest.raises(PeerLostError):
        alone.recovery._take_over(7)
    assert alone.recovery._take_over(7) == (6, 1)
    assert alone.taken == [{"rate": 0.875}, {"rate": 0.75}]
    assert alone.recovery._states == {"6": packed({"rate": 0.75})}
