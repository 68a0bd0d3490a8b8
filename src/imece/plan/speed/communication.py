"""Time of collectives by level of the network, and the bytes that each rank sends.

A group is a number of ranks on a number of hosts. Ranks of one host use its inside links. Traffic between
hosts uses the ports of all the group's ranks on a host at once: with eight ranks per host, eight ports.

A ring all_gather or reduce_scatter of S bytes takes (n - 1)/n x S over the slower of the two levels, and a
latency for each hop. Between hosts a ring goes round once for each 384 MiB, and each round costs `hop_s` per
host. An all_reduce is two of these, or a tree with fewer hops, whichever is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from imece.plan.hardware import Cluster, Link

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]

_LOOP_BYTES = 384 * 2**20  # that go round between hosts at once
_OVERLAP = 0.85  # hops of a long ring overlap: n hops count as n to this power
_TREE_HOPS = 1.6  # ring hops that up and down one level of a tree cost
_BASE_S = 20e-6  # of any collective: its kernel starts on every rank


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: neighbours along one axis."""

    ranks: int
    ranks_per_host: int  # on the host with fewest: the ports between hosts
    hosts: int


def along(cluster: Cluster, size: int, stride: int) -> Group:
    """`size` ranks at intervals of `stride`, in the order of hosts: of all such groups, the one on most
    hosts.

    Groups follow each other regardless of hosts: groups of six ranks on hosts of eight are 6, 2 + 4, 4 + 2
    and 6.
    """
    inside, span = cluster.gpus_per_host, size * stride
    if cluster.hosts == 1 and span <= inside:
        return Group(size, size, 1)
    piece = math.gcd(inside, span)
    hosts = min(size, (inside - piece + span - 1) // inside + 1)
    return Group(size, max(1, min(size, piece // stride)), hosts)


def sent_bytes(op: Op, size_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring. `size_bytes`: the larger of input and output."""
    if ranks == 1:
        return 0.0
    if op == "send":
        return size_bytes
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * size_bytes


def collective_s(cluster: Cluster, op: Op, size_bytes: float, group: Group) -> float:
    """Seconds of one collective. `size_bytes`: the larger of input and output."""
    if group.ranks <= 1 or size_bytes <= 0:
        return 0.0
    around = _ring_s(cluster, size_bytes, group)
    if op != "all_reduce":
        return _BASE_S + around
    if group.hosts == 1:
        hops = 2 * (group.ranks - 1) * cluster.inside.latency
        rate = cluster.inside.ring_rate(group.ranks) * _switch(cluster.inside, group.ranks)
        return _BASE_S + hops + sent_bytes(op, size_bytes, group.ranks) / rate
    return _BASE_S + min(2 * around, _tree_s(cluster, size_bytes, group))


def _switch(link: Link, ranks: int) -> float:
    """Speed-up of an all-reduce by a switch that adds. It is at most the ratio of bytes: a rank sends (n +
    1)/n of them instead of 2 (n - 1)/n. Four ranks gain a fifth, two nothing."""
    return max(1.0, min(link.switch, 2 * (ranks - 1) / (ranks + 1)))


def send_s(cluster: Cluster, size_bytes: float, between_hosts: bool) -> float:
    """Seconds of one message to a neighbour."""
    link = cluster.between if between_hosts else cluster.inside
    return 10e-6 + link.latency + size_bytes / link.rate


def _rate(cluster: Cluster, group: Group) -> float:
    """Bytes/s of a ring over the group's slower level."""
    if group.hosts == 1:
        return cluster.inside.ring_rate(group.ranks)
    ports = cluster.between.rate * group.ranks_per_host
    return min(ports, cluster.inside.rate) if group.ranks_per_host > 1 else ports


def busy_s(cluster: Cluster, op: Op, size_bytes: float, group: Group) -> float:
    """The part of `collective_s` that uses the memory's rate: its length if bytes between hosts moved as fast
    as inside. Its kernels run longer, but slow bytes take little of the memory's rate."""
    whole = collective_s(cluster, op, size_bytes, group)
    if group.hosts == 1 or whole == 0.0:
        return whole
    sent = sent_bytes(op, size_bytes, group.ranks)
    slower = sent / _rate(cluster, group) - sent / cluster.inside.rate
    return whole - max(0.0, slower)


def _ring_s(cluster: Cluster, size_bytes: float, group: Group) -> float:
    inside = (group.ranks - group.hosts) * cluster.inside.latency
    moving = sent_bytes("all_gather", size_bytes, group.ranks) / _rate(cluster, group)
    if group.hosts == 1:
        return inside + moving
    return inside + moving + _hops(group.hosts - 1) * _hop_s(cluster.between, size_bytes)


def _tree_s(cluster: Cluster, size_bytes: float, group: Group) -> float:
    inside = 2 * (group.ranks_per_host - 1) * cluster.inside.latency
    depth = math.log2(group.hosts)
    moving = 2 * size_bytes * (group.ranks - 1) / group.ranks / _rate(cluster, group)
    return inside + moving + _TREE_HOPS * depth * _hop_s(cluster.between, size_bytes)


def _hop_s(link: Link, size_bytes: float) -> float:
    return link.latency + link.hop_s * max(1.0, size_bytes / _LOOP_BYTES)


def _hops(hosts: int) -> float:
    return float(hosts**_OVERLAP)
