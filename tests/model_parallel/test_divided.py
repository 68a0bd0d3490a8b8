"""Marks of divided parameters and their arithmetic, without ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from imece.model_parallel.divided import Divided, divided_parameters, mark


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_together_are_the_whole(dim: int, count: int) -> None:
    whole = torch.arange(6 * 12).view(6, 12)
    parts = [Divided(dim, index, count) for index in range(count)]
    assert torch.equal(torch.cat([each.of(whole) for each in parts], dim), whole)
    for each in parts:
        shape = each.part_shape((6, 12))
        assert tuple(each.of(whole).shape) == shape
        assert each.whole_shape(shape) == (6, 12)


def test_what_cannot_be_divided_says_its_figures() -> None:
    with pytest.raises(ValueError, match=r"\[6, 10\] cannot be divided along dim 1 into 3 parts"):
        Divided(1, 0, 3).of(torch.zeros(6, 10))
    with pytest.raises(ValueError, match=r"\[6\] cannot be divided along dim 1"):
        Divided(1, 0, 2).part_shape((6,))


def test_marks_are_found_by_all_names_and_stay_in_copies() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert divided_parameters(model) == {}
    half = Divided(0, 1, 2)
    mark(model[0], "weight", half)
    model.add_module("again", model[0])
    copied = copy.deepcopy(model)
    copied[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert divided_parameters(model) == {"0.weight": half, "again.weight": half}
    assert divided_parameters(copied) == {"0.weight": half, "again.weight": half}
