"""When things happened in one step: forward, backward, each bucket's communication. Times of perf_counter."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BucketTrace:
    """One bucket's way."""

    index: int
    nbytes: int
    ready_s: float  # its last gradient is there
    launched_s: float  # all buckets before it had left too
    done_s: float = 0.0  # reduced


@dataclass
class StepTrace:
    """One synchronised forward and backward."""

    forward_start_s: float
    backward_start_s: float = 0.0
    backward_end_s: float = 0.0  # the last gradient is there, before waiting for any bucket
    end_s: float = 0.0  # every .grad is what the optimizer wants
    buckets: list[BucketTrace] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Forward and backward, with what communication cost them."""
        return self.backward_end_s - self.forward_start_s

    @property
    def exposed_s(self) -> float:
        """Communication that the backward did not hide."""
        return self.end_s - self.backward_end_s

    @property
    def communication_s(self) -> float:
        """Time in which at least one bucket was under way."""
        total, reached = 0.0, float("-inf")
        for bucket in sorted(self.buckets, key=lambda each: each.launched_s):
            total += max(0.0, bucket.done_s - max(bucket.launched_s, reached))
            reached = max(reached, bucket.done_s)
        return total

    @property
    def hidden_s(self) -> float:
        """Communication behind which backward went on."""
        return max(0.0, self.communication_s - self.exposed_s)
