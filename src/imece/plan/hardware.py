"""What ranks run on: rates, memory and links.

All rates are of one direction: an H100's NVLink is 450 GB/s, not the 900 that counts both, and an NDR port is
400 Gb/s = 50 GB/s.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """The link between a rank and its neighbours at one level of the network."""

    bandwidth: float  # bytes/s, one direction, per rank, by the vendor
    latency: float  # s per message
    efficiency: float = 0.8  # part of the bandwidth that a large message reaches
    hop_s: float = 0.0  # s that each host of a ring adds for each 384 MiB
    switch: float = 1.0  # speed-up of an all-reduce by a switch that adds
    lanes: tuple[
        float, ...
    ] = ()  # part of the bandwidth that a ring of 1, 2, ... ranks has; if empty, all of it

    @property
    def rate(self) -> float:
        """Bytes/s that large messages reach."""
        return self.bandwidth * self.efficiency

    def ring_rate(self, ranks: int) -> float:
        """The same in a ring of so many ranks."""
        return self.rate * (self.lanes[ranks - 1] if ranks <= len(self.lanes) else 1.0)


@dataclass(frozen=True)
class Gpu:
    """One device."""

    name: str
    peak: float  # FLOP/s of dense bf16 matrix products (without bf16: fp16; CPUs: fp32), by the vendor
    peak_fp32: float  # FLOP/s of fp32 matrix products, without TF32: torch's default
    reachable: float  # part of `peak` that the best measured product reaches
    memory_bytes: int  # usable by a program, before any context
    memory_bandwidth: float  # bytes/s
    overhead_bytes: int  # context, libraries and communicators, outside the framework's allocator
    price_per_hour: float | None = None  # US dollars, only for orientation
    sustained: float = 0.9  # part of the reachable rate that products of usual shapes sustain
    flash: tuple[float, float] = (0.4, 0.34)  # part of `peak` in flash attention, forward and backward
    multiprocessors: int = 100  # over which a product's tiles are spread; 1: a CPU
    bf16: bool = True  # whether matrix units have it
    fp8: float = 0.0  # rate of dense FP8 products, summed in fp32, relative to bf16; 0: none

    def __hash__(self) -> int:  # of one field only: instances are keys of caches that every candidate asks
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        """Whether it is a rank on cores of its host."""
        return self.multiprocessors == 1

    def multiplying(self, element_bytes: int) -> Gpu:
        """The same GPU with the `peak` of products of such elements."""
        return replace(self, peak=self.peak_fp32) if element_bytes == 4 else self


@dataclass(frozen=True)
class Cluster:
    """`hosts` of `gpus_per_host` devices each."""

    gpu: Gpu
    gpus_per_host: int
    hosts: int
    inside: Link  # between the devices of a host
    between: Link  # between hosts, for each device
    host: Link = Link(32e9, latency=6e-6, efficiency=0.75)  # between a device and its host's memory

    @property
    def gpus(self) -> int:
        return self.gpus_per_host * self.hosts

    @functools.lru_cache(maxsize=64)  # noqa: B019 - clusters are few, and small
    def multiplying(self, element_bytes: int) -> Cluster:
        """The same cluster with the devices' `peak` for products of such elements."""
        return replace(self, gpu=self.gpu.multiplying(element_bytes))
