"""Optimizers with state of 8 bits or fewer: blocks of elements share one scale.

Matrices may be cut for them, but only between two blocks: then each rank has the same blocks as an unsharded
run. Such an optimizer keeps small tensors in 32 bits. That choice, and what the user told it about a
parameter, must not change because it sees only a part.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_BITSANDBYTES_BLOCK = 256  # elements; the library knows no other size

Follow = Callable[[torch.Tensor, nn.Parameter], None]


def block_of(optimizer: Optimizer) -> int:
    """Elements of a block of an optimizer that is otherwise element-wise; 1 if it has no blocks.

    ValueError if it has stepped already: then its state would have to be cut.
    """
    block = math.lcm(*(each for each in elements_per(optimizer).values() if each))
    if block > 1 and optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has stepped before, and what it keeps in blocks of {block} elements "
            f"cannot be cut: give it to parallelize before its first step"
        )
    return block


def elements_per(optimizer: Any) -> Mapping[str, int]:
    """For tensors of the optimizer's state, by name: how many elements of the parameter share one element
    of theirs.

    0 means all of them, whatever the sizes. For names that are missing the size tells. An optimizer can say
    so itself with an attribute `elements_per`.
    """
    said: Mapping[str, int] | None = getattr(optimizer, "elements_per", None)
    if said is not None:
        return said
    library = _library(optimizer)
    if library == "bitsandbytes":
        block = _BITSANDBYTES_BLOCK
        return {"absmax1": block, "absmax2": block, "qmap1": 0, "qmap2": 0}
    said_size = getattr(optimizer, "block_size", math.inf)
    if library == "torchao" and math.isfinite(said_size):
        block_size = int(said_size)
        made = optimizer._subclass_zeros(torch.empty(block_size, device="cpu"), True, block_size)
        return {"codes": block_size // made.codes.numel(), "scale": block_size, "qmap": 0}
    return {}


def join(optimizer: Any, parameter: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Put the inner tensors together to a tensor of torchao's. ValueError if this optimizer keeps no
    such tensors."""
    if not hasattr(optimizer, "_subclass_zeros"):
        raise ValueError(f"{type(optimizer).__name__} keeps nothing made of {', '.join(inner)}")
    signed = "qmap" not in inner or bool((inner["qmap"] < 0).any())
    made: torch.Tensor = optimizer._subclass_zeros(parameter, signed, optimizer.block_size)
    for name, value in inner.items():
        target: torch.Tensor = getattr(made, name)
        if (target.dtype, target.shape) != (value.dtype, value.shape):
            raise ValueError(
                f"{type(optimizer).__name__} keeps {name} as {target.dtype} {list(target.shape)}, "
                f"this is {value.dtype} {list(value.shape)}"
            )
        target.copy_(value)
    return made


def followed(optimizer: Optimizer) -> Follow:
    """A function of a parameter and a part of it: makes the optimizer treat the part as it treats
    the parameter."""
    library = _library(optimizer)
    if library == "bitsandbytes":
        return _bitsandbytes(optimizer)
    if library == "torchao" and hasattr(optimizer, "_new_buffer"):
        return _torchao(optimizer)
    return lambda whole, part: None


def _library(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _bitsandbytes(optimizer: Any) -> Follow:
    """It keeps what it is told about single parameters by their id, and again by their place in
    its groups."""
    told = optimizer.mng
    optimizer.check_overrides()  # overrides by module, which it otherwise looks up in its first step
    for at, group in enumerate(optimizer.param_groups):
        for place in range(len(group["params"])):
            told.index2config.pop((at, place), None)  # the place will hold another parameter's part

    def follow(whole: torch.Tensor, part: nn.Parameter) -> None:
        config = told.pid2config.get(id(whole), {})
        least = config.get("min_8bit_size", optimizer.args.min_8bit_size)
        quantised = whole.numel() >= least
        told.pid2config[id(part)] = config | {"min_8bit_size": 0 if quantised else sys.maxsize}
        weakref.finalize(part, told.pid2config.pop, id(part), None)

    return follow


def _torchao(optimizer: Any) -> Follow:
    """It decides by the size of the tensor that it makes a state for."""
    by_size, known = type(optimizer)._new_buffer, weakref.ref(optimizer)  # it keeps what is made here
    quantised: set[int] = set()  # ids of parts; the optimizer keeps the parts alive

    def new_buffer(parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        if id(parameter) in quantised:
            stepper: Any = known()
            made: torch.Tensor = stepper._subclass_zeros(parameter, signed, stepper.block_size)
            return made
        return torch.zeros_like(parameter)

    def follow(whole: torch.Tensor, part: nn.Parameter) -> None:
        alike = torch.empty(whole.numel(), dtype=whole.dtype, device="meta")
        if type(by_size(optimizer, alike, True)) is not torch.Tensor:
            quantised.add(id(part))

    optimizer._new_buffer = new_buffer
    return follow
