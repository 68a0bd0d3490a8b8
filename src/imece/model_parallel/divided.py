"""Which parameters of a model are parts of larger ones: the marks that `tensor_parallel` leaves.

The marks are on modules, by the names of their parameters: so they stay when a parameter is made another
object, or its module copied.

    whole    as the undivided model has it
    part     what one rank of the axis "tensor" has: as long as any other's, along one dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_MARK = "_imece_divided"


@dataclass(frozen=True)
class Divided:
    """Part `index` of `count` along `dim`."""

    dim: int
    index: int
    count: int

    def part_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """ValueError if `whole` cannot be divided so."""
        if len(whole) <= self.dim or whole[self.dim] % self.count:
            raise ValueError(f"{list(whole)} cannot be divided along dim {self.dim} into {self.count} parts")
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The opposite of `part_shape`."""
        return (*part[: self.dim], part[self.dim] * self.count, *part[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part: a view of the whole tensor. ValueError as of `part_shape`."""
        size = self.part_shape(tuple(whole.shape))[self.dim]
        return whole.narrow(self.dim, self.index * size, size)


def mark(module: nn.Module, name: str, divided: Divided) -> None:
    """From now on the parameter `name` of this module is such a part."""
    vars(module).setdefault(_MARK, {})[name] = divided


def divided_parameters(model: nn.Module) -> dict[str, Divided]:
    """Those of a model, by all of their names; empty for one that is whole."""
    return {
        f"{prefix}.{name}" if prefix else name: divided
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, divided in vars(module).get(_MARK, {}).items()
    }
