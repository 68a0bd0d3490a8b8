"""A model is cut so that stages cost the same, and its parts keep the whole model's names."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from imece.model_parallel.cutting import Part, dealt_by, pieces_of
from imece.models.dealing import deal
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer


def config(**others: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "vocab_size": 11,
            "layers": 4,
            "width": 8,
            "heads": 2,
            "kv_heads": 1,
            "mlp_width": 16,
            "max_seq": 8,
        }
        | others
    )


def costliest(costs: list[float], dealt: list[range]) -> float:
    return max(sum(costs[at] for at in which) for which in dealt)


def test_the_costliest_stage_costs_as_little_as_can_be() -> None:
    draw = random.Random(0)
    for _ in range(200):
        costs = [draw.choice([1.0, 1.0, 2.5, 7.0, 0.0]) for _ in range(draw.randint(1, 8))]
        stages = draw.randint(1, len(costs))
        dealt = deal(costs, stages)
        assert [at for which in dealt for at in which] == list(range(len(costs)))
        assert len(dealt) == stages and all(dealt)
        every = itertools.combinations(range(1, len(costs)), stages - 1)
        assert costliest(costs, dealt) == min(
            costliest(costs, dealt_by(cuts, len(costs), stages)) for cuts in every
        )


def test_a_head_that_costs_like_blocks_counts_as_such() -> None:
    def cut(vocabulary: int) -> list[range]:
        return deal(pieces_of(Transformer(config(layers=6, vocab_size=vocabulary))).costs, 2)

    assert cut(2) == [range(3), range(3, 7)]
    block = pieces_of(Transformer(config())).costs[0]
    assert cut(round(4 * block / 8)) == [range(5), range(5, 7)]


def test_what_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ValueError, match="a model of 2 pieces cannot be cut into 3 stages"):
        deal([1.0, 1.0], 3)
    for cuts in ([], [0], [4], [1, 2]):
        with pytest.raises(ValueError, match="2 stages need 1 rising numbers from 1 to 3"):
            dealt_by(cuts, 4, 2)
    with pytest.raises(ValueError, match="rising"):
        dealt_by([2, 2], 4, 3)


def test_a_model_that_nobody_knows_how_to_cut() -> None:
    class Own(Transformer):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) * 2

    class Adding(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(x + self[0](x))

    class Named(nn.Sequential):
        """Only a name."""

    for model in (nn.Linear(2, 2), Own(config()), Adding(nn.Linear(2, 2), nn.Linear(2, 2))):
        own = "" if isinstance(model, nn.Linear) else " whose forward is its own"
        with pytest.raises(ValueError, match=f"^an? {type(model).__name__}{own} cannot be cut by itself"):
            pieces_of(model)
    for several in (Named(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])):
        assert list(pieces_of(several).named(range(2)).values()) == list(several)
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"parameter 2\.weight is that of 0 too"):
        pieces_of([shared, nn.ReLU(), shared])


@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_a_row_are_the_model_and_parts_keep_its_names(tied: bool) -> None:
    model = Transformer(config(tied_head=tied))
    pieces, tokens = pieces_of(model), torch.randint(11, (3, 7))
    dealt = dealt_by([1, 4], 5, 3)  # the last one is the head alone
    x = tokens
    for which in dealt:
        x = pieces.stage(which, (tokens,))(x)
    assert torch.equal(x, model(tokens))
    names = [set(Part(pieces.named(which)).state_dict()) for which in dealt]
    assert set.union(*names) == set(model.state_dict())
    assert (names[0] & names[2]) == ({"embed.weight"} if tied else set())
    assert "blocks.3.attention.q.weight" in names[1]


def test_a_sequence_keeps_the_names_of_its_children() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 3))
    model.add_module("second", nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    pieces = pieces_of(model)
    assert pieces.costs == [9.0, 12.0]
    assert list(Part(pieces.named(range(1, 2))).state_dict()) == ["second.0.weight", "second.0.bias"]
    x = torch.randn(4, 2)
    assert torch.equal(pieces.stage(range(1, 2), (x,))(pieces.stage(range(1), (x,))(x)), model(x))


def test_length_of_positions_is_that_of_the_tokens() -> None:
    model = Transformer(config())
    with pytest.raises(ValueError, match="tokens has 9 positions; max_seq is 8"):
        pieces_of(model).stage(range(2), (torch.zeros(1, 9, dtype=torch.long),))(
            torch.zeros(1, 9, dtype=torch.long)
        )


def test_attention_costs_as_much_as_sequences_are_long() -> None:
    def cut(seq: int | None) -> list[range]:
        return deal(pieces_of(Transformer(config(layers=6, vocab_size=320, max_seq=4096)), seq).costs, 2)

    assert cut(None) == cut(4096) == [range(3), range(3, 7)]  # blocks of much attention: the head is nothing
    assert cut(8) == [range(5), range(5, 7)]
    with pytest.raises(
        ValueError, match=r"seq=8 is for an imece Transformer, and this is .*Sequential: leave it out"
    ):
        pieces_of(nn.Sequential(nn.Linear(2, 2)), 8)
    for seq in (0, 4097):
        with pytest.raises(ValueError, match=rf"seq={seq}: .* sequences of 1 to 4096 positions"):
            cut(seq)
