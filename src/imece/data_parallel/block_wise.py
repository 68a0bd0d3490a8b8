"""Optimizers whose state has 8 bits or fewer: so many elements, a block, share one scale.

Matrices may be cut for them, but only between two blocks: then each rank has the very blocks of an unsharded
run. Such an optimizer keeps small tensors in 32 bits; what it does with a parameter is not to change because
it sees a part of it, and neither is what the user has told it to do.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_BITSANDBYTES_BLOCK = 256  # elements; the library knows no other

Follow = Callable[[torch.Tensor, nn.Parameter], None]


def block_of(optimizer: Optimizer) -> int:
    """Elements of a block of one that is element-wise otherwise; 1 if it has none.

    ValueError if it has stepped already: then its state would have to be cut.
    """
    library = _library(optimizer)
    block = _BITSANDBYTES_BLOCK if library == "bitsandbytes" else 1
    if library == "torchao":
        block = int(getattr(optimizer, "block_size", 1))
    if block > 1 and optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has stepped before, and what it keeps in blocks of {block} elements "
            f"cannot be cut: give it to parallelize before its first step"
        )
    return block


def followed(optimizer: Optimizer) -> Follow:
    """Called with each parameter and each part of it: as of the one, the optimizer does of the other."""
    library = _library(optimizer)
    if library == "bitsandbytes":
        return _bitsandbytes(optimizer)
    if library == "torchao" and hasattr(optimizer, "_new_buffer"):
        return _torchao(optimizer)
    return lambda whole, part: None


def _library(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _bitsandbytes(optimizer: Any) -> Follow:
    """What it is told of single parameters it keeps by their id, and again by their place in its groups."""
    told = optimizer.mng
    optimizer.check_overrides()  # those of modules, which it looks up in its first step otherwise
    for at, group in enumerate(optimizer.param_groups):
        for place in range(len(group["params"])):
            told.index2config.pop((at, place), None)  # there will be parts of others

    def follow(whole: torch.Tensor, part: nn.Parameter) -> None:
        config = told.pid2config.get(id(whole), {})
        least = config.get("min_8bit_size", optimizer.args.min_8bit_size)
        quantised = whole.numel() >= least
        told.pid2config[id(part)] = config | {"min_8bit_size": 0 if quantised else sys.maxsize}
        weakref.finalize(part, told.pid2config.pop, id(part), None)

    return follow


def _torchao(optimizer: Any) -> Follow:
    """It looks at the size of what it makes a state for."""
    by_size = type(optimizer)._new_buffer
    quantised: set[int] = set()  # ids of parts, which the optimizer keeps alive

    def new_buffer(parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        if id(parameter) in quantised:
            made: torch.Tensor = optimizer._subclass_zeros(parameter, signed, optimizer.block_size)
            return made
        return torch.zeros_like(parameter)

    def follow(whole: torch.Tensor, part: nn.Parameter) -> None:
        alike = torch.empty(whole.numel(), dtype=whole.dtype, device="meta")
        if type(by_size(optimizer, alike, True)) is not torch.Tensor:
            quantised.add(id(part))

    optimizer._new_buffer = new_buffer
    return follow
