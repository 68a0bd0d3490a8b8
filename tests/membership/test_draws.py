"""Random draws in a step depend only on seed, step and place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from imece.membership.draws import begin_draws

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
