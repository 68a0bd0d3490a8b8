"""Words of messages."""

from __future__ import annotations

from collections import UserDict

from torch import nn

from imece.listing import kind_of, many, rank_words, shown, size_text, words_of


def test_a_or_an_goes_by_the_sound() -> None:
    values: list[object] = [3, [], UserDict(), nn.LSTM(1, 1), nn.MSELoss(), nn.Linear(1, 1), nn.GRU, None]
    said = ["an int", "a list", "a UserDict", "an LSTM", "an MSELoss", "a Linear", "the class GRU", "None"]
    assert [kind_of(each) for each in values] == said


def test_a_value_of_many_lines_goes_by_its_kind() -> None:
    values: list[object] = ["zero4", 2.5, nn.ReLU(), nn.Sequential(nn.ReLU()), "a" * 60]
    assert [shown(each) for each in values] == ["'zero4'", "2.5", "ReLU()", "a Sequential", "a str"]


def test_many() -> None:
    assert [many(1, "host"), many(8000, "batch"), many(2, "epoch")] == ["1 host", "8,000 batches", "2 epochs"]


def test_sizes_have_the_largest_unit_that_they_fill() -> None:
    sizes = (8, 1023, 1536, 1023 * 2**10, 6 * 2**20, 2**30)
    assert [*map(size_text, sizes)] == ["8 bytes", "1023 bytes", "1.5 KiB", "1023 KiB", "6 MiB", "1 GiB"]


def test_an_error_is_said_in_one_line() -> None:
    assert words_of(ValueError("line 3:\n   a comma\n")) == "line 3: a comma"
    assert words_of(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_rank_words() -> None:
    assert rank_words([2]) == "rank 2"
    assert rank_words([0, 1, 3]) == "ranks 0, 1, 3"
    assert rank_words([0, 1, 2, 5, 7, 8, 9, 10]) == "ranks 0-2, 5, 7-10"
    assert rank_words(range(0, 4000, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 1,992 more"
