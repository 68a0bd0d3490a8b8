"""A parameter in several wrapped models, and a module that is wrapped again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from imece import parallelize
from tests.data_parallel.branches import (
    SMALL_MB,
    Branches,
    Gradients,
    double,
    gradients,
    mean_over,
    own_input,
    plus,
    same,
    total,
    train_step,
    wrap,
)
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.dropped import left_of


def wrapped_again(group: dist.ProcessGroup) -> None:
    """What the first wrapper prepared for and nobody called backward on is no longer waited for."""
    module = double(Branches())
    model = wrap(module, group)
    loss = total(model, own_input())
    del model, loss
    train_step(wrap(module, group), group)


def gone_with_its_model(group: dist.ProcessGroup) -> None:
    """All memory is free as soon as nobody refers to a model: the garbage collector may come much later."""

    def trained(strategy: str, **options: Any) -> list[Any]:
        module = Branches()
        model, optimizer = parallelize(
            module, torch.optim.AdamW(module.parameters()), strategy, group, **options
        )
        for step in range(2):
            optimizer.zero_grad()
            total(model, own_input(step).float()).backward()
            optimizer.step()
        return [model, module, optimizer, model.reducer, model.reducer.gradients, *module.parameters()]

    for strategy in ("replicate", "zero1", "zero2", "zero3"):
        assert left_of(lambda: trained(strategy)) == []  # noqa: B023
    assert left_of(lambda: trained("zero3", gather=True)) == []


def two_models_one_backward(group: dist.ProcessGroup) -> None:
    """One behind the other, or in a backward inside of it; each rank leaves other parts of it unused."""
    for overlap, inside in ((None, False), (False, True)):
        first = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB, overlap=overlap)
        second = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB, overlap=overlap)
        both = nn.ModuleList([copy.deepcopy(first.module), copy.deepcopy(second.module)])
        for step in range(4):
            picked = [[0, 1, 2, 3], [2, 0]][(dist.get_rank() + step) % 2]
            x = own_input(step).requires_grad_()
            expected = mean_over(
                group, both, lambda both, x, used: both[1](both[0](x), used).sum(), x, picked
            )
            first.zero_grad()
            second.zero_grad()
            between = checkpoint(first, x, use_reentrant=True) if inside else first(x)
            second(between, picked).sum().backward()
            got = {f"0.{name}": each for name, each in gradients(first).items()}
            same(got | {f"1.{name}": each for name, each in gradients(second).items()}, expected)


def of_two_models(group: dist.ProcessGroup) -> None:
    """An encoder of both: of it all is used, or by each rank another part, or nothing."""

    def losses(models: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        picked = [[0, 1, 2, 3, 4], [0, 4] if dist.get_rank() else [1, 4], [4]][step % 3]
        x = own_input(step)
        return models[0](x, picked).square().sum(), models[1](x, picked).sin().sum()

    def of_both(models: Any, step: int) -> torch.Tensor:
        return torch.stack(losses(models, step)).sum()

    def together(models: Any, step: int) -> None:
        of_both(models, step).backward()

    def in_turn(models: Any, step: int) -> None:
        for each in losses(models, step):
            each.backward()

    def first_in_no_sync(models: Any, step: int) -> None:
        with models[0].no_sync():
            losses(models, step)[0].backward()
        losses(models, step)[1].backward()

    for overlap in (True, False):
        for train in (together, in_turn, first_in_no_sync):
            encoder = [nn.Linear(3, 3) for _ in range(4)]
            both = nn.ModuleList([Branches(), Branches()])
            for each in both:
                each.layers = nn.ModuleList([*encoder, nn.Linear(3, 3)])
            double(both)
            models = [wrap(each, group, bucket_cap_mb=SMALL_MB, overlap=overlap) for each in both]
            before: Gradients = {}
            for step in range(7):
                added = mean_over(group, both, of_both, step)
                if step < 6:
                    both.zero_grad()
                train(models, step)
                got = gradients(both)
                expected = added if step < 6 else plus(before, added)
                if train is first_in_no_sync:  # its own layer has not been synchronised
                    got, expected = ({name: each for name, each in found.items() if "0.layers.4" not in name}
                                     for found in (got, expected))  # fmt: skip
                same(got, expected)
                before = {name: None if each is None else each.clone() for name, each in added.items()}


def wrapped_within(group: dist.ProcessGroup) -> None:
    inner = wrap(double(nn.Linear(3, 3)), group)
    model = wrap(nn.Sequential(inner, nn.Tanh(), double(nn.Linear(3, 3))), group)
    for step in range(3):
        alone = nn.Sequential(inner.module, *model.module[1:])
        expected = mean_over(group, alone, total, own_input(step))
        model.zero_grad()
        total(model, own_input(step)).backward()
        same(gradients(alone), expected)


def wrapped_again_beside(group: dist.ProcessGroup) -> None:
    """The first wrapper is still there, and what it prepared for, or what a failed backward has left."""
    module = Branches().double()
    model = wrap(module, group)
    loss = total(model, own_input())
    for step in range(2):
        train_step(wrap(module, group), group, step)
    with pytest.raises(ValueError, match="on purpose"), failing(module.layers[1]):
        total(model, own_input()).backward()
    train_step(wrap(module, group), group)
    del loss


@contextlib.contextmanager
def failing(layer: nn.Module) -> Iterator[None]:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = layer.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    try:
        yield
    finally:
        handle.remove()


def of_two_models_that_do_not_fit(group: dist.ProcessGroup) -> None:
    module = Branches().double()
    one, other = wrap(module, group), wrap(module, group, average="tokens")
    with pytest.raises(RuntimeError) as caught:
        (total(one, own_input()) + other.weigh(total(other, own_input()), 2)).backward()
    assert str(caught.value) == (
        "parameter layers.0.weight is in two wrapped models that one backward goes through, and they are "
        "not averaged alike, over the same ranks: wrap one module that has both"
    )
    other = wrap(module, group)
    of_other = total(other, own_input())
    with failing(module.layers[3]):
        of_one = total(one, own_input())
    with pytest.raises(ValueError, match="on purpose"):
        of_one.backward()
    with pytest.raises(RuntimeError) as caught:
        of_other.backward()
    assert str(caught.value) == (
        "parameter layers.0.weight is in two wrapped models, and the backward of the other one has raised: "
        "run the forwards of both again"
    )
    train_step(other, group)
    train_step(one, group)


CHECKS: dict[str, Check] = {
    "wrapped again": wrapped_again,
    "gone with its model": gone_with_its_model,
    "two models, one backward": two_models_one_backward,
    "of two models": of_two_models,
    "wrapped within": wrapped_within,
    "wrapped again beside": wrapped_again_beside,
    "of two models that do not fit": of_two_models_that_do_not_fit,
}

# Where the order of collectives matters.
LONG_ON_GLOO = ["two models, one backward", "of two models"]


@pytest.mark.parametrize(
    "job", jobs(__name__, CHECKS, (2, "shm")) + slow(jobs(__name__, LONG_ON_GLOO, (3, "gloo")))
)
def test_several_models(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
