"""Bytes that training takes on one rank, by category: one arithmetic, for what the engine expects of a model
that is there and for what the planner expects of one that is not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol

Offload = Literal["optimizer", "parameters"]
OFFLOADS: tuple[Offload, ...] = ("optimizer", "parameters")
"""What may lie in the host's memory: what the optimizer steps; this rank's parts of the parameters too."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank; memory that ranks have in common counts for each by its part."""

    parameters: int
    gradients: int
    optimizer: int
    """Its state, and the masters of parameters that are kept in fewer bits."""
    communication: int
    """Buckets on their way, and units that are gathered."""
    host: int = 0
    """All that is offloaded, in the host's memory. The rest is on the device."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer + self.communication

    def __str__(self) -> str:
        """ "12.6 parameters + 12.6 gradients = 25.2 MB, and 18.9 MB in host memory"; nothing of what is 0."""
        parts = {name: nbytes / 1e6 for name, nbytes in asdict(self).items() if nbytes and name != "host"}
        sizes = " + ".join(f"{size:.1f} {name}" for name, size in parts.items())
        hosted = f", and {self.host / 1e6:.1f} MB in host memory" if self.host else ""
        return f"{sizes} = {self.total / 1e6:.1f} MB{hosted}"


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
    offload: Offload | None = None,
) -> Footprint:
    """*_bytes of an element: of parameters, of gradients in buckets, of what the optimizer steps if that is
    not the parameters (else the same or 0); but state_bytes: all of the optimizer's state on this rank.

    sum_bytes: of gradients as the optimizer reads them; None: as what it steps. own_bytes: of a shard of
    parameters, where they are gathered from something else. offload: what lies in the host's memory.
    """
    summed = (master_bytes or parameter_bytes) if sum_bytes is None else sum_bytes
    own = parameter_bytes if own_bytes is None else own_bytes
    shard = sizes.shard if divides.optimizer else sizes.whole
    parameters = own * shard if divides.parameters else parameter_bytes * sizes.whole
    buckets = 0.0 if divides.gradients else reduce_bytes * sizes.whole
    sums = summed * shard if divides.gradients or reduce_bytes != summed or offload else 0.0
    masters = master_bytes * shard if parameter_bytes != master_bytes else 0.0
    communication = reduce_bytes * sizes.filling + parameter_bytes * sizes.gathered
    if offload is None:
        return Footprint(
            round(parameters), round(buckets + sums), round(state_bytes + masters), round(communication)
        )
    hosted = state_bytes + sums + masters
    if offload == "parameters":
        hosted, parameters = hosted + parameters, 0.0
    elif not masters:  # what is stepped is a copy of the parameters, which stay where they are
        hosted += parameter_bytes * shard
    return Footprint(round(parameters), round(buckets), 0, round(communication), round(hosted))
