"""A model whose forward uses some of its branches, and the gradients that it should get."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece import DistributedDataParallel
from imece.collectives import ops

SMALL_MB = 80 / 2**20  # of two layers' gradients, 96 bytes, more than one bucket


class Branches(nn.Module):
    """Layers of which each forward uses those that are picked, in that order."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))

    def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if picked is None else picked:
            x = self.layers[index](x).tanh()
        return x


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> Any:
    return DistributedDataParallel(module, process_group=group, **options)


def own_input(step: int = 0) -> torch.Tensor:
    """Another on each rank, in float64 as all of these models: comparisons need no room for rounding."""
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def double(module: nn.Module) -> nn.Module:
    return module.double()


Gradients = dict[str, torch.Tensor | None]


def gradients(model: nn.Module) -> Gradients:
    """Those of the module that `model` wraps, as they are."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return {name: each.grad for name, each in inner.named_parameters()}


def mean_over(
    group: dist.ProcessGroup, module: nn.Module, loss: Callable[..., torch.Tensor], *inputs: Any
) -> Gradients:
    """What `loss(module, *inputs)` gives as gradients, mean over the ranks; None for what no rank used."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    loss(alone, *inputs).backward()
    found: Gradients = {}
    for name, parameter in alone.named_parameters():
        used = torch.tensor([parameter.grad is not None], dtype=torch.int32)
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        # Not torch's calls: they would keep no order with those of a backward that failed.
        ops.all_reduce(used, group=group)
        ops.all_reduce(grad, group=group)
        found[name] = grad / group.size() if used.item() else None
    return found


def same(got: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> None:
    assert got.keys() == expected.keys() and expected
    for name, each in expected.items():
        other = got[name]
        if each is None or other is None:
            assert other is each, f"{name} is {other}, expected {each}"
        else:
            assert torch.allclose(other, each, rtol=1e-12, atol=1e-13), f"{name} is {other}, expected {each}"


def total(model: Any, *inputs: Any) -> torch.Tensor:
    return model(*inputs).sum()  # type: ignore[no-any-return]


def train_step(model: Any, group: dist.ProcessGroup, step: int = 0, picked: list[int] | None = None) -> None:
    """One backward, whose gradients must be the mean."""
    loss_step(model, group, total, own_input(step), picked)


def loss_step(model: Any, group: dist.ProcessGroup, loss: Callable[..., torch.Tensor], *inputs: Any) -> None:
    """The same of any loss."""
    expected = mean_over(group, model.module, loss, *inputs)
    model.zero_grad()
    loss(model, *inputs).backward()
    same(gradients(model), expected)


class Broken(Exception):
    pass


class Fuse(torch.autograd.Function):
    """The identity; its backward raises while `blown`."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if Fuse.blown:
            raise Broken
        return grads[0]


class Fused(Branches):
    """Its backward fails in the middle when the fuse is blown."""

    def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == 1:
                x = Fuse.apply(x)  # type: ignore[no-untyped-call]
        return x


@contextlib.contextmanager
def blown() -> Iterator[None]:
    Fuse.blown = True
    try:
        with pytest.raises(Broken):
            yield
    finally:
        Fuse.blown = False


def plus(one: Gradients, other: Gradients) -> Gradients:
    return {
        name: each if (before := one[name]) is None else before if each is None else before + each
        for name, each in other.items()
    }
