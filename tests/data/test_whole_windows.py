"""Windows of whole records: nothing is cut, each answer is learned once a pass, whatever ranks read them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from imece.data.batches import IGNORE, Batches
from imece.data.tokens import Part
from imece.data.whole_windows import WholeWindows
from tests.data.helpers import mistake

SEQ = 9


def part_of_records(lengths: list[int], seed: int = 0) -> Part:
    """Record r is the number r + 1, many times; its last third is learned, and at least its last token."""
    tokens = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.uint16)
    learned = np.concatenate([np.arange(n) >= min(n - 1, n - n // 3) for n in lengths])
    offsets = np.cumsum([0, *lengths])
    return Part("train", tokens, offsets, 0, int(learned.sum()), learned, int(learned.sum()))


def lengths_of(count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(1).integers(2, SEQ + 2, count)]


def test_a_pass_has_each_answer_once_and_whole() -> None:
    lengths = [*lengths_of(90), SEQ + 1, SEQ + 2, 40]  # two are too long
    part = part_of_records(lengths)
    assert part.learned is not None
    batches = Batches(part, SEQ, 4, seed=3)
    (whole,) = batches.wholes
    assert whole.left_out == 2 and whole.longest == 40
    count = len(whole) // 4 * 4  # steps of the first pass
    read, seen = Counter[int](), Counter[int]()
    for step in range(count // 4):
        parts = [batches.for_rank(step, rank, 3) for rank in range(3)]
        inputs, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
        assert inputs.shape == targets.shape == (4, SEQ)
        assert (targets != IGNORE).sum() == batches.learned(step)
        assert ((targets == IGNORE) | (targets == batches.sequences(step)[:, 1:])).all()
        for row, line in zip(inputs, batches.sequences(step), strict=True):
            assert (row == line[:-1]).all()
            records = [number for number in dict.fromkeys(line.tolist()) if number]
            assert all((line == number).sum() == lengths[number - 1] for number in records), "whole"
            read.update(records)
        begins = np.concatenate([batches.begins(step, rank, 3) for rank in range(3)])
        assert begins.tolist() == [[row.tolist().index(number) for number in row] for row in inputs]
        there = set(batches.sequences(step).ravel().tolist()) - {0}
        assert {name + 1 for name in batches.names(step)} == there
        seen.update(targets[targets != IGNORE].tolist())
    assert max(read.values()) == 1 and len(read) >= len(lengths) - 2 - 4 * SEQ
    assert seen == {number: max(1, lengths[number - 1] // 3) for number in read}
    assert batches.epoch(count // 4) == count / len(whole)
    assert batches.steps(2) == -(-2 * len(whole) // 4)


def test_passes_are_shuffled_otherwise_and_complete() -> None:
    part = part_of_records(lengths_of(64))
    batches = Batches(part, SEQ, 1, seed=3)
    size = len(batches.wholes[0])
    passes = [[batches.names(step + size * again)[0] for step in range(size)] for again in range(3)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes) and passes[0] != passes[1] != passes[2]
    for step in range(3 * size):  # what is read is what has these names, in later passes too
        inputs, targets = batches.for_rank(step, 0, 1)
        assert set(inputs.ravel().tolist()) - {0} == {name + 1 for name in batches.names(step)}
        assert (targets != IGNORE).sum() == batches.learned(step)
        begins = [inputs[0].tolist().index(number) for number in inputs[0]]
        assert batches.begins(step, 0, 1).tolist() == [begins]
    assert passes[0] != [Batches(part, SEQ, 1, seed=4).names(step)[0] for step in range(size)]


def test_windows_are_well_filled() -> None:
    part = part_of_records(np.random.default_rng(2).integers(20, 60, 400).tolist())
    whole = WholeWindows(part, 99)
    assert len(part.tokens) / (len(whole) * 100) > 0.96


def test_a_record_goes_where_it_leaves_the_least_room() -> None:
    whole = WholeWindows(part_of_records([6, 3, 7]), SEQ)  # tokens of windows of 10
    assert sorted(whole.documents(each) for each in range(len(whole))) == [[0], [2, 1]]


def test_records_that_do_not_fit() -> None:
    part = part_of_records([SEQ + 2, 30])
    message = mistake(Batches, part, SEQ, 1, 0)
    assert message == (
        "none of 2 records of the train part fits into a sequence of 9 tokens, the shortest has 11: "
        "--model.max-seq 10 or more"
    )
    assert len(WholeWindows(part, SEQ + 1)) == 1
    assert mistake(Batches, part, SEQ + 1, 2, 0) == (
        "the train part holds 1 sequence, but a step reads 2 sequences x 10 tokens = 20: "
        "give more text, --batch.sequences 1 or less, or a smaller --model.max-seq"
    )


@pytest.mark.parametrize("lengths", [[], [2]])
def test_small_parts(lengths: list[int]) -> None:
    part = Part("validation", np.empty(0, np.uint16), np.zeros(1, np.int64), 0, 0, np.empty(0, np.bool_), 0)
    whole = WholeWindows(part_of_records(lengths) if lengths else part, SEQ)
    assert len(whole) == len(lengths)
