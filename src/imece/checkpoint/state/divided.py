"""Saving and loading if each rank of the mesh's axis tensor has a part of the model: see parts.py.

part    what the ranks of a data group have: a part of each divided parameter, and all of the others
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from imece.checkpoint.deal import Slice
from imece.checkpoint.load import Source
from imece.checkpoint.parts import part_name
from imece.checkpoint.state.names import MODEL, OPTIMIZER
from imece.checkpoint.state.staged import as_stage, place_of, share, unwrapped, written
from imece.model_parallel.divided import Divided, divided_parameters


class Group(Protocol):
    """A group of ranks, with torch.distributed's methods."""

    def rank(self) -> int: ...
    def size(self) -> int: ...


def parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint is, or is kept for; "" if it belongs to none."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else ""


def in_parts(
    tensors: Mapping[str, Tensor | Slice], model: nn.Module, data: Group
) -> dict[str, Tensor | Slice]:
    """What a rank of a divided model hands in: the same names and shapes on all ranks, and nothing twice.

    tensors: as the ranks of `data`, which have the same parts, hand them in. model: the plain one. ValueError
    if an optimizer keeps something for a part that is neither one number nor shaped like the part.
    """
    divided = divided_parameters(model)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if name in divided}
    place = place_of(model)  # of a stage, which may have nothing that is divided
    along = (place.tensor, place.tensors) if place is not None else (0, 1)
    index, count = next(((each.index, each.count) for each in divided.values()), along)
    found: dict[str, Tensor | Slice] = {}
    for name, value in tensors.items():
        parameter = parameter_of(name)
        if parameter in divided and tuple(value.shape) == shapes[parameter]:
            own = written(value, data.rank(), data.size())
            nothing = Slice(own.tensor.new_empty(0), own.shape, 0)
            of = divided[parameter]
            for at in range(of.count):
                found[part_name(name, of.dim, at, of.count)] = own if at == of.index else nothing
        elif parameter in divided and len(value.shape):
            raise ValueError(
                f"{name} is {list(value.shape)}, of a part {list(shapes[parameter])} of a matrix that is "
                "divided along the axis tensor: what this optimizer keeps cannot be put together"
            )
        else:
            found[name] = share(value, index, count) if isinstance(value, Slice) else value
    return found


class OfThisRank(Source):
    """A checkpoint as seen by this rank's part of the model."""

    def __init__(self, saved: Source, divided: Mapping[str, Divided]) -> None:
        self._saved, self._divided = saved, divided

    @property
    def folder(self) -> Path:
        """Names it in messages."""
        return self._saved.folder

    def names(self) -> list[str]:
        return self._saved.names()

    def dtype(self, name: str) -> torch.dtype:
        return self._saved.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the part; of the whole, if that cannot be divided this way."""
        divided, shape = self._of(name), self._saved.shape(name)
        try:
            return divided.part_shape(shape) if divided is not None else shape
        except ValueError:
            return shape

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        out = torch.empty(max(stop - start, 0), dtype=self.dtype(name), device="cpu")
        divided, at = self._of(name), 0
        places = [(start, len(out))]
        if divided is not None:
            places = list(divided.places(self.shape(name), start, start + len(out)))
        for first, length in places:
            self._saved.fill(out[at : at + length], name, first)
            at += length
        return out

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        if self._of(name) is None:
            self._saved.fill(target, name, start)
        else:
            super().fill(target, name, start)

    def _of(self, name: str) -> Divided | None:
        """None if each rank has the whole tensor."""
        parameter = parameter_of(name)
        if parameter not in self._divided:
            return None
        shape = self._saved.shape(name)
        return self._divided[parameter] if shape == self._saved.shape(MODEL + parameter) else None


def as_part(saved: Source, model: nn.Module) -> Source:
    """What this rank should load of `saved`."""
    divided = divided_parameters(unwrapped(model))
    saved = as_stage(saved, model)
    return OfThisRank(saved, divided) if divided else saved
