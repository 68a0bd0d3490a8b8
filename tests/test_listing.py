"""Words of messages."""

from __future__ import annotations

from collections import UserDict

from torch import nn

from imece.listing import kind_of


def test_a_or_an_goes_by_the_sound() -> None:
    values: list[object] = [3, [], UserDict(), nn.LSTM(1, 1), nn.MSELoss(), nn.Linear(1, 1)]
    said = ["an int", "a list", "a UserDict", "an LSTM", "an MSELoss", "a Linear"]
    assert [kind_of(each) for each in values] == said
