"""What an optimizer keeps of a parameter, as plain tensors: checkpoints and copies in memory hold no others.

KEY          a tensor
KEY:int      a number, without dims; int, float or bool
KEY:scale    one of the tensors that make up a tensor: torchao's have codes, scale and qmap
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from imece.data_parallel.sharding.block_wise import elements_per, join

_NUMBERS = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}  # a bool is an int to isinstance


class Entry(NamedTuple):
    """One tensor of those that are kept of a parameter, or of a part of one."""

    tensor: Tensor
    per: int
    """To how many of the parameter's elements one of its own belongs; 0: it is of all of them together."""


class Kept:
    """What one optimizer keeps of any of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._per = optimizer, elements_per(optimizer)

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """As the optimizer has it. Empty before the first step."""
        found: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return found

    @property
    def made_by(self) -> str:
        """The optimizer's class and those that it is made of, by name, the nearest first: "AdamW.Adam"."""
        kinds = itertools.takewhile(lambda kind: kind is not Optimizer, type(self._optimizer).__mro__)
        return ".".join(kind.__name__ for kind in kinds)

    def entries(self, parameter: Tensor) -> dict[str, Entry]:
        """By key. Empty before the first step."""
        found = {}
        for key, value in _plain(self.state(parameter)):
            per = self._per.get(_last(key), 1)
            spread = per and value.ndim and value.numel() == math.ceil(parameter.numel() / per)
            found[key] = Entry(value, per if spread else 0)
        return found

    def per(self, key: str, saved: tuple[int, ...], shape: tuple[int, ...]) -> int:
        """`Entry.per` of a saved tensor; shape: of the whole parameter."""
        spread = shape and saved and math.prod(saved) == math.prod(shape)
        return self._per.get(_last(key), 1 if spread else 0)

    def put(self, parameter: Tensor, found: Mapping[str, Tensor]) -> None:
        """The inverse of `entries`: this, and nothing of what was kept before.

        ValueError for tensors in tensors that are none of this optimizer's.
        """
        self._optimizer.state.pop(parameter, None)
        if not found:
            return
        state = self._optimizer.state[parameter]
        inner: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in found.items():
            of, _, last = key.rpartition(":")
            if not of:
                state[key] = value if self._stays(parameter, key, value) else _beside(parameter, value)
            elif last in _NUMBERS:
                state[of] = value.item()
            else:
                inner[of][last] = value
        for key, values in inner.items():
            state[key] = join(self._optimizer, parameter, values)

    def _stays(self, parameter: Tensor, key: str, value: Tensor) -> bool:
        """Whether it is for the CPU, wherever the parameter is, as for torch's load_state_dict: on a GPU each
        step would wait for each count, unless what steps is a kernel there too.
        """
        if key != "step" or value.ndim:
            return False
        there = [each for each in self._optimizer.param_groups if each.get("capturable") or each.get("fused")]
        return not any(parameter is each for group in there for each in group["params"])


def are_alike(made_by: str, other: str) -> bool:
    """Whether one of the two optimizers is a kind of the other, so that it keeps the same: Adam and AdamW."""
    one, two = made_by.split("."), other.split(".")
    return one[0] in two or two[0] in one


def shape_of(shape: tuple[int, ...], per: int) -> tuple[int, ...]:
    """Of the whole tensor of which a parameter of this shape has one element for each `per` of its own."""
    return shape if per == 1 else (math.ceil(math.prod(shape) / per),)


def _beside(parameter: Tensor, value: Tensor) -> Tensor:
    """On its device; with its strides where it has its shape, as an optimizer makes it: torch's fused ones on
    CPUs pair elements by where they lie in memory."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    # A count of steps means nothing without what the steps have left: LBFGS has that in lists, which are not
    # kept, and begins anew.
    numbers = all(isinstance(each, Tensor | int | float | None) for each in state.values())
    for key, value in state.items():
        if hasattr(value, "__tensor_flatten__"):  # torch's protocol for a tensor that is made of others
            for name in value.__tensor_flatten__()[0]:
                yield f"{key}:{name}", getattr(value, name).detach()
        elif isinstance(value, Tensor):
            yield key, value.detach()
        elif numbers and value is not None:
            name, dtype = next(
                (name, dtype) for name, (kind, dtype) in _NUMBERS.items() if isinstance(value, kind)
            )
            yield f"{key}:{name}", torch.tensor(value, dtype=dtype)


def _last(key: str) -> str:
    return key.rpartition(":")[2]
