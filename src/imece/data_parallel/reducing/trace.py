"""The times of one step: forward, backward, each bucket's communication. All are of time.perf_counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class BucketTrace:
    """The times of one bucket."""

    index: int
    nbytes: int
    ready_s: float  # its last gradient came
    launched_s: float  # it left, after all buckets before it
    done_s: float = 0.0  # reduced


@dataclass
class StepTrace:
    """One synchronised forward and backward."""

    forward_start_s: float
    backward_start_s: float = 0.0
    backward_end_s: float = 0.0  # the last gradient came; no bucket was waited for yet
    end_s: float = 0.0  # every .grad is ready for the optimizer
    buckets: list[BucketTrace] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward, including what communication cost them."""
        return self.backward_end_s - self.forward_start_s

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that backward did not hide."""
        return self.end_s - self.backward_end_s

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one bucket was under way."""
        return _union_s([(each.launched_s, each.done_s) for each in self.buckets])

    @property
    def hidden_s(self) -> float:
        """Seconds of communication while backward went on."""
        end = self.backward_end_s
        return _union_s([(each.launched_s, min(each.done_s, end)) for each in self.buckets])


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the (begin, end) spans was under way."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
