"""Which tokens are generated, with which frequencies, and at the end of the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imece.models.generate import LogitsError, generate
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from tests.models.test_transformer import loud, seeded

CONFIG = TransformerConfig(vocab_size=50, layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_seq=24)


def greedy(model: Transformer, prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_takes_the_likeliest_token() -> None:
    model, prompt = loud(CONFIG), [5, 9, 2]
    expected = greedy(model, prompt, 20)
    assert len(set(expected)) > 2, "a model that repeats itself proves little"
    assert list(generate(model, prompt, 20, temperature=0)) == expected
    assert list(generate(model, prompt, 20, top_k=1)) == expected
    for small in (1e-9, 1e-30, 1e-38, 1e-46, 5e-324):  # some are 0 in float32
        assert list(generate(model, prompt, 20, top_p=small)) == expected, small
        assert list(generate(model, prompt, 20, temperature=small)) == expected, small
    assert list(generate(model, prompt, 0)) == []


def test_a_seed_repeats_its_tokens() -> None:
    def draw(seed: int) -> list[int]:
        return list(generate(model, [1], 20, generator=seeded(seed)))

    model = loud(CONFIG)
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    torch.manual_seed(1)
    assert list(generate(model, [1], 20)) == draw(1)


class _Fixed(Transformer):
    """Always the same probabilities: 0.4, 0.3, 0.2 and 0.1 for the tokens 3, 1, 0 and 2."""

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return torch.tensor([0.2, 0.3, 0.1, 0.4]).log().expand(1, 1, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.2, 0.3, 0.1, 0.4]),
        ({"temperature": 0.5}, [4 / 30, 9 / 30, 1 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 3 / 7, 0, 4 / 7]),
        ({"top_k": 9}, [0.2, 0.3, 0.1, 0.4]),
        ({"top_p": 0.45}, [0, 3 / 7, 0, 4 / 7]),  # the likeliest one alone has less
        ({"top_p": 0.75}, [2 / 9, 3 / 9, 0, 4 / 9]),
        ({"top_p": 1.0}, [0.2, 0.3, 0.1, 0.4]),
        ({"top_k": 3, "top_p": 0.75}, [0, 3 / 7, 0, 4 / 7]),  # of what top_k leaves they have 7/9
    ],
)
def test_how_often_each_token_is_drawn(options: dict[str, Any], expected: list[float]) -> None:
    draws = 1500
    model = _Fixed(replace(CONFIG, vocab_size=4, max_seq=draws + 1))
    drawn = torch.tensor(list(generate(model, [0], draws, generator=seeded(), **options)))
    found = torch.bincount(drawn, minlength=4) / draws
    assert found.tolist() == pytest.approx(expected, abs=0.04)
    assert [probability > 0 for probability in found] == [probability > 0 for probability in expected]


def test_what_has_top_p_exactly_is_enough() -> None:
    model = _Fixed(replace(CONFIG, vocab_size=2))
    model.forward = lambda *_, **__: torch.zeros(1, 1, 2)  # type: ignore[method-assign]
    assert list(generate(model, [0], 8, top_p=0.5)) == [0] * 8
    assert {*generate(model, [0], 30, top_p=0.51, generator=seeded())} == {0, 1}


def test_a_stop_token_ends() -> None:
    model, prompt = loud(CONFIG), [5, 9, 2]
    whole = greedy(model, prompt, 20)
    stop = whole[6]
    first = whole.index(stop)
    assert list(generate(model, prompt, 20, temperature=0, stop={stop, 49})) == whole[:first]
    assert list(generate(model, [*prompt, stop], 1, temperature=0)), "a stop token in the prompt ends nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_logits_by_which_nothing_can_be_chosen(temperature: float) -> None:
    """One that is -inf alone is a token that never comes."""

    def tokens(*logits: float) -> list[int]:
        model = _Fixed(replace(CONFIG, vocab_size=4))
        model.forward = lambda *_, **__: torch.tensor(logits).expand(1, 1, 4)  # type: ignore[method-assign]
        return list(generate(model, [0], 3, temperature=temperature))

    assert tokens(-math.inf, -math.inf, 1.0, -math.inf) == [2, 2, 2]
    for bad in (math.nan, math.inf):
        with pytest.raises(LogitsError, match=f"^the model's largest logit is {bad}: no token can be"):
            tokens(0.0, bad, 1.0, 2.0)
    with pytest.raises(LogitsError, match="largest logit is -inf"):
        tokens(*[-math.inf] * 4)


def test_callers_keep_their_gradient_mode() -> None:
    model = loud(CONFIG)
    for _ in generate(model, [1], 2):
        assert torch.is_grad_enabled()
        assert model(torch.tensor([[1]])).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": []}, "prompt_tokens is empty"),
        ({"prompt_tokens": [50]}, "prompt_tokens has 50; vocab_size is 50"),
        ({"prompt_tokens": [-1]}, "prompt_tokens has -1; vocab_size is 50"),
        ({"max_new": -1}, "max_new is -1"),
        ({"prompt_tokens": [1] * 25}, "prompt_tokens has 25 tokens; max_seq is 24"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_what_generate_refuses_at_once(change: dict[str, Any], message: str) -> None:
    call: Callable[..., object] = generate
    with pytest.raises(ValueError, match=message):
        call(Transformer(CONFIG), **{"prompt_tokens": [1, 2], "max_new": 22, **change})


# ---------------------------------------------------------------- beyond the context


@pytest.mark.parametrize("prompt_length", [1, 20, 24])
def test_beyond_the_context_it_reads_the_last_half_again(prompt_length: int) -> None:
    model, prompt = loud(CONFIG), torch.randint(50, (prompt_length,), generator=seeded(4)).tolist()
    window, expected = list(prompt), []
    for _ in range(60):
        if len(window) > CONFIG.max_seq:
            window = window[-12:]
        expected.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window.append(expected[-1])
    assert len(set(expected)) > 2
    assert list(generate(model, prompt, 60, temperature=0)) == expected


def test_a_context_of_one_token() -> None:
    model = loud(replace(CONFIG, max_seq=1))
    tokens = list(generate(model, [7], 5, temperature=0))
    assert tokens == [int(model(torch.tensor([[before]]))[0, 0].argmax()) for before in [7, *tokens[:-1]]]
