"""What was promised for one GPU, and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BARE, OURS, TORCH, COMPILED = "bare", "imece", "torch-ddp", "imece-compiled"
ZERO3, FULLY_SHARD = "zero3", "fully-shard"
FLAT, FUSED, FOREACH = "flat-shards", "fused", "foreach"
WAYS = (BARE, OURS, TORCH)
STRATEGIES = ("zero1", "zero2", ZERO3, FULLY_SHARD)
OPTIMIZERS = (FLAT, FUSED, FOREACH)


@dataclass(frozen=True)
class GpuTarget:
    """One promise."""

    what: Literal["time", "peak", "syncs", "rate", "overhead", "optimizer"]
    """time: a step of `way` takes at most `bound` times as long as one of `against`. peak: it allocates at
    most `bound` times the memory. optimizer: its step alone takes at most `bound` times as long. syncs: the
    host waits for the GPU at most so often per step. rate: a step reaches at least this share of the matrix
    rate. overhead: the loop of `imece train` takes at most this share of a step."""
    bound: float
    way: str = OURS
    against: str = ""

    @property
    def text(self) -> str:
        """The target's text in the summary."""
        return {
            "time": f"{self.way}: at most {self.bound:g} x the time of {self.against}",
            "peak": f"{self.way}: peak memory at most {self.bound:g} x that of {self.against}",
            "syncs": f"{self.way}: the host waits for the GPU at most {self.bound:g} times in a step",
            "rate": f"{self.way}: at least {self.bound:.0%} of the rate of large matrix products",
            "overhead": f"imece train: at most {self.bound:.0%} of a step is the loop's own",
            "optimizer": f"AdamW {self.way}: at most {self.bound:g} x the time of AdamW {self.against}",
        }[self.what]

    def met(self, found: float) -> bool:
        """Whether the measured figure is good enough."""
        return found >= self.bound if self.what == "rate" else found <= self.bound

    def figure(self, found: float) -> str:
        """The measured figure for people."""
        if self.what in ("rate", "overhead"):
            return f"{found:.2%}"
        return f"{found:.1f}" if self.what == "syncs" else f"{found:.3f} x"


GPU = (
    GpuTarget("time", 1.01, OURS, BARE),
    GpuTarget("time", 1.0, OURS, TORCH),
    GpuTarget("peak", 1.0, OURS, TORCH),
    GpuTarget("syncs", 0.0, OURS),
    GpuTarget("rate", 0.5, COMPILED),
    GpuTarget("overhead", 0.01),
    GpuTarget("time", 1.0, ZERO3, FULLY_SHARD),
    GpuTarget("peak", 1.0, ZERO3, FULLY_SHARD),
    GpuTarget("optimizer", 1.0, FLAT, FUSED),
    GpuTarget("optimizer", 1.0, FLAT, FOREACH),
)
