"""What ranks run on: rates, memory and links. The presets are presets.toml, each with its source.

All rates are of one direction: an H100's NVLink is 450 GB/s, not the 900 that counts both, and an NDR port is
400 Gb/s = 50 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """Between a rank and its neighbours at one level of the network."""

    bandwidth: float  # bytes/s, one direction, a rank, as the vendor says
    latency: float  # s a message
    efficiency: float  # of the bandwidth that a large message reaches
    half_bytes: float  # message size at which half of that is reached


@dataclass(frozen=True)
class Gpu:
    """One device."""

    name: str
    peak: float  # FLOP/s of dense bf16 (fp16 where there is no bf16) matrix products, as the vendor says
    peak_fp32: float  # FLOP/s of fp32 matrix products as frameworks do them (TF32 where it is the default)
    reachable: float  # part of `peak` that the best measured product reaches
    memory_bytes: int  # that a program can use before any context
    memory_bandwidth: float  # bytes/s
    overhead_bytes: int  # context, libraries and communicators, outside the framework's allocator
    launch_s: float  # of one kernel, as far as it is not hidden
    price_per_hour: float | None = None  # US dollars, for orientation only


@dataclass(frozen=True)
class Cluster:
    """`hosts` of `gpus_per_host` devices each."""

    gpu: Gpu
    gpus_per_host: int
    hosts: int
    inside: Link  # between the devices of a host
    between: Link  # between hosts, for each device

    @property
    def gpus(self) -> int:
        return self.gpus_per_host * self.hosts
