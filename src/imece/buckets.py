"""How a sharded model lies in buckets, and how many of them have memory at a time. The engine asks here for a
model that exists, and the planner for one that does not.

A strategy's answers depend on who shares memory:

    on_cpu      ranks compute on CPUs
    in_common   all ranks of the shard group have one memory: CPU ranks of one host
    over_hosts  CPU ranks of several hosts that sum inside hosts first, and then between them
    replicas    other ranks hold the same shard, as in hybrid strategies
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from imece import layout
from imece.layout import MIB

ALIGN_BYTES = 128  # 64 for parameters and gradients in half as many bits as their masters
# 16 for half as many bits. Code that torch.compile makes from one block for a GPU reads 16 bytes at a time
# from the parameters of all other blocks too, and never checks their alignment.
ITEM_ALIGN_BYTES = 32
LANES = 2
"""Calls between hosts that may be under way at a time, each on groups of its own."""

# If buckets of the usual size would be more than _MOST_BUCKETS, they are made larger, up to _LARGEST_MIB:
# forward waits for the first bucket and backward for the last, and a large one takes long.
_MOST_BUCKETS, _LARGEST_MIB = 32, 100
_NO_CAP = 2**62  # bytes

Pair = tuple[int, int]
"""(number of the unit, number of the optimizer): parameters of different pairs never share a bucket."""
Numbered = tuple[int, int, layout.Bucket]
"""The same of a bucket, and the bucket."""


def default_cap_bytes(
    *,
    on_cpu: bool = False,
    over_hosts: bool = False,
    borrows: bool = False,
    together: bool = False,
    gradients_bytes: int = 0,
) -> int:
    """The cap of a bucket in bytes, where the user gives none. borrows: gradients are sharded, so that a
    bucket borrows its memory.

    Small buckets in three cases: gradients are sharded on CPUs, where a message costs less than on a GPU;
    between hosts, where a slow wire makes the step wait for the first; and if buckets leave `together`, to
    leave little for the end.

    gradients_bytes: of all gradients together, to limit the number of buckets. Each bucket takes a
    reduce-scatter and an all-gather, and a host that is busy with hundreds of them launches the GPU's
    kernels late.
    """
    if together:
        return 4 * MIB
    usual = 5 if over_hosts or (borrows and on_cpu) else 25
    return max(usual, min(gradients_bytes // _MOST_BUCKETS // MIB, _LARGEST_MIB)) * MIB


def lay(
    items: Sequence[layout.Item],
    pairs: Sequence[Pair],
    *,
    shards: int,
    cap_bytes: int | None,
    whole: Collection[int] = (),
    blocks: Mapping[int, int] | None = None,
) -> layout.Layout:
    """Lay trained parameters out in buckets of `shards` equal shards.

    items: in registration order; the group of each is an index into `pairs`. cap_bytes: None: each group is
    one bucket. whole: numbers of optimizers that step whole matrices. blocks: for others, by number, how many
    elements stay together.
    """
    return layout.build(
        items,
        cap_bytes=_NO_CAP if cap_bytes is None else cap_bytes,
        shards=shards,
        align_bytes=ALIGN_BYTES,
        item_align_bytes=ITEM_ALIGN_BYTES,
        modules_whole=True,
        whole=[group for group, (_, kind) in enumerate(pairs) if kind in whole],
        blocks={group: (blocks or {}).get(kind, 1) for group, (_, kind) in enumerate(pairs)},
    )


def most_under_way(*, overlap: bool, over_hosts: bool, in_common: bool, replicas: bool) -> int:
    """How many buckets may be summed while another one fills, if they borrow their memory. overlap: sums are
    made while backward goes on, and not where it stops for them.

    If all ranks share one memory, a sum ends before the next gradient comes: none. On a network a sum takes
    as long as the backward of a unit, and has that time; over hosts there is one sum per lane.
    """
    if over_hosts and overlap:
        return LANES
    return 0 if not overlap or (in_common and not replicas) else 1


def units_at_once(*, over_hosts: bool) -> int:
    """Units that are gathered at a time in forward: one runs and one comes; between hosts one comes in
    each lane."""
    return 1 + (LANES if over_hosts else 1)


def filling(buckets: Collection[Numbered], *, gathers: bool, most_under_way: int) -> list[int]:
    """Buckets of gradients that have memory at the same time, if buckets borrow it; one that is listed twice
    counts twice.

    These are the largest bucket of each optimizer; with gathered units, which differ more, also the root's;
    and the largest bucket but the root's once per sum that is under way besides.
    """
    largest: dict[tuple[bool, int], layout.Bucket] = {}
    for unit, kind, bucket in buckets:
        key = (gathers and unit == 0, kind)
        if key not in largest or largest[key].numel < bucket.numel:
            largest[key] = bucket
    others = [bucket for (is_root, _), bucket in largest.items() if not is_root]
    beside = min(most_under_way, len(buckets) - len(largest)) if others else 0
    most = max(others, key=lambda bucket: bucket.numel, default=None)
    return [bucket.index for bucket in (*largest.values(), *([most] * beside if most else ()))]


def gathered(buckets: Iterable[tuple[int, int]], in_flight: int) -> int:
    """The size of the units that are gathered at the same time: the root, and the `in_flight` largest others.

    buckets: (number of the unit, size) of each bucket, of frozen parameters too; all sizes in bytes, or all
    in elements.
    """
    units: dict[int, int] = defaultdict(int)
    for unit, size in buckets:
        units[unit] += size
    return units.pop(0, 0) + sum(sorted(units.values(), reverse=True)[:in_flight])
