"""The bytes that training takes on one rank, by category. The engine uses this arithmetic for a model that
exists, and the planner for one that does not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Offload = Literal["optimizer", "parameters"]
OFFLOADS: tuple[Offload, ...] = ("optimizer", "parameters")
"""What may lie in the host's memory: "optimizer": what the optimizer steps; "parameters": this rank's parts
of the parameters too."""
StrategyName = Literal[
    "auto", "replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2",
    "ddp", "fsdp", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2",
]  # fmt: skip
"""The names that options take: ours first, then those of others (data_parallel/strategy.py)."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank. Of memory that several ranks share, each counts its part."""

    parameters: int
    gradients: int
    optimizer: int
    """The optimizer's state, and the masters of parameters that are kept in fewer bits."""
    communication: int
    """Buckets that are being reduced, and gathered units."""
    host: int = 0
    """Everything that is offloaded to the host's memory. All other fields are on the device."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.communication

    def __str__(self) -> str:
        """ "12.6 parameters + 12.6 gradients = 25.2 MB, and 18.9 MB in host memory"; zeros are left out."""
        parts = {name: nbytes / 1e6 for name, nbytes in asdict(self).items() if nbytes and name != "host"}
        sizes = " + ".join(f"{size:.1f} {name}" for name, size in parts.items())
        hosted = f", and {self.host / 1e6:.1f} MB in host memory" if self.host else ""
        return f"{sizes} = {self.total / 1e6:.1f} MB{hosted}"


@dataclass(frozen=True)
class Divided:
    """What is divided among the ranks of a shard group; everything else is whole on each of them."""

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
"""By strategy. The shard group of hybrid ones is smaller than all ranks."""


@dataclass(frozen=True)
class Sizes:
    """Elements of all buckets together, with padding, as far as one rank deals with them."""

    whole: float
    shard: float  # this rank's shard of them
    filling: float = 0  # in buckets of gradients that have memory at the same time, if gradients are sharded
    gathered: float = 0  # in buckets of parameters that are gathered at the same time


def footprint(
    sizes: Sizes,
    divides: Divided,
    *,
    parameter_bytes: float,
    reduce_bytes: float,
    master_bytes: float,
    state_bytes: float,
    sum_bytes: float | None = None,
    own_bytes: float | None = None,
    offload: Offload | None = None,
) -> Footprint:
    """parameter_bytes, reduce_bytes, master_bytes: of one element of parameters, of gradients in buckets, and
    of what the optimizer steps (if that is the parameters themselves: the same or 0). state_bytes: the whole
    optimizer state on this rank.

    sum_bytes: of one element of the gradients that the optimizer reads; None: as master_bytes. own_bytes: of
    one element of a shard of parameters, if they are gathered from something else. offload: what lies in the
    host's memory.
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
    elif not masters:  # the optimizer steps a copy of the parameters, which stay where they are
        hosted += parameter_bytes * shard
    return Footprint(round(parameters), round(buckets), 0, round(communication), round(hosted))
