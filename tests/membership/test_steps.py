"""`imece.steps` where nobody replaces ranks: a plain loop, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import imece
from tests.ranks import run_ranks


def made() -> tuple[imece.DistributedDataParallel, torch.optim.Optimizer]:
    imece.init()
    model = imece.DistributedDataParallel(nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loops() -> list[int]:
    model, optimizer = made()
    numbers = []
    for step in imece.steps(5, model, optimizer, start=2):
        with step as number:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            numbers.append(number)
            assert number == step.index
    return numbers


def test_a_plain_loop() -> None:
    assert run_ranks(loops, 2, backend=None) == [[2, 3, 4]] * 2


def raises() -> int:
    model, optimizer = made()
    for step in imece.steps(5, model, optimizer):
        with step as number:
            if number == 1:
                raise RuntimeError("of the user's own")
    return 0


def forgets() -> int:
    model, optimizer = made()
    return sum(1 for _ in imece.steps(5, model, optimizer))


def test_what_is_refused() -> None:
    assert run_ranks(raises, 1, backend=None, expect="of the user's own")
    assert run_ranks(forgets, 1, backend=None, expect="enter each step, `with step:`")


def test_without_init() -> None:
    with pytest.raises(imece.errors.UserError, match=r"call imece.init\(\) first"):
        list(imece.steps(1, None, None))  # type: ignore[arg-type]
