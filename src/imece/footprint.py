"""Bytes that training takes on one rank, by category: one arithmetic, for what the engine expects of a model
that is there and for what the planner expects of one that is not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank; memory that ranks have in common counts for each by its part."""

    parameters: int
    gradients: int
    optimizer: int
    """Its state, and the masters of parameters that are kept in fewer bits."""
    communication: int
    """Buckets on their way, and units that are gathered."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.communication

    def __str__(self) -> str:
        """ "12.6 parameters + 12.6 gradients + 12.6 optimizer = 37.8 MB"; what is nothing is left out."""
        parts = {name: nbytes / 1e6 for name, nbytes in asdict(self).items() if nbytes}
        return (
            f"{' + '.join(f'{size:.1f} {name}' for name, size in parts.items())} = {self.total / 1e6:.1f} MB"
        )


class Divides(Protocol):
    """What a strategy divides among the ranks of a shard group."""

    @property
    def parameters(self) -> bool: ...
    @property
    def gradients(self) -> bool: ...
    @property
    def optimizer(self) -> bool: ...


@dataclass(frozen=True)
class Divided:
    """The same as values."""

    parameters: bool
    gradients: bool
    optimizer: bool


DIVIDED = {
    "replicate": Divided(False, False, False),
    "zero1": Divided(False, False, True),
    "zero2": Divided(False, True, True),
    "zero3": Divided(True, True, True),
    "hybrid": Divided(True, True, True),
    "hybrid_zero2": Divided(False, True, True),
}


@dataclass(frozen=True)
class Sizes:
    """Elements of all buckets together, with their padding, as far as one rank has to do with them."""

    whole: float
    shard: float  # of it, this rank's
    filling: float = 0  # of buckets that have memory at a time, where gradients are sharded
    gathered: float = 0  # of buckets of parameters that are there at a time


def footprint(
    sizes: Sizes,
    divides: Divides,
    *,
    parameter_bytes: float,
    reduce_bytes: float,
    master_bytes: float,
    state_bytes: float,
    sum_bytes: float | None = None,
    own_bytes: float | None = None,
) -> Footprint:
    """*_bytes of an element: of parameters, of gradients in buckets, of what the optimizer steps if that is
    not the parameters (else the same or 0); but state_bytes: all of the optimizer's state on this rank.

    sum_bytes: of gradients as the optimizer reads them; None: as what it steps. own_bytes: of a shard of
    parameters, where they are gathered from something else.
    """
    summed = (master_bytes or parameter_bytes) if sum_bytes is None else sum_bytes
    own = parameter_bytes if own_bytes is None else own_bytes
    shard = sizes.shard if divides.optimizer else sizes.whole
    parameters = own * shard if divides.parameters else parameter_bytes * sizes.whole
    gradients = summed * shard if divides.gradients else reduce_bytes * sizes.whole
    if not divides.gradients and reduce_bytes != summed:
        gradients += summed * shard
    optimizer = state_bytes
    if parameter_bytes != master_bytes:
        optimizer += master_bytes * shard
    communication = reduce_bytes * sizes.filling + parameter_bytes * sizes.gathered
    return Footprint(round(parameters), round(gradients), round(optimizer), round(communication))
