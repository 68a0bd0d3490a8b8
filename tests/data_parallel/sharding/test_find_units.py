"""Which modules of a model are units, and which unit each parameter belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from imece.data_parallel.sharding.gathering import GatherOptions
from imece.data_parallel.sharding.units import find_units, unit_numbers
from tests.data_parallel.sharding.blocks import (
    WIDTH,
    Block,
    Small,
    Twice,
)


def names_of(model: nn.Module, wanted: Any = None) -> list[str]:
    return [unit.name for unit in find_units(model, wanted)]


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=3)


def test_repeated_blocks_are_units() -> None:
    assert names_of(Small()) == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    two = nn.ModuleDict({"left": Small(), "right": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Small())})
    found = names_of(two)
    assert len(found) == 9 and found[1] == "left.blocks.0" and found[-1] == "right.2.blocks.3"
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))  # nobody calls a list
    assert names_of(stages) == ["", "0.0", "0.1", "1.0", "1.1"]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2))
    assert names_of(mixed) == [""], "its children are of different classes"
    frozen = Small()
    frozen.blocks[2].requires_grad_(False)
    assert names_of(frozen) == names_of(Small())
    shared = Block()
    assert names_of(nn.Sequential(shared, shared)) == ["", "0"]


def test_units_by_class() -> None:
    assert names_of(Small(), (nn.LayerNorm, nn.Embedding)) == [
        "",
        "embed",
        *(f"blocks.{n}.norm" for n in range(4)),
    ]
    assert names_of(Small(), (Block, nn.Linear)) == ["", "first", *(f"blocks.{n}" for n in range(4)), "head"]
    assert names_of(attention(), (nn.Linear,)) == ["", "linear1", "linear2"]
    with pytest.raises(ValueError, match=r"units=\(Conv2d\): the model has no such module"):
        find_units(Small(), (nn.Conv2d,))


def test_units_by_size() -> None:
    block = sum(each.numel() for each in Block().parameters())
    assert names_of(Small(), block) == ["", *(f"blocks.{n}" for n in range(4))]
    assert names_of(Small(), block + 1) == [""]
    linear = WIDTH * (2 * WIDTH + 1)
    assert names_of(Small(), linear)[:3] == ["", "blocks.0.up", "blocks.0.down"]
    # Attention takes the weight of its out_proj, and calls it never.
    assert names_of(attention(), 1) == ["", "self_attn", "linear1", "linear2", "norm1", "norm2"]
    assert names_of(attention(), 4 * 8 * (8 + 1)) == ["", "self_attn"], "with its out_proj it has so many"
    assert names_of(attention(), 4 * 8 * (8 + 1) + 1) == [""]
    with pytest.raises(ValueError, match="units=0"):
        find_units(Small(), 0)


@pytest.mark.parametrize("wrong", ["Block", ("Block",), (Block, str), 2.5, True, (Block(),)])
def test_units_are_classes_or_a_number(wrong: Any) -> None:
    """Asked before any rank waits, and where nothing is gathered too: the script may run elsewhere next."""
    for ask in (GatherOptions, lambda units: find_units(Small(), units)):
        with pytest.raises(TypeError, match="units: a tuple of classes of modules, or a number"):
            ask(wrong)
    with pytest.raises(TypeError, match=r"units=Block: a tuple of classes, \(Block,\)"):
        GatherOptions(Block)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="units=0"):
        GatherOptions(0)


def test_which_unit_has_a_parameter() -> None:
    def numbers(model: nn.Module, wanted: Any = None) -> dict[str, int]:
        named = dict(model.named_parameters())
        return dict(zip(named, unit_numbers(model, find_units(model, wanted), named.values()), strict=True))

    found = numbers(Small())
    assert found["embed.weight"] == found["head.weight"] == 0
    assert found["blocks.0.up.weight"] == 1 and found["blocks.3.norm.bias"] == 4
    found = numbers(Twice())
    assert found["blocks.0.down.weight"] == 0, "several blocks have it"
    assert found["blocks.0.down.bias"] == 1
    shared = Block()
    assert set(numbers(nn.Sequential(shared, shared)).values()) == {1}
    block = sum(each.numel() for each in Block().parameters())
    inner = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, block // WIDTH))
    nested = numbers(nn.Sequential(inner, nn.Tanh()), block)
    assert nested["0.0.up.weight"] == 1 and nested["0.1.weight"] == 0 and nested["0.2.weight"] == 2


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"in_flight": 0}, ValueError, "gathers_in_flight is 0"),
        ({"in_flight": "2"}, TypeError, "gathers_in_flight='2': a whole number"),
        ({"reshard_after_forward": 4}, TypeError, "reshard_after_forward=4: True or False"),
        ({"always": "no"}, TypeError, "gather='no': True or False"),
    ],
)
def test_how_to_gather_is_checked(wrong: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        GatherOptions(**wrong)


class Expert(Block):
    """Runs on some of the tokens."""


class Mixture(nn.Module):
    """Experts by one of two signs: the name of their list, or of their class."""

    def __init__(self, inside: nn.Module | None = None, **lists: type[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        for name, kind in lists.items():
            self.add_module(name, nn.ModuleList(kind() for _ in range(4)))
        if inside is not None:
            self.inside = inside


def test_experts_are_no_units_as_each_rank_may_run_others() -> None:
    for lists in ({"experts": Block}, {"mlps": Expert}):
        assert names_of(Mixture(**lists)) == [""]
        two = nn.ModuleDict({"first": Mixture(**lists), "head": nn.Linear(2, 2), "last": Mixture(**lists)})
        assert names_of(two) == ["", "first", "last"]
        blocks = nn.ModuleList(Mixture(**lists) for _ in range(2))
        assert names_of(blocks) == ["", "0", "1"]
        mixed = nn.ModuleList([Block(), nn.Sequential(Mixture(**lists), nn.Linear(2, 2))])
        assert names_of(mixed) == ["", "1.0"]
        assert names_of(Mixture(Small(), **lists))[1:] == [f"inside.blocks.{at}" for at in range(4)]
    assert names_of(Mixture(mlps=Block))[1:] == [f"mlps.{at}" for at in range(4)], "nobody says what they are"
    assert len(names_of(Mixture(experts=Block), (Block,))) == 5, "wanted so"
