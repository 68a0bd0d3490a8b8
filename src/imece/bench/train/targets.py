"""What was promised for `imece train`, and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imece.bench.targets import times

OURS = {"bf16": "imece-bf16", "fp32": "imece-fp32"}
COMPILED = {"bf16": "imece-compiled-bf16", "fp32": "imece-compiled-fp32"}
"""The same ways with --compute.compile."""
PLAIN = {"bf16": "plain-bf16", "fp32": "plain-fp32"}
SAME_LOSS = {"bf16": "plain-loss-bf16", "fp32": "plain-loss-fp32"}
ONE_RANK, ALONE = "imece-1-rank", "no-sync"
WAYS = (*OURS.values(), *COMPILED.values(), *PLAIN.values(), *SAME_LOSS.values(), ONE_RANK, ALONE)
DEFAULT = "default"
"""The way of OURS with the precision that `imece train` takes here."""


@dataclass(frozen=True)
class TrainTarget:
    """One promise."""

    what: Literal["speed", "limit", "overhead", "delay", "memory"]
    """speed: `way` has at least `bound` times the tokens/s of `against`; limit: the same, printed as a share.
    For DEFAULT, each at most `bound`: overhead: share of a step that is neither forward, backward, optimizer
    nor communication; delay: steps by which a save delays training; memory: growth of resident memory during
    a save, in multiples of what the rank writes."""
    bound: float
    way: str = DEFAULT
    against: str = ""

    @property
    def text(self) -> str:
        """The target's text in the summary."""
        return {
            "speed": f"{self.way}: at least {self.bound:g} x the tokens/s of {self.against}",
            "limit": f"{self.way}: at least {self.bound:.0%} of as many ranks that never wait for each other",
            "overhead": f"{self.way}: at most {self.bound:.0%} of a step is the loop's own",
            "delay": f"save: holds training up for at most {self.bound:g} step",
            "memory": f"save: memory grows by at most {self.bound:g} copy of what the rank writes",
        }[self.what]

    def met(self, found: float) -> bool:
        """Whether the measured figure is good enough."""
        if self.what in ("speed", "limit"):
            return found >= self.bound
        # Only tells one copy from two: a thread, a manifest and code that runs for the first time need memory
        # too.
        return found <= self.bound * (1.1 if self.what == "memory" else 1.0)

    def figure(self, found: float) -> str:
        """The measured figure for people."""
        units = {"limit": ".1%", "overhead": ".2%"}
        if self.what in units:
            return format(found, units[self.what])
        return times(found, self.bound) if self.what == "speed" else f"{found:.2f}"


TRAIN = (
    TrainTarget("speed", 1.2, OURS["fp32"], PLAIN["fp32"]),
    TrainTarget("speed", 1.2, COMPILED["fp32"], PLAIN["fp32"]),
    TrainTarget("speed", 1.2, OURS["bf16"], PLAIN["bf16"]),
    TrainTarget("speed", 1.6, DEFAULT, PLAIN["fp32"]),
    TrainTarget("limit", 0.95, DEFAULT, ALONE),
    TrainTarget("overhead", 0.02),
    TrainTarget("delay", 1.0),
    TrainTarget("memory", 1.0),
)
