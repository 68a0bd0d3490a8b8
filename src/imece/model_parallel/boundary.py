"""Where a tensor passes from what all ranks of the axis "tensor" have alike to what each has a part of.

Forward and backward are a pair of collectives each (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
section 4.2.2), which the placements on both sides say, in the terms of torch's DTensor (crossing.py):

                    forward         backward
    enter           -               all-reduce      a whole tensor, which each rank uses for its part
      sequence      all-gather      reduce-scatter  the same, where each rank holds some of the positions
    leave           all-reduce      -               each rank's addend of a whole tensor
      sequence      reduce-scatter  all-gather
    join_channels   all-gather      -               each rank's last channels; then all of them on each rank
    scatter         -               all-gather      a whole tensor; each rank goes on with its positions
    gather          all-gather      -               the opposite
    summed          -               all-reduce      of a parameter: the gradients of all ranks

What comes in and goes out is this rank's plain tensor, but for logits that stay divided: these are a DTensor,
so that nobody takes a rank's entries of the vocabulary for all. torch.compile leaves all of this alone and
compiles what is between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from imece.model_parallel.alike import check_alike, content_of, plain_tensors
from imece.model_parallel.crossing import cross

_POSITIONS = 1  # the dim of [batch, positions, ...]


class Boundary:
    """Of one axis of ranks. sequence: between divided layers each rank holds a part of the positions.
    divided_logits: those of a head stay parts."""

    def __init__(self, ranks: DeviceMesh, *, sequence: bool, divided_logits: bool = False) -> None:
        self.sequence = sequence
        self.size = ranks.size()
        self.index = ranks.get_local_rank()
        self._ranks, self._group = ranks, ranks.get_group()
        self._divided_logits = divided_logits
        self._between: Placement = Shard(_POSITIONS) if sequence else Replicate()
        self._compared = False
        self._entered: tuple[Tensor, tuple[int, bool], Tensor] | None = None

    @torch._disable_dynamo(recursive=True)
    def check_same(self, given: Any) -> None:
        """UserError, on all ranks, unless the tensors in it, of the first forward, are the same."""
        if not self._compared and (tensors := plain_tensors(given)):
            self._compared = True
            device = torch.device(self._ranks.device_type)
            check_alike(content_of(tensors), self._group, device, "tensor")

    @torch._disable_dynamo(recursive=True)
    def enter(self, x: Tensor) -> Tensor:
        """What layers that share one input, as queries, keys and values do, get once: so their gradients are
        summed before they travel."""
        if x.is_inference():  # it has no version, by which to see that it still is what entered
            return self._move(x, self._between, Replicate())
        now = x._version, torch.is_grad_enabled()
        if self._entered is None or self._entered[0] is not x or self._entered[1] != now:
            self._entered = x, now, self._move(x, self._between, Replicate(), gradient=Partial())
        return self._entered[2]

    def leave(self, addend: Tensor) -> Tensor:
        self._entered = None  # it is needed no more
        if self.sequence:
            self._check_positions(addend)
        return self._move(addend, Partial(), self._between)

    def logits(self, part: Tensor) -> Tensor:
        """Of a rank's entries of the vocabulary: all of them on each rank, or a DTensor that says whose."""
        self._entered = None
        return self._described(part) if self._divided_logits else self.join_channels(part)

    @torch._disable_dynamo(recursive=True)
    def _described(self, part: Tensor) -> Tensor:
        return DTensor.from_local(part, self._ranks, [Shard(part.ndim - 1)], run_check=False)

    def join_channels(self, part: Tensor) -> Tensor:
        return self._move(part, Shard(part.ndim - 1), Replicate())

    def scatter(self, x: Tensor) -> Tensor:
        self._check_positions(x)
        return self._move(x, Replicate(), Shard(_POSITIONS))

    def gather(self, x: Tensor) -> Tensor:
        return self._move(x, Shard(_POSITIONS), Replicate())

    def summed(self, gradient: Tensor) -> Tensor:
        return self._move(gradient, Partial(), Replicate())

    @torch._disable_dynamo(recursive=True)
    def _move(
        self, x: Tensor, before: Placement, after: Placement, gradient: Placement | None = None
    ) -> Tensor:
        """gradient: what each rank's is, if that is not as `after` says."""
        return cross(x, self._group, before, after, gradient)

    def _check_positions(self, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[_POSITIONS] % self.size:
            raise ValueError(
                f"tensor_parallel(sequence=True) divides the positions of [batch, positions, ...] among "
                f"{self.size} ranks, and this has the shape {list(x.shape)}: take a multiple of {self.size} "
                "positions"
            )
