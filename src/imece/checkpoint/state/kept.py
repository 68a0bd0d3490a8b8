"""What an optimizer keeps for a parameter, as plain tensors (plain.py)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor
from torch.optim import Optimizer

from imece.checkpoint.deal import Slice
from imece.checkpoint.load import Source
from imece.checkpoint.state.names import MADE_BY, OPTIMIZER
from imece.checkpoint.state.plain import by_key, plain, quoted, value_of
from imece.data_parallel.optimizer import may_be_cut
from imece.data_parallel.sharding.block_wise import elements_per, join

# Keys that torch's own optimizers expect in any state that is not empty, by the option that needs them.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}


class Entry(NamedTuple):
    """One of the tensors kept for a parameter, or for a part of one."""

    tensor: Tensor
    per: int
    """How many of the parameter's elements share one of its own; 0: all of them."""


class Kept:
    """What one optimizer keeps for any of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._per = optimizer, elements_per(optimizer)
        self._may_be_cut = may_be_cut(optimizer)

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """The state as the optimizer has it. Empty before the first step."""
        found: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return found

    @property
    def made_by(self) -> str:
        """The optimizer's class and its base classes, by name, the nearest first: "AdamW.Adam"."""
        kinds = itertools.takewhile(lambda kind: kind is not Optimizer, type(self._optimizer).__mro__)
        return ".".join(kind.__name__ for kind in kinds)

    def entries(self, parameter: Tensor) -> dict[str, Entry]:
        """The entries by key. Empty before the first step. TypeError, with the key, for anything not made
        of tensors."""
        found = {}
        for name, kept in self.state(parameter).items():
            for key, value in plain(quoted(name), kept):
                per = self.per(key, value.shape, parameter.shape)
                spread = per and value.ndim and value.numel() == math.ceil(parameter.numel() / per)
                found[key] = Entry(value, per if spread else 0)
        return found

    def per(self, key: str, kept: tuple[int, ...], shape: tuple[int, ...]) -> int:
        """`Entry.per` of a tensor of the shape `kept`. shape: of the parameter; both are whole or both
        a part.

        An optimizer that looks at whole matrices may keep 6 elements for a parameter of [6, 1] that belong to
        its rows. Only if matrices may be cut does each element belong to one of the parameter's, in any
        shape.
        """
        alike = math.prod(kept) == math.prod(shape) if self._may_be_cut else kept == shape
        return self._per.get(unquote(key.rpartition(":")[2]), 1 if kept and shape and alike else 0)

    def lacks(self, parameter: Tensor, keys: Collection[str]) -> str:
        """The option for which its next step would need a key that is not among these; "" if there
        is none."""
        there = {key.partition(":")[0] for key in keys}
        if not there or not type(self._optimizer).__module__.startswith("torch."):
            return ""
        group = self._group(parameter)
        return next((each for each, key in _NEEDED.items() if group.get(each) and key not in there), "")

    def put(self, parameter: Tensor, found: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """The inverse of `entries`: replaces everything that was kept before.

        dtype: of the parameter when this was kept; tensors of that dtype get the parameter's present dtype.

        ValueError for tensors within tensors that are not this optimizer's kind.
        """
        self._optimizer.state.pop(parameter, None)
        if not found:
            return
        state = self._optimizer.state[parameter]
        for key, each in by_key(found).items():
            beside = functools.partial(self._beside, parameter, key, dtype)
            state[unquote(key)] = value_of(
                each, beside, lambda inner: join(self._optimizer, parameter, inner)
            )

    def _beside(self, parameter: Tensor, key: str, dtype: torch.dtype | None, value: Tensor) -> Tensor:
        """Device and dtype as in torch's load_state_dict: tensors of the parameter's dtype follow it, except
        counts. Counts stay on the CPU, as each step would wait for each of them on a GPU, unless the step is
        a kernel there too.
        """
        if key == "step":
            group = self._group(parameter)
            stays = not (value.ndim or group.get("capturable") or group.get("fused"))
            return value if stays else value.to(parameter.device)
        alike = value.dtype == dtype and value.ndim
        return _laid_beside(parameter, value.to(parameter.dtype) if alike else value)

    def _group(self, parameter: Tensor) -> Mapping[str, Any]:
        return next(
            group
            for group in self._optimizer.param_groups
            if any(parameter is each for each in group["params"])
        )


def key_of(name: str, key: str) -> str:
    """The name in a checkpoint of what is kept for a parameter."""
    return f"{OPTIMIZER}{name}/{key}"


def tag_of(name: str, classes: str) -> dict[str, Tensor | Slice]:
    """Says which optimizer keeps the state. classes: `Kept.made_by`; "" if nothing is kept for
    the parameter."""
    nothing = Slice(torch.empty(0, dtype=torch.uint8, device="cpu"), (0,), 0)
    return {f"{MADE_BY}{name}/{classes}": nothing} if classes else {}


def makers(saved: Source) -> dict[str, str]:
    """`Kept.made_by` by parameter. None for state that is only in memory, and for checkpoints without
    such tags."""
    tags = [name.removeprefix(MADE_BY) for name in saved.names() if name.startswith(MADE_BY)]
    return {name: classes for name, _, classes in (tag.rpartition("/") for tag in tags)}


def are_alike(made_by: str, other: str) -> bool:
    """Whether one of the two optimizers is a kind of the other and so keeps the same, as Adam and
    AdamW do."""
    one, two = made_by.split("."), other.split(".")
    return one[0] in two or two[0] in one


def shape_of(shape: tuple[int, ...], per: int) -> tuple[int, ...]:
    """The shape of the whole tensor kept for a parameter of this shape, with one element for each `per`
    of it."""
    return shape if per == 1 else (math.ceil(math.prod(shape) / per),)


def _laid_beside(parameter: Tensor, value: Tensor) -> Tensor:
    """On the parameter's device; with its strides if it has its shape, as an optimizer would make it: torch's
    fused optimizers on CPUs pair elements by their place in memory."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
