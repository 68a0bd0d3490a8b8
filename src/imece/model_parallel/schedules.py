"""The schedules of a pipeline: their names, what they need, what they cost.

gpipe        all forwards, then all backwards: activations of all m micro-batches are kept
             (Huang et al., GPipe, 2019)
1f1b         a backward as soon as there can be one: activations of at most p micro-batches
             (Narayanan et al., PipeDream, 2019; with the weights of one step, as PipeDream-Flush, 2021)
interleaved  1f1b with v stages a rank, each a v-th as long (Narayanan et al., Megatron-LM, 2021)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imece.listing import kind_of

SCHEDULES = ("gpipe", "1f1b", "interleaved")
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Span:
    """A time in which a rank was busy."""

    what: str
    """"forward" or "backward"."""
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


class Moment:
    """A point in time: on the host's clock, or on a GPU, which the host runs ahead of, in the current
    stream."""

    def __init__(self, device: torch.device) -> None:
        self._host_s = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def since(self, earlier: Moment) -> float:
        """Seconds from `earlier` to this. On a GPU the host waits until the stream has come here."""
        if self._event is None or earlier._event is None:
            return self._host_s - earlier._host_s
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True)
class Mark:
    """A span whose times a GPU may not know yet."""

    what: str
    stage: int
    micro_batch: int
    start: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """Seconds that it took; waits as `Moment.since` does."""
        return self.end.since(self.start)


class StageError(Exception):
    """Its cause is the exception that a stage raised."""


def check_schedule(schedule: str, micro_batches: int, chunks: int, size: int) -> None:
    """ValueError, with what to do, for a schedule that cannot run. size: ranks along the axis pipeline."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: one of {', '.join(SCHEDULES)}")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: a whole number, at least 1")
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: a whole number, at least 1")
    if chunks > 1 and schedule != "interleaved":
        raise ValueError(f"chunks={chunks} with schedule={schedule!r}: only 'interleaved' has more than 1")
    if schedule == "1f1b" and micro_batches < size:
        raise ValueError(
            f"micro_batches={micro_batches}: 1f1b needs at least one for each of {size} stages; take more, "
            "or schedule='gpipe'"
        )
    rounds = max(1, micro_batches // size)
    if schedule == "interleaved" and micro_batches % rounds:
        raise ValueError(
            f"micro_batches={micro_batches}: interleaved runs them in {rounds} equal rounds on {size} ranks; "
            f"take {micro_batches - micro_batches % size}"
        )


def check_loss(loss: object, output: object) -> None:
    """ValueError unless it is one number, and has a gradient if the last stage's output has."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
        raise ValueError(
            f"loss returned {got}: it returns the mean of a micro-batch, a tensor of one element"
        )
    if isinstance(output, Tensor) and output.requires_grad and not loss.requires_grad:
        raise ValueError("loss returned a tensor that has no gradient, so nothing would be trained")


def ideal_bubble(micro_batches: int, chunks: int, size: int) -> float:
    """The part of a step in which a rank idles, if all stages cost the same and messages cost nothing.

    That is (p - 1) / (v m) of the time it is busy, with p = size, v = chunks, m = micro_batches.
    """
    idle = (size - 1) / (chunks * micro_batches)
    return idle / (1 + idle)
