"""The parameters of a model, and how a strategy that shards lays them out in buckets.

trained  parameters that want a gradient when the model is wrapped
frozen   the others. If parameters are sharded, frozen ones lie in buckets of their own: with a unit and a
         shard on each rank, and without gradients, masters and an optimizer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from imece import buckets, layout
from imece.data_parallel.optimizer import is_element_wise, kinds_of
from imece.data_parallel.same import is_made_of_others
from imece.data_parallel.sharding.block_wise import block_of
from imece.data_parallel.sharding.cast import can_be_cast
from imece.data_parallel.sharding.parts import items_of
from imece.data_parallel.sharding.units import Unit, unit_numbers

FROZEN = -2  # in place of an optimizer's number


def refuse_tied_by_data(
    named: Sequence[tuple[str, torch.Tensor]], frozen: Sequence[tuple[str, torch.Tensor]] = ()
) -> None:
    """ValueError that names two parameters in the same memory: their parts would go different ways.

    frozen: two frozen parameters may share memory: nothing writes into either.
    """
    places, still = [], {name for name, _ in frozen}
    for name, each in (*named, *frozen):
        if each.numel() and not each.is_meta:
            start = each.data_ptr()
            extent = 1 + sum((n - 1) * stride for n, stride in zip(each.shape, each.stride(), strict=True))
            # Another parameter may lie in the gaps of this one: only its first element is certain.
            nbytes = each.nbytes if extent == each.numel() else each.itemsize
            places.append((str(each.device), start, start + nbytes, name))
    reached: tuple[str, int, str] = ("", 0, "")
    for device, start, stop, name in sorted(places):
        if device == reached[0] and start < reached[1] and not {name, reached[2]} <= still:
            raise ValueError(
                f"{reached[2]} and {name} share memory but are two parameters: assign the Parameter itself"
            )
        reached = max(reached, (device, stop, name))  # of two frozen ones the first may reach further


def refuse_subclasses(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names a parameter which keeps its values in other tensors: it cannot be a view."""
    for name, each in named:
        if is_made_of_others(each):
            raise ValueError(
                f"parameter {name} is of the class {type(each).__name__}, which keeps its values in tensors "
                f"of its own and cannot be cut into parts: freeze it, or use strategy='replicate'"
            )


def can_lie_flat(parameter: torch.Tensor) -> bool:
    """Whether a frozen parameter's values may lie in a bucket: they are all in its own memory, and no other
    tensor that it refers to lies there too.

    What a class keeps beside its values stays where it is, such as the scales of bitsandbytes' codes.
    Parameters made of other tensors (torchao) stay whole: a layout by parameters has no place for those
    tensors.
    """
    if not issubclass(type(parameter), nn.Parameter) or isinstance(parameter, UninitializedParameter):
        return False
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return False
    beside = [each for each in vars(parameter).values() if isinstance(each, torch.Tensor)]
    return all(each.untyped_storage()._cdata != parameter.untyped_storage()._cdata for each in beside)


@dataclass(frozen=True, eq=False, repr=False)
class Trained:
    """What decides which bucket a parameter is in, and where it may be cut."""

    named: Sequence[tuple[str, torch.Tensor]]
    """The trained parameters, or the frozen ones, in registration order."""
    kinds: Sequence[int]
    """The number of each parameter's optimizer; -1: none steps it; FROZEN."""
    units: Sequence[int] | None
    """The number of each parameter's unit; None: nothing is done by unit."""
    dtypes: Sequence[torch.dtype]
    """Dtypes of their masters: a parameter may have fewer bits already."""
    whole: Collection[int]
    """Optimizers that step whole matrices."""
    blocks: Mapping[int, int]
    """For the other optimizers, how many elements stay together."""

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        units: Sequence[Unit] = (),
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> Trained:
        """named: parameters of the model.

        ValueError for an optimizer that cannot be sharded, for a parameter that is not the model's, and for
        one that two optimizers step.
        """
        whole = {at for at, each in enumerate(optimizers) if not is_element_wise(each)}
        return cls(
            named,
            kinds_of(named, optimizers, model),
            unit_numbers(model, units, [each for _, each in named]) if units else None,
            dtypes or [each.dtype for _, each in named],
            whole,
            {at: block_of(each) for at, each in enumerate(optimizers) if at not in whole},
        )

    @classmethod
    def frozen(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        model: nn.Module,
        units: Sequence[Unit] = (),
        param: torch.dtype | None = None,
    ) -> Trained:
        """For frozen parameters, which nothing steps. param: the dtype of those that can be cast; None:
        their own."""
        numbers = unit_numbers(model, units, [each for _, each in named]) if units else None
        dtypes = [param if param and can_be_cast(each) else each.dtype for _, each in named]
        return cls(named, [FROZEN] * len(named), numbers, dtypes, (), {})

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """For each group of the layout (number of the unit, number of the optimizer)."""
        return sorted(set(self._pair_of_each))

    @property
    def _pair_of_each(self) -> list[tuple[int, int]]:
        return list(zip(self.units or [0] * len(self.named), self.kinds, strict=True))

    def lay(self, shards: int, cap_bytes: int | None) -> layout.Layout:
        """Lay them out in buckets of `shards` equal shards. cap_bytes: None: each group is one bucket."""
        at = {pair: group for group, pair in enumerate(self.pairs)}
        return buckets.lay(
            items_of(self.named, self.dtypes, [at[pair] for pair in self._pair_of_each]),
            self.pairs,
            shards=shards,
            cap_bytes=cap_bytes,
            whole=self.whole,
            blocks=self.blocks,
        )
