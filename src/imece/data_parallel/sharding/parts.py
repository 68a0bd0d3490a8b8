"""A model's parameters in flat memory, and of each what this rank owns.

    part    what of one parameter lies in this rank's shard: the parameter that the optimizer steps
    master  the memory of the parts: this rank's shards; the parameters' own memory, unless they are stored in
            fewer bits than they are updated in

Parameters, gradients and masters of a bucket have their elements in the same places, whatever their dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from imece import layout

ALIGN_BYTES = 128  # 64 for parameters and gradients in half as many bits as their masters
# Likewise 16: what torch.compile makes of one block for a GPU reads 16 bytes at a time of all the others'
# parameters too, and never looks whether they lie so.
ITEM_ALIGN_BYTES = 32


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
        """To be read, and no more: a gather that reads them too is not waited for."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.detach()

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """This part of a shard, [shard_numel], shaped as the optimizer's parameter."""
        return shard[self.offset : self.offset + self.numel].view(self.parameter.shape)


def items_of(
    named: Sequence[tuple[str, torch.Tensor]], dtypes: Sequence[torch.dtype], groups: Sequence[int]
) -> list[layout.Item]:
    """The items of a layout. dtypes: of the parameters' masters.

    groups: of each parameter, those of different ones never share a bucket.
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
    """Make a bucket's parameters views into `flat`, [numel]. They are given by place.

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
    frozen: bool = False,
) -> list[Part]:
    """What `rank` owns of a bucket. master: its shard, [shard_numel]; whole: its items are not cut.

    frozen: of any dtype, and no optimizer is to see it.
    """
    first, stop = plan.shard(rank)
    parts = []
    for found in plan.parts(first, stop):
        item = items[found.item]
        offset = found.bucket_start - first
        flat = master[offset : offset + found.item_stop - found.item_start]
        # One without dims stays so: its state may have been made before. By `.data` it counts what is written
        # into it by itself, not what collectives write into the bucket.
        of = (flat.view(item.shape) if whole or not item.shape else flat).data
        parameter = nn.Parameter(of, requires_grad=not frozen)
        parts.append(
            Part(
                found.item, item.name, item.shape, found.item_start, found.item_stop, plan.index, offset,
                parameter,
            )
        )  # fmt: skip
    return parts
