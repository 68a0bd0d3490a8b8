"""Collectives as plain lists of sends, receives and sums, for any backend.

Pure arithmetic: ints in, tuples out; no tensor and no process is touched (execute.py runs a schedule).

A `Schedule` is what one rank does, a list of steps in order. All sends and receives of one `Step` progress
together, and the step ends when all of them have ended. A range start:stop counts elements of the flat
tensor, which has the same length on every rank, so a message has the same range on both ends. A received
range is either copied over the own elements or summed into them ("sum" stands for min, max or product too).

Messages without elements are left out on both ends; their step stays, so that steps can be counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Outgoing(NamedTuple):
    """Elements start:stop go to rank `peer` of the group."""

    peer: int
    start: int
    stop: int


class Incoming(NamedTuple):
    """Elements start:stop come from rank `peer` and are summed into, or copied over, the own ones."""

    peer: int
    start: int
    stop: int
    how: Literal["sum", "copy"]


class Step(NamedTuple):
    """What progresses together. A copied range overlaps no sent one; a summed one equals a sent one or
    is apart."""

    sends: tuple[Outgoing, ...] = ()
    receives: tuple[Incoming, ...] = ()


Schedule = list[Step]
Range = tuple[int, int]  # start, stop

SCHEDULES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("root", "ring", "recursive_doubling", "tree", "hierarchical"),
    "broadcast": ("root", "pipelined_ring", "tree"),
    "reduce": ("root", "tree"),
    "reduce_scatter": ("ring", "hierarchical"),
    "all_gather": ("ring", "hierarchical"),
}
DEFAULT_PARTS = 8


def build(
    op: str,
    name: str,
    rank: int,
    world_size: int,
    numel: int,
    *,
    root: int = 0,
    parts: int = DEFAULT_PARTS,
) -> Schedule:
    """The schedule of one rank of the group.

    op, name: a pair of SCHEDULES, except "hierarchical" (hierarchical.py). numel: of the whole tensor
    (reduce_scatter: of its input, all_gather: of its output). root: source of a broadcast, target of a
    reduce. parts: S of the pipelined ring. ValueError for an unknown pair or a bad number.
    """
    check_name(op, name)
    assert name != "hierarchical", "hierarchical.py makes its messages by itself"
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside the group of {world_size} ranks")
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is outside the group of {world_size} ranks")
    if op == "broadcast":
        if name == "pipelined_ring":
            return pipelined_ring_broadcast(rank, world_size, numel, root, parts)
        return (root_broadcast if name == "root" else tree_broadcast)(rank, world_size, numel, root)
    if op == "reduce":
        return (root_reduce if name == "root" else tree_reduce)(rank, world_size, numel, root)
    if op == "reduce_scatter":
        return ring_reduce_scatter(rank, world_size, numel)
    if op == "all_gather":
        return ring_all_gather(rank, world_size, numel)
    return _ALL_REDUCE[name](rank, world_size, numel)


def check_name(op: str, name: str) -> None:
    """ValueError, with the nearest name, unless `name` is a schedule of `op`."""
    if op not in SCHEDULES:
        raise ValueError(f"unknown collective {op!r}: one of {', '.join(SCHEDULES)}")
    if name not in SCHEDULES[op]:
        raise ValueError(f"unknown schedule {name!r} of {op}{nearest(str(name), SCHEDULES[op])}")


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of an error line: did you mean ...?"""
    close = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f": one of {', '.join(known)}"


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """0:numel cut into `parts` ranges in order, whose lengths differ by at most one."""
    return [(i * numel // parts, (i + 1) * numel // parts) for i in range(parts)]


# --- ring: the two halves of all_reduce, which ZeRO also uses alone


def ring_reduce_scatter(rank: int, world_size: int, numel: int) -> Schedule:
    """Afterwards slice `rank` of bounds(numel, world_size) holds the sum; other slices hold partial sums.

    world_size − 1 steps; sends all slices but its own: (N−1)/N · M bytes.
    """
    owned, right, left = bounds(numel, world_size), (rank + 1) % world_size, (rank - 1) % world_size
    return [
        _step(right, owned[(rank - s - 1) % world_size], left, owned[(rank - s - 2) % world_size], "sum")
        for s in range(world_size - 1)
    ]


def ring_all_gather(rank: int, world_size: int, numel: int) -> Schedule:
    """Afterwards every slice holds what its owner held. world_size − 1 steps, (N−1)/N · M bytes."""
    owned, right, left = bounds(numel, world_size), (rank + 1) % world_size, (rank - 1) % world_size
    return [
        _step(right, owned[(rank - s) % world_size], left, owned[(rank - s - 1) % world_size], "copy")
        for s in range(world_size - 1)
    ]


def ring_all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Reduce-scatter, then all-gather: 2(N−1) steps, 2(N−1)/N · M bytes a rank whatever N is."""
    return ring_reduce_scatter(rank, world_size, numel) + ring_all_gather(rank, world_size, numel)


# --- root: the naive way, everything through one rank


def root_reduce(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """The root takes one peer after the other, in rank order, so it needs scratch for one message only."""
    if rank != root:
        return [Step(sends=_out(root, (0, numel)))]
    return [Step(receives=_in(peer, (0, numel), "sum")) for peer in range(world_size) if peer != root]


def root_broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """The root sends the whole to each peer: one step, (N−1) · M bytes through the root."""
    if world_size == 1:
        return []
    if rank != root:
        return [Step(receives=_in(root, (0, numel), "copy"))]
    return [
        Step(sends=tuple(o for peer in range(world_size) if peer != root for o in _out(peer, (0, numel))))
    ]


def root_all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Reduce to rank 0, broadcast from it: 2(N−1) · M bytes through rank 0."""
    return root_reduce(rank, world_size, numel, 0) + root_broadcast(rank, world_size, numel, 0)


# --- trees and doubling: few steps, for small messages


def tree_reduce(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Binomial tree: ceil(log2 N) steps on the critical path; every rank but the root sends M once."""
    place = (rank - root) % world_size
    steps: Schedule = []
    distance = 1
    while distance < world_size:
        if place & distance:
            return [*steps, Step(sends=_out((rank - distance) % world_size, (0, numel)))]
        if place + distance < world_size:
            steps.append(Step(receives=_in((rank + distance) % world_size, (0, numel), "sum")))
        distance *= 2
    return steps


def tree_broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """tree_reduce backwards: a rank that sent receives a copy, one that received sends."""
    backwards = reversed(tree_reduce(rank, world_size, numel, root))
    return [
        Step(
            sends=tuple(Outgoing(r.peer, r.start, r.stop) for r in step.receives),
            receives=tuple(Incoming(s.peer, s.start, s.stop, "copy") for s in step.sends),
        )
        for step in backwards
    ]


def tree_all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Up the tree to rank 0 and down again: 2 ceil(log2 N) steps of M bytes."""
    return tree_reduce(rank, world_size, numel, 0) + tree_broadcast(rank, world_size, numel, 0)


def recursive_doubling(rank: int, world_size: int, numel: int) -> Schedule:
    """Exchange the whole with the rank at distance 1, 2, 4, ...: log2 N steps of M bytes.

    For any N: first the ranks above the largest power of two P are folded into rank − P; they get the result
    last.
    """
    power = 1 << (world_size.bit_length() - 1)
    whole = (0, numel)
    if rank >= power:
        other = rank - power
        return [Step(sends=_out(other, whole)), Step(receives=_in(other, whole, "copy"))]
    steps: Schedule = []
    folded = rank + power < world_size
    if folded:
        steps.append(Step(receives=_in(rank + power, whole, "sum")))
    distance = 1
    while distance < power:
        steps.append(_step(rank ^ distance, whole, rank ^ distance, whole, "sum"))
        distance *= 2
    if folded:
        steps.append(Step(sends=_out(rank + power, whole)))
    return steps


# --- in a chain


def pipelined_ring_broadcast(rank: int, world_size: int, numel: int, root: int, parts: int) -> Schedule:
    """Along the ring in S parts: a rank passes one part on while it receives the next.

    K ranks at B bytes/s take (K−2+S) · M/(S·B) instead of the (K−1) · M/B of one part.
    """
    if parts < 1:
        raise ValueError(f"a message is cut into at least 1 part, not {parts}")
    if world_size == 1:
        return []
    ranges = bounds(numel, parts)
    place = (rank - root) % world_size
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if place == 0:
        return [Step(sends=_out(right, part)) for part in ranges]
    if place == world_size - 1:
        return [Step(receives=_in(left, part, "copy")) for part in ranges]
    between = [_step(right, ranges[s - 1], left, ranges[s], "copy") for s in range(1, parts)]
    return [Step(receives=_in(left, ranges[0], "copy")), *between, Step(sends=_out(right, ranges[-1]))]


_ALL_REDUCE = {
    "root": root_all_reduce,
    "ring": ring_all_reduce,
    "recursive_doubling": recursive_doubling,
    "tree": tree_all_reduce,
}


# --- what it costs


class Cost(NamedTuple):
    """The critical path: time = steps · latency + nbytes / bandwidth, by the formulae of the textbooks."""

    steps: int
    nbytes: float  # through the busiest rank, in one direction at a time


def cost(op: str, name: str, world_size: int, nbytes: float, parts: int = DEFAULT_PARTS) -> Cost:
    """Steps and bytes of a flat schedule. nbytes: M, of the whole tensor. Hierarchical is a sum
    of several."""
    check_name(op, name)
    n, m = world_size, float(nbytes)
    if n == 1:
        return Cost(0, 0.0)
    halves = 2 if op == "all_reduce" else 1
    if name == "ring":
        return Cost(halves * (n - 1), halves * (n - 1) / n * m)
    if name == "root":
        gather_steps, scatter_steps = (n - 1) * (op != "broadcast"), int(op != "reduce")
        return Cost(gather_steps + scatter_steps, halves * (n - 1) * m)
    if name == "tree":
        depth = (n - 1).bit_length()
        return Cost(halves * depth, halves * depth * m)
    if name == "recursive_doubling":
        steps = n.bit_length() - 1 + (0 if n & (n - 1) == 0 else 2)
        return Cost(steps, steps * m)
    if name == "pipelined_ring":
        return Cost(n - 2 + parts, (n - 2 + parts) * m / parts)
    raise ValueError(
        "hierarchical has two kinds of links: add up the ring's cost in the host and between hosts"
    )


# --- helpers


def _out(peer: int, part: Range) -> tuple[Outgoing, ...]:
    return (Outgoing(peer, *part),) if part[0] < part[1] else ()


def _in(peer: int, part: Range, how: Literal["sum", "copy"]) -> tuple[Incoming, ...]:
    return (Incoming(peer, *part, how),) if part[0] < part[1] else ()


def _step(to: int, sent: Range, source: int, got: Range, how: Literal["sum", "copy"]) -> Step:
    return Step(_out(to, sent), _in(source, got, how))
