"""Which plans are refused and with which messages, without ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from imece.errors import UserError
from imece.model_parallel.plan import planned
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

CONFIG = TransformerConfig(
    vocab_size=32, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, max_seq=16, head_norms=True
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head.weight = self.embed.weight


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Adapted(nn.Module):
    """As peft's layers are made."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)


def kinds(model: nn.Module, **options: object) -> dict[str, str]:
    arguments: dict[str, object] = {"plan": None, "ranks": 2, "sequence": False} | options
    return {name: kind for name, (_, kind) in planned(model, **arguments).items()}  # type: ignore[arg-type]


def test_of_the_transformer() -> None:
    found = kinds(Transformer(CONFIG))
    assert found["blocks.1.attention.k"] == "column" and found["blocks.0.mlp.down"] == "row"
    assert found["blocks.0.attention.q_norm"] == "heads"
    assert found["embed"] == found["head"] == "vocab"
    assert "norm" not in found and len(found) == 2 * (7 + 2) + 2
    assert kinds(Transformer(CONFIG), sequence=True)["blocks.1.mlp.norm"] == "sequence"


def test_a_vocabulary_that_cannot_be_divided_stays_whole() -> None:
    odd = Transformer(replace(CONFIG, vocab_size=33))
    assert not {"embed", "head"} & kinds(odd).keys()
    found = kinds(odd, sequence=True)
    assert (found["embed"], found["head"]) == ("scatter", "gather")


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (Transformer(CONFIG), {"ranks": 3}, "heads 4 and kv_heads 2 cannot be divided among the 3 ranks"),
        (
            Transformer(CONFIG),
            {"ranks": 4},
            "kv_heads 2 cannot be divided among the 4 ranks of the axis tensor",
        ),
        (
            Transformer(replace(CONFIG, vocab_size=33, tied_head=True)),
            {"sequence": True},
            "vocab_size 33 cannot be divided among 2 ranks, and the embedding is the head too: take 34",
        ),
        (nn.Linear(4, 4), {}, "no plan is known for a Linear: give tensor_parallel a plan"),
        (Tied(), {"plan": {"up": "column"}}, "no module of Tied is called 'up'; it has embed, mid, head,"),
        (Tied(), {"plan": {"mid": "colwise"}}, "'mid' is to be 'colwise'; there are column, row, vocab"),
        (Tied(), {"plan": {"norm": "row"}}, "norm is to be 'row', but this LayerNorm is no Linear"),
        (Tied(), {"plan": {"norm": "vocab"}}, "this LayerNorm is no Linear or Embedding"),
        (Tied(), {"plan": {"norm": "sequence"}, "sequence": True}, "nothing is divided"),
        (Tied(), {"plan": {"norm": "sequence"}}, "nothing is divided"),
        (
            Tied(),
            {"plan": {"embed": "vocab"}},
            "embed.weight is divided along dim 0 and head.weight stays whole, and they are one tied",
        ),
        (
            nn.ModuleDict({"q": Adapted()}),
            {"plan": {"q": "column"}},
            r"q has an adapter beside it \(tests\), .* merge them before .*, or train them without",
        ),
        (Tied(), {"plan": {"m*": "column", "mid": "row"}}, "mid is to be both 'column' and 'row'"),
        (
            Tied(),
            {"plan": {"mid": "column"}, "ranks": 3},
            r"mid.weight \[4, 4\] is to be 'column', but 4 cannot be divided among the 3 ranks",
        ),
        (
            nn.ModuleDict({"a": Scaled(4, 4)}),
            {"plan": {"a": "row"}},
            "this Scaled has a forward of its own, which may do more than multiply",
        ),
        (
            nn.ModuleDict({"a": weight_norm(nn.Linear(4, 4))}),
            {"plan": {"a": "column"}},
            "makes its parameters of others",
        ),
        (
            nn.ModuleDict({"a": nn.Embedding(4, 4, max_norm=1.0)}),
            {"plan": {"a": "vocab"}},
            "has max_norm or scale_grad_by_freq",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(model: nn.Module, options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        kinds(model, **options)


@pytest.mark.parametrize(
    ("name", "warns"), [("c_attn", True), ("qkv_proj", True), ("query_key_value", False)]
)
def test_several_matrices_in_one_are_warned_of(name: str, warns: bool) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({name: nn.Linear(4, 12)})})
    with warnings.catch_warnings(record=True) as said:
        kinds(model, plan={"block.*": "column"})
    assert len(said) == warns
    assert not warns or f"block.{name} is 'column', and by its name several matrices" in str(said[0].message)


def test_what_is_tied_is_divided_in_both_places() -> None:
    plan = {"embed": "vocab", "head": "vocab"}
    assert kinds(Tied(), plan=plan) == plan
