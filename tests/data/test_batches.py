"""Each token is a target once in every pass, whichever rank reads whichever step, in any order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.data.batches import Batches, _Stream, rows
from imece.data.tokens import Part
from tests.data.helpers import mistake, part_of

_END = 0
_STEPS = st.integers(0, 40)


class InLine(Batches):
    """Sequence i is window i: so a test reads the stream from its beginning."""

    def _shuffled(self, source: int, number: int) -> int:
        return number


@st.composite
def batches(draw: st.DrawFn) -> Batches:
    """Documents of 0 to 7 tokens, in which each token is another: 1, 2, 3, ..."""
    documents, first = [], 1
    for length in draw(st.lists(st.integers(0, 7), min_size=1, max_size=7)):
        documents.append(range(first, first + length))
        first += length
    part = part_of(documents, _END)
    seq = draw(st.integers(1, min(len(part.tokens), 9)))
    global_batch = draw(st.integers(1, min(len(part.tokens) // seq, 7)))
    return Batches(part, seq, global_batch, draw(st.integers()))


def afresh(one: Batches, kind: type[Batches] = Batches) -> Batches:
    """The same, without anything it may remember."""
    return kind(one.part, one.seq, one.global_batch, one.seed)


def first_rows(one: Batches, count: int) -> list[list[int]]:
    """The first sequences of the run."""
    steps = -(-count // one.global_batch)
    found: list[list[int]] = [row for step in range(steps) for row in one.sequences(step).tolist()]
    return found[:count]


def stream(one: Batches, epochs: int) -> list[int]:
    """The targets in the order of windows, for so many epochs."""
    length = epochs * len(one.part.tokens)
    windows = first_rows(afresh(one, InLine), -(-length // one.seq))
    return [token for window in windows for token in window[1:]][:length]


def orders(one: Batches, epochs: int) -> list[list[tuple[int, ...]]]:
    """The documents of each epoch, end tokens included, in the order of the stream."""
    length, tokens = len(one.part.tokens), stream(one, epochs)
    return [list(cut_at_ends(tokens[epoch * length : (epoch + 1) * length])) for epoch in range(epochs)]


def cut_at_ends(tokens: list[int]) -> Iterator[tuple[int, ...]]:
    document: list[int] = []
    for token in tokens:
        document.append(token)
        if token == _END:
            yield tuple(document)
            document = []
    assert not document


def documents_of(part: Part) -> list[tuple[int, ...]]:
    return [tuple(part.document(index).tolist()) for index in range(part.documents)]


# --- each token once ---


@given(batches())
def test_the_ledger(one: Batches) -> None:
    """Targets are counted as they are read: after whole epochs each token has come as often as each other.

    That is when whole stretches of windows are whole epochs; at a stretch's end some tokens are one ahead.
    """
    length, stretch = len(one.part.tokens), len(one.part.tokens) // one.seq
    until = math.lcm(stretch, length // math.gcd(length, one.seq))
    ledger, in_part = Counter[int](), Counter(one.part.tokens.tolist())
    for number, row in enumerate(first_rows(one, until), start=1):
        ledger.update(row[1:])
        if number % stretch == 0:
            done = number * one.seq
            times = {token: ledger[token] for token in in_part if token != _END}
            assert set(times.values()) <= {done // length, -(-done // length)}
    assert ledger == {token: times * until * one.seq // length for token, times in in_part.items()}


@given(batches(), st.integers(1, 3))
def test_an_epoch_is_all_documents_whole(one: Batches, epochs: int) -> None:
    for found in orders(one, epochs):
        assert sorted(found) == sorted(documents_of(one.part))


@given(batches())
def test_windows_are_shuffled_within_a_stretch(one: Batches) -> None:
    stretch = len(one.part.tokens) // one.seq
    shuffled, in_line = first_rows(one, 3 * stretch), first_rows(afresh(one, InLine), 3 * stretch)
    for first in range(0, 3 * stretch, stretch):
        assert sorted(shuffled[first : first + stretch]) == sorted(in_line[first : first + stretch])


@given(batches())
def test_an_input_is_the_target_before(one: Batches) -> None:
    tokens = [_END, *stream(one, 2)]
    for window, row in enumerate(first_rows(afresh(one, InLine), len(tokens) // one.seq - 1)):
        assert row == tokens[window * one.seq : (window + 1) * one.seq + 1]


# --- whoever reads, and when ---


@given(batches(), _STEPS)
def test_the_global_batch_does_not_depend_on_the_ranks(one: Batches, step: int) -> None:
    sequences = one.sequences(step)
    assert sequences.shape == (one.global_batch, one.seq + 1)
    assert sequences.dtype == np.int64
    assert one.learned(step) == sequences[:, 1:].size, "each target of a text counts"
    for world_size in (1, 2, 3, 4, 5):
        # Each rank is a process of its own, which has seen no other step and no other rank.
        each = [afresh(one).for_rank(step, rank, world_size) for rank in range(world_size)]
        assert all(inputs.shape == targets.shape for inputs, targets in each)
        assert np.concatenate([inputs for inputs, _ in each]).tolist() == sequences[:, :-1].tolist()
        assert np.concatenate([targets for _, targets in each]).tolist() == sequences[:, 1:].tolist()
        counts = [len(inputs) for inputs, _ in each]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1


@given(batches(), _STEPS, st.sampled_from([None, 99]))
def test_where_documents_begin(one: Batches, step: int, begin: int | None) -> None:
    """With the end before them, which is there before the first one too, or with a begin of their own."""
    if begin is not None:
        marked = part_of([[begin, *each[:-1]] for each in documents_of(one.part)], _END)
        one = Batches(replace(marked, begin=begin), one.seq, one.global_batch, one.seed)
    for rank in range(3):
        inputs, _ = one.for_rank(step, rank, 3)
        first = _END if begin is None else begin
        expected = [
            [max((at for at in range(place + 1) if row[at] == first), default=0) for place in range(one.seq)]
            for row in inputs.tolist()
        ]
        assert one.begins(step, rank, 3).tolist() == expected


@given(batches(), st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_any_step_in_any_order_is_the_same(one: Batches, steps: list[int]) -> None:
    for step in steps:
        found = one.sequences(step)
        assert found.tolist() == afresh(one).sequences(step).tolist()
        found += 1  # whoever gets it may write into it
        assert one.sequences(step).tolist() == (found - 1).tolist()


def test_the_epochs_and_shuffles_in_memory_are_few() -> None:
    """A run of many epochs must not keep the order of each."""
    one = Batches(part_of([[number] for number in range(1, 30)]), 4, 2, seed=0)
    for step in range(200):
        one.sequences(step)
    (windows,), (shuffles,) = one._windows, one._shuffles
    assert isinstance(windows, _Stream) and len(windows._orders) == len(shuffles) == 3


@given(batches(), _STEPS)
def test_names_are_the_documents_of_the_targets(one: Batches, step: int) -> None:
    owner = {
        token: index for index in range(one.part.documents) for token in one.part.document(index).tolist()
    }
    for first, last in ((0, one.global_batch), (1, one.global_batch), (0, 1), (0, 0)):
        names = one.names(step, first, last)
        targets = one.sequences(step)[first:last, 1:].ravel().tolist()
        shown = list(dict.fromkeys(owner[token] for token in targets if token != _END))
        assert len(set(names)) == len(names)
        # Of some documents only the end may be among them, and an end does not show whose it is.
        assert set(shown) <= set(names)
        assert len(names) - len(shown) <= targets.count(_END)
        if _END not in targets:
            assert names == shown
    assert one.names(step) == one.names(step, 0, one.global_batch)


# --- the order ---


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    part = part_of([[number] for number in range(1, 60)])
    first = orders(Batches(part, 4, 3, seed=5), 3)
    assert first == orders(Batches(part, 4, 3, seed=5), 3)
    assert first == orders(Batches(part, 7, 1, seed=5), 3)  # the stream knows neither sequences nor steps
    other = orders(Batches(part, 4, 3, seed=6), 3)
    assert len({tuple(order) for order in [*first, *other, documents_of(part)]}) == 7
    assert orders(Batches(part, 4, 3, seed=5 + 2**64), 1) == first[:1]
    assert orders(Batches(part, 4, 3, seed=5 + 2**63), 1) != first[:1]
    assert orders(Batches(part, 4, 3, seed=-1), 1) == orders(Batches(part, 4, 3, seed=2**64 - 1), 1)


def test_every_stretch_has_its_own_shuffle() -> None:
    part = part_of([range(1, 60)])  # one document: the stream is the same in each epoch
    one = Batches(part, 2, 1, seed=5)
    found = first_rows(one, 90)
    assert len({str(found[first : first + 30]) for first in (0, 30, 60)}) == 3
    assert first_rows(afresh(one, InLine), 30) not in (found[:30], found[30:60], found[60:])


def test_the_order_is_the_same_for_ever() -> None:
    """A run goes on under another version of numpy: these are the batches it began with."""
    one = Batches(part_of([[number] for number in range(1, 9)]), 4, 1, seed=1)
    assert [document[0] for document in orders(one, 2)[0]] == [4, 6, 3, 8, 1, 7, 2, 5]
    assert [row[0][1:].tolist() for row in map(one.sequences, range(5))] == [
        [4, 0, 6, 0],
        [1, 0, 7, 0],
        [2, 0, 5, 0],
        [3, 0, 8, 0],
        [1, 0, 7, 0],
    ]


def test_orders_are_even() -> None:
    """Each document is first about as often as each other, and so is each window."""
    each = [Batches(part_of([[1], [2], [3], [4]]), 2, 1, seed) for seed in range(400)]
    documents = Counter(orders(one, 1)[0][0][0] for one in each)
    one_document = part_of([range(1, 8)])
    windows = Counter(int(Batches(one_document, 2, 1, seed).sequences(0)[0, 1]) for seed in range(400))
    assert set(documents) == {1, 2, 3, 4} and set(windows) == {1, 3, 5, 7}
    assert all(60 < times < 140 for times in [*documents.values(), *windows.values()])


# --- figures and mistakes ---


@given(batches(), st.integers(0, 1000))
def test_the_epoch_counts_targets(one: Batches, step: int) -> None:
    assert one.epoch(0) == 0
    assert one.epoch(step) * len(one.part.tokens) == pytest.approx(step * one.seq * one.global_batch)


@given(batches(), st.floats(0, 9) | st.integers(0, 9))
def test_the_fewest_steps_that_are_so_many_epochs(one: Batches, epochs: float) -> None:
    steps = one.steps(epochs)
    assert one.epoch(steps) >= epochs * (1 - 1e-12)
    assert steps == 1 or one.epoch(steps - 1) < epochs


def test_as_large_as_a_step_may_be() -> None:
    part = part_of([[1, 2, 3], [4, 5]])
    one = Batches(part, 7, 1, seed=0)
    assert sorted(one.sequences(3)[0, 1:].tolist()) == sorted(part.tokens.tolist())
    message = mistake(Batches, part, 4, 2, 0)
    assert "train part holds 7 tokens" in message and "2 sequences x 4 tokens = 8" in message


@pytest.mark.parametrize(("seq", "global_batch"), [(0, 1), (1, 0), (-1, -1)])
def test_sizes_that_cannot_be(seq: int, global_batch: int) -> None:
    message = mistake(Batches, part_of([[1, 2]]), seq, global_batch, 0)
    assert f"sequences of {seq} tokens, {global_batch} a step" in message


def test_rows() -> None:
    assert [rows(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [rows(2, rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    inputs, targets = Batches(part_of([[1, 2, 3]]), 2, 1, 0).for_rank(0, 3, 4)
    assert inputs.shape == targets.shape == (0, 2)
    for rank, world_size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
            rows(4, rank, world_size)
    with pytest.raises(ValueError, match="steps count from 0"):
        Batches(part_of([[1, 2, 3]]), 2, 1, 0).sequences(-1)
