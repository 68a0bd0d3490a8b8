"""Finds the tensors in what a module returned."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_OBJECTS_DEEP = 2  # an output may refer to its trainer, and so to every line of the data


def when_gradient_comes(output: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Call `hook` when a gradient reaches an output of a graph; what `hook` returns replaces the gradient.

    If a view is changed in place later, it gets its history from its base, and hooks on the view are passed
    over: so the base gets the hook too.
    """
    output.register_hook(hook)
    base = output._base
    if base is not None and base.grad_fn is not None:
        base.register_hook(hook)


def tensors_in(value: Any, objects_deep: int = _OBJECTS_DEEP) -> Iterator[torch.Tensor | None]:
    """All tensors in an output: in lists, tuples, mappings and dataclasses, however nested, and in attributes
    of other objects, `objects_deep` levels of them.

    Yields None for an object that may hide tensors, and for a tensor inside of torch.func's transforms: its
    gradients belong to the transform, which writes no `.grad`.
    """
    if isinstance(value, torch.Tensor):
        yield None if torch._C._functorch.is_functorch_wrapped_tensor(value) else value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, objects_deep)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from tensors_in(each, objects_deep)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for member in dataclasses.fields(value):
            yield from tensors_in(getattr(value, member.name, None), objects_deep)
    elif value is not None and not isinstance(value, bool | int | float | complex | str | bytes):
        yield None
        if objects_deep and not isinstance(value, nn.Module | type | types.ModuleType):
            yield from tensors_in(getattr(value, "__dict__", None), objects_deep - 1)
