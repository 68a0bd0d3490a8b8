"""Marks the parameters of a model that are parts of larger ones; `tensor_parallel` leaves the marks.

The marks are on modules, by the names of their parameters, so they survive when a parameter is replaced or
its module is copied.

    whole    the parameter as the undivided model has it
    part     what one rank of the axis "tensor" has: as long as any other's, along one dim
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        """The shape of a part. ValueError if `whole` cannot be divided so."""
        if len(whole) <= self.dim or whole[self.dim] % self.count:
            raise ValueError(f"{list(whole)} cannot be divided along dim {self.dim} into {self.count} parts")
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole: the reverse of `part_shape`."""
        return (*part[: self.dim], part[self.dim] * self.count, *part[self.dim + 1 :])

    def places(self, part: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where the elements [start, stop) of the flat part lie in the flat whole: (first, how many), in
        order.

        part: its shape.
        """
        row = math.prod(part[self.dim :])
        for at, length in _within_rows(row, start, stop):
            yield at // row * row * self.count + self.index * row + at % row, length

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part: a view of the whole tensor. ValueError as from `part_shape`."""
        size = self.part_shape(tuple(whole.shape))[self.dim]
        return whole.narrow(self.dim, self.index * size, size)


def places_in_parts(
    whole: tuple[int, ...], dim: int, count: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Where the elements [start, stop) of a flat whole tensor lie: (which part, first there, how many), in
    order.

    whole: its shape.
    """
    row = math.prod(whole[dim:]) // count  # of a part
    for at, length in _within_rows(row, start, stop):
        line, part = divmod(at // row, count)
        yield part, line * row + at % row, length


def _within_rows(row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) as (first, how many) pieces, each within one row of `row` elements."""
    while start < stop:
        length = min(row - start % row, stop - start)
        yield start, length
        start += length


def mark(module: nn.Module, name: str, divided: Divided) -> None:
    """Mark the module's parameter `name` as such a part."""
    vars(module).setdefault(_MARK, {})[name] = divided


def is_divided(module: nn.Module) -> bool:
    """Whether the module itself has such a part."""
    return _MARK in vars(module)


def divided_parameters(model: nn.Module) -> dict[str, Divided]:
    """The divided parameters of a model under all their names; empty if the model is whole."""
    return {
        f"{prefix}.{name}" if prefix else name: divided
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, divided in vars(module).get(_MARK, {}).items()
    }
