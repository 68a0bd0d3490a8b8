"""What is known about the links between ranks: times of messages, and of the backend's own collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Hosts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, or the typical one of a level (in a host, between hosts)."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, steps: float, nbytes: float) -> float:
        return steps * self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        rate = self.bytes_per_s / 1e9
        return f"{rate:.{1 if rate >= 1 else 2}f} GB/s, {self.latency_s * 1e6:,.0f} us"


@dataclass(frozen=True)
class Native:
    """The backend's own collective, timed as a whole at two sizes: fixed_s + nbytes * s_per_byte."""

    fixed_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Links:
    """The result of `measure`. It is equal on all ranks, so all ranks choose alike."""

    backend: str
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # ranks in the group, of each host
    pairs: tuple[tuple[int, int, Link], ...]  # lower rank, higher rank
    inside: Link | None  # median pair of one host; None if no host has two ranks
    between: Link | None  # median pair of two hosts; None on one host
    native: Mapping[str, Native]  # by operation
    sum_s_per_byte: float  # adding one fp32 message to another, on the slowest rank


def table_line(*measured: Links) -> str:
    """One line for `imece doctor`: "link  shm 15.1 GB/s, 18 us    gloo 1.4 GB/s, 1,650 us"."""
    return "link  " + "    ".join(_words(links) for links in measured)


def _words(links: Links) -> str:
    where = " in the host" if links.between else ""
    levels = [
        f"{link}{where}" for link, where in ((links.inside, where), (links.between, " between hosts")) if link
    ]
    return f"{links.backend} " + ("; ".join(levels) or "one rank")
