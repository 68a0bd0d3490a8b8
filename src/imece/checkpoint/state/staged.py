"""Saving and loading if each rank of the mesh's axis pipeline has some layers of the model.

All ranks of the mesh save into one checkpoint and hand in the same names; for what other stages have, a rank
hands in an empty slice. As parameters have the names of the whole model, any other number of stages can load
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from imece.checkpoint.deal import Slice
from imece.checkpoint.load import Source
from imece.checkpoint.state.names import EXTRA, MADE_BY, MODEL, OPTIMIZER
from imece.collectives.texts import gather_json
from imece.data_parallel.replicate import DistributedDataParallel
from imece.model_parallel.cutting import Place

_OF_NAMES = (MODEL, OPTIMIZER, MADE_BY, EXTRA)


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def place_of(model: nn.Module) -> Place | None:
    """The place of a part within its pipeline; None for a model that is not cut."""
    place = getattr(unwrapped(model), "place", None)
    return place if isinstance(place, Place) else None


def share(value: Slice, index: int, count: int) -> Slice:
    """What one rank writes of a slice that several ranks have."""
    first, last = (value.tensor.numel() * at // count for at in (index, index + 1))
    return Slice(value.tensor.view(-1)[first:last], value.shape, value.start + first)


def written(value: Tensor | Slice, index: int, count: int) -> Slice:
    """What one rank writes of what it hands in: its slice, or a share of a tensor that several ranks have."""
    return value if isinstance(value, Slice) else share(Slice.of(value.contiguous()), index, count)


def of_all_stages(tensors: Mapping[str, Tensor | Slice], place: Place) -> dict[str, Tensor | Slice]:
    """What a rank of a cut model hands in. tensors: as if its part were all. All ranks call this."""
    mine = {
        name: (str(Slice.of(value).tensor.dtype).removeprefix("torch."), list(value.shape))
        for name, value in tensors.items()
    }
    every = gather_json(mine, place.pipeline, place.device, "what stages save")
    before = set[str]().union(*every[: place.pipeline.rank()])  # shared ones are the first's
    found: dict[str, Tensor | Slice] = {}
    for name, value in tensors.items():
        own = written(value, place.rank, place.ranks)
        found[name] = own if name not in before else Slice(own.tensor.new_empty(0), own.shape, 0)
    for other in every:
        for name, (dtype, shape) in other.items():
            found.setdefault(
                name, Slice(torch.empty(0, dtype=getattr(torch, dtype), device="cpu"), tuple(shape), 0)
            )
    return found


def names_of_groups(names: Sequence[str | None], place: Place) -> list[str | None]:
    """The names of parameter groups, by their place in the optimizers, as for the whole model: a group goes
    by its first parameter. names: in this part; None if the part has nothing of a group. All ranks call this.
    """
    every = gather_json(list(names), place.pipeline, place.device, "names of parameter groups")
    if len({len(each) for each in every}) > 1:
        return list(names)  # they are not the same groups
    return [next((each[at] for each in every if each[at] is not None), None) for at in range(len(names))]


class OfThisStage:
    """A checkpoint without what only other parts of the model have (`Source`)."""

    def __init__(self, saved: Source, place: Place) -> None:
        self._saved, self._place = saved, place
        self.dtype, self.shape = saved.dtype, saved.shape
        self.tensor, self.slice, self.fill = saved.tensor, saved.slice, saved.fill

    @property
    def folder(self) -> Path:
        """Names it in messages."""
        return self._saved.folder

    def names(self) -> list[str]:
        return [name for name in self._saved.names() if not self._is_elsewhere(name)]

    def _is_elsewhere(self, name: str) -> bool:
        prefix, _, rest = name.partition("/")
        return f"{prefix}/" in _OF_NAMES and rest.partition("/")[0] in self._place.elsewhere


def as_stage(saved: Source, model: nn.Module) -> Source:
    """What this rank should load of `saved`."""
    place = place_of(model)
    return saved if place is None else OfThisStage(saved, place)
