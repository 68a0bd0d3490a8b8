"""The loss on a part of the data, compared with one that takes single windows and adds in Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from imece.data.batches import IGNORE
from imece.data.tokens import Part
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.evaluate import evaluate, mean_nats, windows_read
from imece.train.model.precision import Precision
from tests.data.test_whole_windows import part_of_records

FP32 = Precision("fp32", "cpu")
END, SEQ = 256, 8


@functools.cache
def model() -> Transformer:
    config = dataclasses.replace(PRESETS["tiny"], vocab_size=257, width=16, mlp_width=24, max_seq=SEQ)
    made = Transformer(config, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # so that tokens differ in their losses
    return made


def part(length: int) -> Part:
    tokens = np.random.default_rng(0).integers(0, 256, length).astype(np.uint16)
    tokens[4::5] = END
    return Part("validation", tokens, np.array([0, length]), END, length)


@functools.cache
def plain(length: int, windows: tuple[int, ...]) -> tuple[float, int]:
    """Nats and tokens of these windows of SEQ targets, one at a time, the last one as short as it is."""
    stream = [END, *part(length).tokens.tolist()]
    nats, count = 0.0, 0
    for number in windows:
        window = torch.tensor(stream[number * SEQ : (number + 1) * SEQ + 1])
        with torch.no_grad():
            logits = model()(window[None, :-1])[0].double()
        nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return nats, count


@pytest.mark.parametrize("length", [1, 8, 9, 83])
@pytest.mark.parametrize("batch", [1, 3, 50])
def test_the_same_number_for_any_batch_and_any_number_of_ranks(length: int, batch: int) -> None:
    expected, count = plain(length, tuple(range(-(-length // SEQ))))
    assert count == length
    for ranks in (1, 2, 3):
        shares = [
            evaluate(model(), part(length), SEQ, batch, FP32, rank=rank, world_size=ranks)
            for rank in range(ranks)
        ]
        assert sum(tokens for _, tokens in shares) == length
        assert sum(nats for nats, _ in shares) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("begin", [None, 7])
def test_documents_that_are_read_as_if_alone(begin: int | None) -> None:
    """Each with the end before it, or with its own beginning; also one that a window cuts."""
    tokens = part(83).tokens
    ends = [*np.flatnonzero(tokens == END) + 1, 83]
    if begin is not None:
        tokens[tokens == begin] = begin + 1
        tokens[[0, *ends[:-1]]] = begin
    one = dataclasses.replace(part(83), tokens=tokens, offsets=np.array([0, *ends]), begin=begin)
    stream, expected = [END, *tokens.tolist()], 0.0
    for first in range(0, 83, SEQ):
        window = stream[first : first + SEQ + 1]
        starts = [at for at, token in enumerate(window[:-1]) if token == (END if begin is None else begin)]
        cuts = sorted({0, *starts, len(window) - 1})
        for low, high in itertools.pairwise(cuts):
            with torch.no_grad():
                logits = model()(torch.tensor([window[low:high]]))[0].double()
            wanted = torch.tensor(window[low + 1 : high + 1])
            expected += float(F.cross_entropy(logits, wanted, reduction="sum"))
    found, count = evaluate(model(), one, SEQ, 3, FP32, separate=True)
    assert count == 83 and found == pytest.approx(expected, rel=1e-6)
    assert found != pytest.approx(evaluate(model(), one, SEQ, 3, FP32)[0], rel=1e-4)


def test_ranks_get_the_same_products() -> None:
    """With batches of one size each rank's sum is made of the same numbers, but for the order."""
    one = [evaluate(model(), part(64), SEQ, 2, FP32, rank=rank, world_size=4)[0] for rank in range(4)]
    assert sum(one) == pytest.approx(evaluate(model(), part(64), SEQ, 2, FP32)[0], rel=1e-15)


@pytest.mark.parametrize(
    ("most", "windows"),
    [(1, [0]), (8, [0]), (20, [0, 3, 7]), (40, [0, 2, 4, 6, 8]), (83, range(11)), (1000, range(11))],
)
def test_only_some_windows_from_all_over(most: int, windows: Sequence[int]) -> None:
    expected, count = plain(83, tuple(windows))
    shares = [
        evaluate(model(), part(83), SEQ, 2, FP32, rank=rank, world_size=2, most_tokens=most)
        for rank in (0, 1)
    ]
    assert sum(tokens for _, tokens in shares) == count
    assert sum(nats for nats, _ in shares) == pytest.approx(expected, rel=1e-6)


def test_nothing_held_out() -> None:
    empty = Part("validation", np.empty(0, np.uint16), np.array([0]), END, 0)
    assert evaluate(model(), empty, SEQ, 2, FP32) == (0.0, 0)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_before(training: bool) -> None:
    seen = []
    made = model().train(training)
    handle = made.register_forward_hook(lambda module, *_: seen.append(module.training))
    before = {name: each.clone() for name, each in made.state_dict().items()}
    evaluate(made, part(20), SEQ, 2, FP32)
    handle.remove()
    assert set(seen) == {False} and made.training == training
    assert all(torch.equal(before[name], each) for name, each in made.state_dict().items())
    assert all(each.grad is None for each in made.parameters())


def test_in_the_precision_that_is_asked_for() -> None:
    exact, _ = evaluate(model(), part(64), SEQ, 2, FP32)
    rounded, _ = evaluate(model(), part(64), SEQ, 2, Precision("bf16", "cpu"))
    assert rounded == pytest.approx(exact, rel=1e-2) and rounded != exact


def test_the_mean_over_no_target_is_zero() -> None:
    """A rank whose part of the sequences has no answer: its loss must not look as if it were not finite."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.full((2, 3), IGNORE)
    nats = mean_nats(logits, targets)
    nats.backward()
    assert nats == 0 and logits.grad is not None and not logits.grad.any()
    targets[0, 1] = 4
    expected = F.cross_entropy(logits[0, 1:2], targets[0, 1:2])
    assert torch.allclose(mean_nats(logits, targets), expected)


def test_of_records_the_answers_count() -> None:
    """Each behind its own prompt, in a sequence of its own here, which is padded."""
    part = part_of_records([9, 7, 6, 9, 8])
    assert part.learned is not None
    expected = 0.0
    for number in range(part.documents):
        record, learned = (
            torch.from_numpy(each[part.offsets[number] : part.offsets[number + 1]].copy())
            for each in (part.tokens.astype(np.int64), part.learned)
        )
        with torch.no_grad():
            logits = model()(record[None, :-1])[0].double()
        each = F.cross_entropy(logits, record[1:], reduction="none")
        expected += float(each[learned[1:]].sum())
    for ranks in (1, 2, 7):
        shares = [evaluate(model(), part, SEQ, 2, FP32, rank=rank, world_size=ranks) for rank in range(ranks)]
        nats, count = map(sum, zip(*shares, strict=True))
        assert count == part.learned_tokens and abs(nats - expected) < 1e-4
    assert evaluate(model(), part, SEQ, 2, FP32, most_tokens=2 * SEQ)[1] < part.learned_tokens
    assert windows_read(part, SEQ, 0) == 5 and windows_read(part, SEQ, 2 * SEQ) == 2
