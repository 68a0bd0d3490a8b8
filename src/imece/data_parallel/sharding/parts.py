"""A model's parameters in flat memory, and the part of each that this rank owns.

    part    the elements of one parameter in this rank's shard: the parameter that the optimizer steps
    master  the memory of the parts: this rank's shards. It is the parameters' own memory, unless these are
            stored in fewer bits than they are updated in

In the buckets of parameters, gradients and masters, an element has the same place, whatever their dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from imece import layout


@dataclass(eq=False)
class Part:
    """Elements [start, stop) of one parameter, flat."""

    index: int  # of the parameter, in registration order
    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    bucket: int
    offset: int  # of its first element in this rank's shard
    parameter: nn.Parameter  # what the optimizer sees: flat, or whole matrices in their own shape

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def values(self) -> torch.Tensor:
        """The values, for reading only: this does not wait for a gather that reads them too."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.detach()

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """This part of a shard, [shard_numel], shaped like the optimizer's parameter."""
        return shard[self.offset : self.offset + self.numel].view(self.parameter.shape)


def items_of(
    named: Sequence[tuple[str, torch.Tensor]], dtypes: Sequence[torch.dtype], groups: Sequence[int]
) -> list[layout.Item]:
    """The items of a layout. dtypes: of the parameters' masters. groups: of each parameter; parameters of
    different groups never share a bucket.
    """
    return [
        layout.Item(
            name, tuple(each.shape), str(dtype).removeprefix("torch."), dtype.itemsize, str(each.device),
            group,
        )
        for (name, each), dtype, group in zip(named, dtypes, groups, strict=True)
    ]  # fmt: skip


@torch.no_grad()
def move_into(
    flat: torch.Tensor, plan: layout.Bucket, parameters: Sequence[torch.Tensor], copy: bool
) -> None:
    """Make a bucket's parameters, given in the order of places, views into `flat`, [numel].

    copy: with the values that they have.
    """
    for place, parameter in zip(plan.places, parameters, strict=True):
        view = flat[place.start : place.stop].view(parameter.shape)
        if copy:
            view.copy_(parameter)
        parameter.data = view


def make_parts(
    plan: layout.Bucket,
    items: Sequence[layout.Item],
    rank: int,
    master: torch.Tensor,
    whole: bool,
    *,
    frozen: bool,
) -> list[Part]:
    """The parts that `rank` owns of a bucket. master: its shard, [shard_numel]; whole: items are not cut.

    frozen: parts may have any dtype, and no optimizer sees them.
    """
    first, stop = plan.shard(rank)
    parts = []
    for found in plan.parts(first, stop):
        item = items[found.item]
        offset = found.bucket_start - first
        flat = master[offset : offset + found.item_stop - found.item_start]
        # A parameter without dims stays so: its optimizer state may exist already. Through `.data` it counts
        # only the writes into itself, not those of collectives into the bucket.
        of = (flat.view(item.shape) if whole or not item.shape else flat).data
        parameter = nn.Parameter(of, requires_grad=not frozen)
        parts.append(
            Part(
                found.item, item.name, item.shape, found.item_start, found.item_stop, plan.index, offset,
                parameter,
            )
        )  # fmt: skip
    return parts
