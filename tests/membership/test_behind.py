"""A rank that is behind gets everything, however many tensors that is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import imece
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import ops, texts
from imece.errors import PeerLostError
from imece.membership.aborting import Aborting
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
        self.held["optimizer/blocks.1.weight/exp_avg"] = torch.full((2, 1), 1j, dtype=torch.complex128)
        self.loaded: dict[str, torch.Tensor] = {}

    def own(self) -> dict[str, torch.Tensor]:
        return self.held

    def load(self, pieces: Pieces, frozen: bool) -> None:
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


def test_what_was_aborted_on_its_way_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL leaves anything in the memory, and says nothing."""
    monkeypatch.setattr(ops, "all_gather", lambda out, mine, **_: out.copy_(mine))
    aborting = Aborting()
    monkeypatch.setattr(ops, "broadcast", lambda *_, **__: setattr(aborting, "_aborted", True))
    state, group = State(), cast(dist.ProcessGroup, Alone())
    with pytest.raises(PeerLostError):
        catch_up(cast(TrainingState, state), 0, True, group, torch.device("cpu"), check=aborting.check)
    assert not state.loaded


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_not_trained_travels_only_if_it_is_to(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = imece.init()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[1].parameters())
        wrapped = imece.DistributedDataParallel(model)
        wrapped(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        state, taken = TrainingState(wrapped, [optimizer]), list[str]()
        load = state.load

        def noting(pieces: Pieces, **how: bool) -> None:
            taken.extend(pieces.names())
            load(pieces, **how)

        monkeypatch.setattr(state, "load", noting)
        catch_up(state, 0, True, wrapped.process_group, wrapped.device, frozen=frozen)
        names = {name.removeprefix("model/") for name in taken if name.startswith("model/")}
        assert names == {"1.weight", "1.bias"} | ({"0.weight", "0.bias"} if frozen else set())
        assert "optimizer/1.weight/exp_avg" in taken
    finally:
        mesh.close()


def test_what_lies_in_another_order_in_memory() -> None:
    """torch's fused optimizers on CPUs pair elements by where they lie."""
    mesh = imece.init()
    try:
        model = torch.nn.Conv2d(3, 4, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        wrapped = imece.DistributedDataParallel(model)
        wrapped(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        kept = {key: each.clone() for key, each in optimizer.state[model.weight].items()}
        catch_up(TrainingState(wrapped, [optimizer]), 0, True, wrapped.process_group, wrapped.device)
        for key, each in optimizer.state[model.weight].items():
            assert torch.equal(each, kept[key]) and each.stride() == kept[key].stride(), key
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride() == (27, 1, 9, 3)
    finally:
        mesh.close()
