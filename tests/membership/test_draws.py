"""Random draws in a step depend only on seed, step and place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import imece
from imece.membership.draws import begin_draws
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def mask(seed: int, step: int, place: int) -> list[float]:
    begin_draws(seed, step, place, CPU)
    return F.dropout(torch.ones(64)).tolist()


def test_the_same_whatever_was_drawn_before() -> None:
    first = mask(1, 5, 0)
    torch.rand(1000)
    assert mask(1, 5, 0) == first


def test_each_seed_step_and_place_has_its_own() -> None:
    places = [(1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (1, 50, 1), (15, 0, 1), (2**63, 5, 0), (-1, 5, 0)]
    masks = [tuple(mask(*each)) for each in places]
    assert len(set(masks)) == len(places)


def test_the_numbers_stay_what_they_are() -> None:
    """A run that was begun with another version goes on with the same draws."""
    begin_draws(1, 2, 3, CPU)
    assert torch.initial_seed() == 2276728233556386152


def masks_of_steps(axes: dict[str, int]) -> list[list[float]]:
    mesh = imece.init(axes)
    model = imece.DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.data_group)
    torch.manual_seed(7 + mesh.batch_rank)
    masks = []
    for step in imece.steps(2, model, torch.optim.SGD(model.parameters())):
        with step:
            masks.append(F.dropout(torch.ones(64)).tolist())
    return masks


def test_ranks_along_tensor_draw_the_same() -> None:
    """They compute the same between divided layers, and drop the same there."""
    first, second, third, fourth = run_ranks(masks_of_steps, 4, args=[{"replicate": 2, "tensor": 2}])
    assert first == second
    assert third == fourth
    assert len({tuple(each) for masks in (first, third) for each in masks}) == 4
