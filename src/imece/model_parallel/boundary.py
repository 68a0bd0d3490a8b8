"""The collectives where a tensor passes between "the same on all ranks of axis tensor" and "a part on each".

Each boundary is a pair of collectives, for forward and backward (Shoeybi et al. 2019, section 3; Korthikanti
et al. 2022, section 4.2.2). DTensor's placements on both sides determine the pair (crossing.py):

                    forward         backward
    enter           -               all-reduce      a whole tensor, which each rank uses for its part
      sequence      all-gather      reduce-scatter  the same, if each rank holds some of the positions
    leave           all-reduce      -               each rank's addend of a whole tensor
      sequence      reduce-scatter  all-gather
    join_channels   all-gather      -               each rank's last channels; then all of them on each rank
    scatter         -               all-gather      a whole tensor; each rank goes on with its positions
    gather          all-gather      -               the opposite
    summed          -               all-reduce      of a parameter: the gradients of all ranks

Inputs and outputs are this rank's plain tensors. Only logits that stay divided are a DTensor, so that nobody
mistakes a rank's entries of the vocabulary for all of them. torch.compile skips these functions and compiles
what is between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import imece.model_parallel.vocabulary  # noqa: F401  (what cross_entropy does with logits that stay divided)
from imece.model_parallel.alike import check_alike, content_of, plain_tensors
from imece.model_parallel.crossing import cross

_POSITIONS = 1  # a dim of [batch, positions, ...]


class Boundary:
    """Boundaries along one axis of ranks. sequence: between divided layers each rank holds a part of the
    positions. divided_logits: a head's logits stay divided."""

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
        """UserError, on all ranks, unless the ranks' tensors in the first forward are the same."""
        if not self._compared and (tensors := plain_tensors(given)):
            self._compared = True
            device = torch.device(self._ranks.device_type)
            check_alike(content_of(tensors), self._group, device, "tensor")

    @torch._disable_dynamo(recursive=True)
    def enter(self, x: Tensor) -> Tensor:
        """The input of divided layers. Layers that share an input, as queries, keys and values do, share the
        result too, so that their gradients are summed before they travel."""
        if x.is_inference():  # it has no version that would tell whether it was changed since
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
        """Logits from a rank's entries of the vocabulary: whole on each rank, or a DTensor."""
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
        """gradient: the placement of the result's gradient, if it is not `after`."""
        return cross(x, self._group, before, after, gradient)

    def _check_positions(self, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[_POSITIONS] % self.size:
            raise ValueError(
                f"tensor_parallel(sequence=True) divides the positions of [batch, positions, ...] among "
                f"{self.size} ranks, and this has the shape {list(x.shape)}: take a multiple of {self.size} "
                "positions"
            )
