"""A script that looks for gradients where a sharded model has none is told where they are, once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import nn

import imece
from tests.ranks import run_ranks

Loop = Callable[[nn.Module], None]
SHARDED = [("zero1", False), ("zero2", False), ("zero3", False), ("zero3", True)]


def scale(model: nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad *= 0.5


def drop(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = None


def delete(model: nn.Module) -> None:
    del model.get_parameter("module.0.weight").grad


def said(strategy: str, gather: bool, loop: Loop, when: str) -> list[str]:
    """What is warned of in three steps, with the loop before or after the backward, or after the step."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = imece.parallelize(plain, sgd, strategy, gather=gather)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            if when == "before":
                loop(model)
            loss.backward()
            if when == "between":
                loop(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if when == "after":
                loop(model)
            model.zero_grad()
            model.module.zero_grad()
    assert all(type(each) is nn.Parameter for each in model.parameters()) or gather
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught if "has no .grad" in str(each.message)]


def tell_once() -> None:
    imece.init()
    for strategy, gather in SHARDED:
        for loop in (scale, drop, delete):
            (message,) = said(strategy, gather, loop, "between")
            assert f"parameter 0.weight has no .grad under strategy='{strategy}'" in message
            assert "optimizer.param_groups" in message
            assert said(strategy, gather, loop, "before") == said(strategy, gather, loop, "after") == []
    for loop in (scale, drop):
        assert said("replicate", False, loop, "between") == []


def test_a_loop_over_gradients_is_told_where_they_are() -> None:
    run_ranks(tell_once, 2)


def use_meanwhile() -> None:
    """Between a backward and the step parameters are what they are otherwise, copied or gathered."""
    imece.init()
    for strategy, gather in SHARDED:
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = imece.parallelize(plain, sgd, strategy, gather=gather)
        model(torch.ones(2, 4)).sum().backward()
        if not gather:
            alike = copy.deepcopy(plain[0].weight)
            assert type(alike) is nn.Parameter
        with warnings.catch_warnings(), model.gathered():
            warnings.simplefilter("error")
            assert all(type(each) is nn.Parameter and each.grad is None for each in plain.parameters())
        optimizer.step()


def test_parameters_are_ordinary_in_all_else() -> None:
    run_ranks(use_meanwhile, 2)
