"""A copy on its way to another host, of which each rank keeps what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import imece
from imece.checkpoint.deal import Slice
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import ops
from imece.collectives.texts import gather_texts
from imece.data_parallel.sharded import ShardedDataParallel
from imece.errors import PeerLostError
from imece.membership import copies as copies_of
from imece.membership import streams
from imece.membership.aborting import Aborting
from imece.membership.copies import Copies, _Mapped, _Set
from imece.membership.copy import Copy
from imece.membership.needs import Needs
from imece.membership.offers import Handed
from imece.membership.pieces import Pieces
from imece.membership.streams import Receiver, Stream
from tests.checkpoint.test_eight_bit import Blocks
from tests.membership.agents import batch, network
from tests.ranks import run_ranks


class Moved:
    """A stream that has come, without ranks."""

    def __init__(self, copy: Copy) -> None:
        self.raw_table = copy.raw_table


@pytest.mark.parametrize("chunk_bytes", [64, 128, 1 << 20])
def test_what_is_needed_of_a_copy(chunk_bytes: int) -> None:
    whole, count = torch.arange(100, dtype=torch.float32), torch.tensor(7)
    held: dict[str, Tensor | Slice] = {
        "model/a": Slice(whole[20:90], (100,), 20),
        "model/half": Slice(whole[:3].bfloat16(), (2, 3), 3),
        "optimizer/a/step": count,
    }
    needs = {"model/a": (75, 100), "model/half": (0, 5), "optimizer/a/step": (0, 0)}
    copy = Copy.of(held)
    copy.write(4, held)
    some = Receiver(cast(Stream, Moved(copy)), lambda name, shape: needs[name])
    everything = Receiver(cast(Stream, Moved(copy)), None)
    for low in range(0, copy.slot_bytes, chunk_bytes):
        for receiver in (some, everything):
            receiver.take(low, copy.span(4, low, chunk_bytes).clone())
    pieces = Pieces()
    some.give(pieces)
    assert torch.equal(pieces.slice("model/a", 75, 90), whole[75:90])
    with pytest.raises(imece.errors.UserError, match="model/a: elements from 74 on"):
        pieces.slice("model/a", 74, 90)
    assert pieces.slice("model/half", 3, 5).tolist() == [0, 1] and pieces.shape("model/half") == (2, 3)
    assert pieces.names() == list(held) and pieces.dtype("optimizer/a/step") is torch.int64
    whole_copy = Pieces()
    everything.give(whole_copy)
    assert int(whole_copy.tensor("optimizer/a/step")) == 7
    assert torch.equal(whole_copy.slice("model/a", 20, 90), whole[20:90])
    copy.memory.close()


class Asked(Pieces):
    """Notes which elements were asked for."""

    def __init__(self, pieces: Pieces) -> None:
        vars(self).update(vars(pieces))
        self.elements: dict[str, tuple[int, int]] = {}

    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        if target.numel():
            assert self.elements.setdefault(name, (start, start + target.numel()))[0] == start
        super().fill(target, name, start)


class Known(nn.Identity):
    """Has an extra state."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


def is_found_again(state: TrainingState, optimizer: Optimizer) -> None:
    """What is copied after each step is looked for when it lies elsewhere, or has to be made."""
    own = state.own()
    assert (state.own() is own) is (type(optimizer) is AdamW), "Blocks keeps numbers"
    state.forget()
    assert state.own() is not own
    kept = next(iter(optimizer.state.values()))
    kept["late"] = torch.ones(2)
    assert any(name.endswith("/late") for name in state.own())
    for late in (torch.zeros(2), kept["late"].new_full((2,), 5.0)):
        kept["late"] = late
        found = next(each for name, each in state.own().items() if name.endswith("/late"))
        assert torch.equal(found if isinstance(found, Tensor) else found.tensor, late)
    kept["late"].data = torch.full((2,), 6.0)
    found = next(each for name, each in state.own().items() if name.endswith("/late"))
    assert (found if isinstance(found, Tensor) else found.tensor).tolist() == [6.0, 6.0]


def ask() -> list[int]:
    """How many tensors were needed, of each strategy and optimizer."""
    imece.init()
    counts = []
    kinds: list[Callable[..., Optimizer]] = [AdamW, Blocks]
    for kind in kinds:
        for strategy in ("zero1", "zero3"):
            plain = network()
            if kind is Blocks:
                plain = nn.Sequential(plain, Known())
            model, optimizer = imece.parallelize(plain, kind(plain.parameters()), strategy)
            inputs, targets = batch(0)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            assert isinstance(model, ShardedDataParallel)
            state, copies = TrainingState(model, [optimizer]), Copies(imece.init())
            assert copies.exchange(1, state.own()) == ""
            found = copies.recovered([copies.note()])
            assert found is not None
            needs, asked = Needs(model, [optimizer]), Asked(found[1])
            state.load(asked)
            wanted = {name: needs(name, asked.shape(name)) for name in asked.names()}
            wanted = {name: (start, stop) for name, (start, stop) in wanted.items() if start < stop}
            assert wanted == asked.elements, (kind, strategy)
            counts.append(len(wanted))
            is_found_again(state, optimizer)
            copies.drop()
    return counts


def test_what_is_needed_is_what_is_asked_for() -> None:
    first, second = run_ranks(ask, 2, backend=None)
    assert min(first) > 3 and min(second) > 3


def test_what_was_aborted_on_its_way_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies while a copy comes from another host: it is not read, nor kept for whoever leaves. How long
    it is, and what is in it, goes over the CPU, where a call that is aborted raises."""
    aborting, told = Aborting(), list[str]()

    def broadcast(tensor: Tensor, *_: Any, **__: Any) -> None:
        told.append(tensor.device.type)
        aborting._aborted |= tensor.is_meta

    group: Any = SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")], rank=lambda: 0, size=lambda: 2
    )
    mesh: Any = SimpleNamespace(world_group=group, hosts=((0,), (1,)), rank=0)
    copies, own = Copies(mesh, aborting.check), Copy.of({"model/a": torch.ones(4)})
    own.write(4, {"model/a": torch.ones(4)})
    copies._own, copies._made = own, 1
    copies._sets[1] = _Set(1, [0, 0], [_Mapped(own, 0, 0)])
    monkeypatch.setattr(ops, "broadcast", broadcast)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: None)  # to a device that is none
    note = copies.note()
    with pytest.raises(PeerLostError):
        copies.recovered([note], device=torch.device("meta"))
    assert told == ["cpu", "cpu", "meta"]
    monkeypatch.setattr(copies_of, "handed_over", lambda *_: [Handed(0, 0, 0)])
    with pytest.raises(PeerLostError):
        copies.hand_over(4, [1], torch.device("meta"))
    assert copies.note()["offers"] == note["offers"]
    own.memory.close()


def spread() -> bool:
    """What this host has no copies of comes from the other one, in several chunks for each copy."""
    mesh = imece.init()
    streams.CHUNK_BYTES = 256
    mine = {"model/a": Slice(torch.arange(300.0) + 300 * mesh.rank, (1200,), 300 * mesh.rank)}
    copies = Copies(mesh)
    assert copies.exchange(1, mine) == ""
    assert copies.write(2, mine)
    said = gather_texts([json.dumps(copies.note())], mesh.world_group, mesh.device)
    found = copies.recovered([json.loads(text) for (text,) in said])
    assert found is not None and found[0] == 2
    return torch.equal(found[1].tensor("model/a"), torch.arange(1200.0))


def test_copies_of_two_hosts() -> None:
    assert run_ranks(spread, 4, backend=None, ranks_per_host=2) == [True] * 4
