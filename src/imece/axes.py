"""The arithmetic of axes: which ranks differ along which axis. Ints in, ints out, no torch.

    pipeline    stages of the model                            (slowest: far apart)
    replicate   whole copies: data parallelism, hybrid's copies
    shard       parts of parameters, gradients, optimizer: ZeRO, FSDP
    context     parts of the sequence
    tensor      parts of a matrix                              (fastest: neighbours on one host)

A rank's number gives its coordinate on each axis: neighbouring ranks differ first in tensor, last in
pipeline. Axes that nobody names have size 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from imece.errors import UserError

AXES = ("replicate", "shard", "context", "tensor", "pipeline")
PLACEMENT = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes in the order in which ranks are counted, the slowest first."""

Partition = tuple[tuple[int, ...], ...]  # all ranks, each in exactly one set


def check_axes(axes: Mapping[str, int] | None, world_size: int) -> dict[str, int]:
    """All five axes with their sizes; {"replicate": world_size} if `axes` is None.

    Raises UserError for a name that is no axis, a size below 1, or sizes whose product is not `world_size`.
    """
    given = {"replicate": world_size} if axes is None else dict(axes)
    for name, size in given.items():
        if name not in AXES:
            raise UserError(f"{name!r} is no axis of ranks; the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"axis {name} has size {size!r}; it must be a whole number, at least 1")
    product = math.prod(given.values())
    if product != world_size:
        shape = " x ".join(f"{name} {size}" for name, size in given.items()) or "no axes"
        raise UserError(f"{shape} = {product} ranks, but the world has {world_size}")
    return {name: given.get(name, 1) for name in AXES}


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where `rank` lies on each axis."""
    found: dict[str, int] = {}
    for axis in reversed(PLACEMENT):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def partition(axes: Sequence[str], sizes: Mapping[str, int]) -> Partition:
    """The sets of ranks that differ only along `axes`. Ranks ascend in each set; sets ascend by their
    first rank."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        at = coordinates(rank, sizes)
        sets.setdefault(tuple(at[axis] for axis in PLACEMENT if axis not in axes), []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in sets.values()))


def crossing(hosts: Partition) -> Partition | None:
    """The sets of ranks with the same index on every host; None if hosts hold different numbers of ranks."""
    if len({len(ranks) for ranks in hosts}) != 1:
        return None
    return tuple(tuple(ranks) for ranks in zip(*hosts, strict=True))
