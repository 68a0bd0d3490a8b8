"""Which tensors are found in a module's output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from imece.data_parallel.outputs import tensors_in


def numbers(value: Any) -> list[int]:
    """Of the tensors that are found."""
    return [int(each) for each in tensors_in(value) if each is not None]


def test_attributes_of_objects_are_found() -> None:
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    inner = SimpleNamespace(all={"two": [two]}, words="of no tensor")
    assert numbers(SimpleNamespace(first=one, inner=inner, last=(three,))) == [1, 2, 3]
    assert None in list(tensors_in(SimpleNamespace(first=one))), "it may have more that nobody sees"
    assert numbers(torch.distributions.Normal(torch.tensor(4.0), torch.tensor(5.0))) == [4, 5]


def test_what_only_knows_much_is_not_searched() -> None:
    one = torch.tensor(1)
    assert numbers([nn.BatchNorm1d(1), torch, nn.Linear]) == []
    knows = SimpleNamespace(output=one)
    knows.itself = knows
    assert set(numbers(knows)) == {1}
    assert numbers(SimpleNamespace(trainer=SimpleNamespace(data=SimpleNamespace(lines=[one])))) == []
