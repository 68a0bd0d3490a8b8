"""Measures how fast ranks can talk. link_types.py defines the words, choice.py takes the schedule that is the
fastest by them for a message of some size.

    links = measure(group, hosts)                   # all ranks together; the same result on every rank
    print(table_line(links))                        # link  gloo 1.4 GB/s, 165 us in the host
    print(choose("all_reduce", 16 << 20, links))    # 16 MiB all_reduce: ring, 13 ms predicted (native 15)
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from imece.collectives.execute import Message, post
from imece.collectives.link_types import Hosts, Link, Links, Native
from imece.collectives.schedules import SCHEDULES

SMALL_BYTES, LARGE_BYTES = 8, 2 << 20
ROUNDS, PINGS = 7, 5  # medians over rounds, of several small messages: one is near the clock's grain
ALL_PAIRS = 8  # up to this many ranks, every pair is measured


def measure(
    group: dist.ProcessGroup | None = None,
    hosts: Hosts | None = None,
    device: torch.device | str = "cpu",
) -> Links:
    """Time messages between pairs of ranks, and the backend's own collectives. All ranks call this together.

    hosts: for each host its ranks in the group; None: all on one. device: where the tensors lie (NCCL: cuda).
    One pair talks at a time. Up to 8 ranks, all pairs are measured (28 at most), beyond that a sample of
    neighbours. Two ranks on Gloo take about 0.3 s.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None, "no process group"
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    hosts = tuple(tuple(host) for host in hosts) if hosts is not None else (tuple(range(size)),)
    pairs = pairs_to_measure(hosts)
    found = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    for index, (one, other) in enumerate(pairs):
        dist.barrier(group)
        if rank in (one, other):
            pair = _ping_pong(group, rank == one, other if rank == one else one, device)
            if rank == one:
                found[index] = torch.tensor(pair, dtype=torch.float64, device="cpu")
    # One rank wrote each row, so the sum gives all ranks the same numbers.
    dist.all_reduce(found, group=group)
    rows = found.tolist()
    measured = tuple((a, b, Link(*row)) for (a, b), row in zip(pairs, rows, strict=True))
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
    return Links(
        backend=dist.get_backend(group),
        world_size=size,
        hosts=hosts,
        pairs=measured,
        inside=_median([link for a, b, link in measured if host_of[a] == host_of[b]]),
        between=_median([link for a, b, link in measured if host_of[a] != host_of[b]]),
        native=_native(group, device),
        sum_s_per_byte=_slowest(_sum_s_per_byte(device), group, device),
    )


def pairs_to_measure(hosts: Hosts) -> list[tuple[int, int]]:
    """All pairs of up to 8 ranks; else neighbours in one host, and the first ranks of neighbouring hosts."""
    ranks = sorted(rank for host in hosts for rank in host)
    if len(ranks) <= ALL_PAIRS:
        return [(a, b) for a in ranks for b in ranks if a < b]
    inside = max(hosts, key=len)[:ALL_PAIRS]
    firsts = [host[0] for host in hosts][:ALL_PAIRS]
    near = [*itertools.pairwise(inside), *itertools.pairwise(firsts)]
    return sorted({(min(pair), max(pair)) for pair in near})


def _ping_pong(
    group: dist.ProcessGroup, first: bool, peer: int, device: torch.device | str
) -> tuple[float, float]:
    """(latency in s, bytes/s) to the peer, a rank in the group; both sides call this at the same time."""

    def one_way(tensor: torch.Tensor, sends: bool) -> None:
        message = [Message(tensor, peer, 0)]
        for work in post(message if sends else [], [] if sends else message, group, alone=True):
            work.wait()

    def there_and_back(tensor: torch.Tensor, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            one_way(tensor, sends=first)
            one_way(tensor, sends=not first)
        _finish(device)
        return (time.perf_counter() - began) / times / 2

    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    there_and_back(small, 2)  # opens the connection
    there_and_back(large, 1)
    # In turn, so that other load on the machine disturbs both alike.
    rounds = [(there_and_back(small, PINGS), there_and_back(large, 1)) for _ in range(ROUNDS)]
    latency_s, large_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    # On a loaded machine a small message can take longer than a large one: then half the time counts for
    # the bytes.
    return min(latency_s, large_s), LARGE_BYTES / max(large_s - latency_s, large_s / 2)


def _native(group: dist.ProcessGroup, device: torch.device | str) -> dict[str, Native]:
    """Times of the backend's own collectives, each at a small and a large size; the slowest rank counts."""
    size = dist.get_world_size(group)

    def timed(op: str, nbytes: int) -> float:
        numel = nbytes // 4 // size * size
        whole = torch.zeros(numel, device=device)
        part = torch.zeros(numel // size, device=device)
        run: Callable[[], object] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
            "reduce": lambda: dist.reduce(whole, group=group, group_dst=0),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(size)), group=group),
            "all_gather": lambda: dist.all_gather(list(whole.chunk(size)), part, group=group),
        }[op]
        took = []
        for _ in range(1 + ROUNDS):
            dist.barrier(group)
            began = time.perf_counter()
            run()
            _finish(device)
            took.append(time.perf_counter() - began)
        return _slowest(statistics.median(took[1:]), group, device)

    found = {}
    for op in SCHEDULES:
        small_bytes = 4 * size
        small_s, large_s = timed(op, small_bytes), timed(op, LARGE_BYTES)
        found[op] = Native(small_s, max(0.0, large_s - small_s) / (LARGE_BYTES - small_bytes))
    return found


def _sum_s_per_byte(device: torch.device | str) -> float:
    one, other = (torch.zeros(LARGE_BYTES // 4, device=device) for _ in range(2))
    took = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        one.add_(other)
        _finish(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:]) / LARGE_BYTES


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device | str) -> float:
    """The same number on all ranks: the largest."""
    worst = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return float(worst.item())


def _finish(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _median(links: list[Link]) -> Link | None:
    if not links:
        return None
    return Link(
        statistics.median(link.latency_s for link in links),
        statistics.median(link.bytes_per_s for link in links),
    )
