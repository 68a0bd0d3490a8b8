"""The baselines, compared with the same formulas in plain Python fractions, which never round."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.data import baselines as baselines_module
from imece.data.baselines import baselines, counted_in
from imece.data.tokens import Part
from tests.data.helpers import mistake, part_of

_VOCAB = 9
_DOCUMENTS = st.lists(st.lists(st.integers(1, _VOCAB - 1), max_size=9), min_size=1, max_size=9)


def pairs(part: Part) -> list[tuple[int, int]]:
    tokens = part.tokens.tolist()
    return list(zip([part.end, *tokens], tokens, strict=False))


def slow(train: Part, validation: Part) -> dict[str, float]:
    tokens, together = Counter(train.tokens.tolist()), Counter(pairs(train))
    nats = {"uniform": 0.0, "unigram": 0.0, "bigram": 0.0}
    for before, token in pairs(validation):
        unigram = Fraction(tokens[token] + 1, len(train.tokens) + _VOCAB)
        followers = [times for (first, _), times in together.items() if first == before]
        bigram = unigram
        if followers:
            kinds = len(followers)
            bigram = (together[before, token] + kinds * unigram) / (sum(followers) + kinds)
        nats["uniform"] += math.log(_VOCAB)
        nats["unigram"] -= math.log(unigram)
        nats["bigram"] -= math.log(bigram)
    return {name: value / len(validation.tokens) for name, value in nats.items()}


@settings(max_examples=50)
@given(_DOCUMENTS, _DOCUMENTS, st.integers(1, 30))
def test_against_the_formulas(train: list[list[int]], validation: list[list[int]], chunk: int) -> None:
    parts = part_of(train), part_of(validation, name="validation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines_module, "_CHUNK", chunk)
        found = baselines(*parts, _VOCAB)
    assert found == pytest.approx(slow(*parts), rel=1e-12)


def test_of_records_only_answers_are_counted() -> None:
    """As of a text that has them alone, each behind the last token of its prompt."""
    train, validation = part_of([[1, 2, 3], [1, 2, 4]]), part_of([[5, 2, 3]], name="validation")
    learned = [np.array(each, np.bool_) for each in ([0, 0, 1, 0] * 2, [0, 0, 1, 0])]
    train, validation = replace(train, learned=learned[0]), replace(validation, learned=learned[1])
    found = baselines(train, validation, _VOCAB)
    seen = (1 + 1) / (2 + _VOCAB)  # 3, of the two answers 3 and 4
    assert found["unigram"] == pytest.approx(-math.log(seen))
    assert found["bigram"] == pytest.approx(-math.log((1 + 2 * seen) / (2 + 2)))


def test_bigrams_are_probabilities() -> None:
    """After each token the probabilities of all tokens have the sum 1, whether it was seen or not."""
    train = part_of([[1, 2, 3, 1, 2], [2, 2, 4], []])
    for before in range(_VOCAB):
        # One document is [before, token]; a second, [before], takes what else is in it out of the mean.
        total = 0.0
        for token in range(1, _VOCAB):
            total += after(train, before, token)
        total += after(train, before, 0)
        assert total == pytest.approx(1)


def after(train: Part, before: int, token: int) -> float:
    """The bigram's probability of `token` after `before`, from the means it gives."""
    with_it = Part("validation", part_of([[before, token]]).tokens[:2], train.offsets, train.end, 0)
    without = Part("validation", part_of([[before]]).tokens[:1], train.offsets, train.end, 0)
    nats = 2 * baselines(train, with_it, _VOCAB)["bigram"] - baselines(train, without, _VOCAB)["bigram"]
    return math.exp(-nats)


def test_text_that_repeats_is_known_to_bigrams() -> None:
    text = part_of([list(range(1, _VOCAB)) * 30] * 5)
    found = baselines(text, text, _VOCAB)
    assert found["uniform"] == pytest.approx(math.log(_VOCAB))
    assert found["unigram"] > 2
    assert found["bigram"] < 0.1


def test_of_much_text_some_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces at equal distances, each with the token before its first."""
    monkeypatch.setattr(baselines_module, "_CHUNK", 4)
    monkeypatch.setattr(baselines_module, "_MOST_TOKENS", 8)
    validation = part_of([[1, 2, 3], [2, 1, 3]], name="validation")
    train = part_of([[3, 1, 2, 4, 5, 1, 2, 3, 1, 2, 4, 1, 1, 2, 8, 8, 8]])
    read = [tokens.tolist() for _, tokens in baselines_module._pairs(train)]
    assert read == [[3, 1, 2, 4], [1, 2, 4, 1]]
    assert [before[0] for before, _ in baselines_module._pairs(train)] == [0, 3]
    unigram = {token: Fraction(times + 1, 8 + _VOCAB) for token, times in {0: 0, 1: 3, 2: 2, 3: 1}.items()}
    # After 0, 1, 2, 3, as the pieces have it: how often each comes, and what.
    followers = {0: [3], 1: [2, 2], 2: [4, 4], 3: [1, 1]}
    nats = 0.0
    for before, token in pairs(validation):
        seen, kinds = followers[before], len(set(followers[before]))
        nats -= math.log((seen.count(token) + kinds * unigram[token]) / (len(seen) + kinds))
    found = baselines(train, validation, _VOCAB)
    assert found["bigram"] == pytest.approx(nats / 8, rel=1e-12)
    monkeypatch.setattr(baselines_module, "_MOST_TOKENS", 12_000_000)
    assert counted_in(train, validation) == ""
    many = Part("train", np.broadcast_to(np.uint16(1), (3_000_000_000,)), train.offsets, 0, 0)
    assert counted_in(many, validation) == "12 of 3,000 million train tokens"


def test_many_pieces_are_not_each_put_into_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long table is merged a few times, or the work would be pieces x pairs."""
    merged: list[int] = []
    merge = baselines_module._merged

    def counting(*tables: Any) -> Any:
        result = merge(*tables)
        merged.append(len(result[0]))
        return result

    monkeypatch.setattr(baselines_module, "_CHUNK", 64)
    monkeypatch.setattr(baselines_module, "_merged", counting)
    tokens = np.random.default_rng(0).integers(1, 1000, 64 * 256)
    part = part_of([tokens.tolist()])
    pairs, _ = baselines_module._count_pairs(part, 1000)
    assert 16_000 < len(pairs) < 64 * 256 + 1
    assert len(pairs) < sum(merged) < 12 * len(pairs)  # one by one it would be 128 times as many


def test_without_text_there_are_none() -> None:
    some, none = part_of([[1, 2]]), part_of([], name="validation")
    assert "the validation part holds no tokens" in mistake(baselines, some, none, _VOCAB)
    assert "the train part holds no tokens" in mistake(baselines, part_of([]), some, _VOCAB)
