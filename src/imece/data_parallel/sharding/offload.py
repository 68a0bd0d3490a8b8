"""What the optimizer steps, kept in the host's memory instead of the device's.

    device      where forward and backward run
    host        the other memory: a GPU's host; the optimizer steps there
    hosted      a shard of masters, of summed gradients or of parameters that lies there
    up, down    a copy from the host to the device, and the reverse
    lane        the order of copies: beside what the device computes, but not before what they read is written

A copy that does not block has begun when the call returns, and no more is known of it. So the lane is asked
at each place where one memory trusts the other:

    within      a collective that reads what comes up
    reuse       memory that is written again while a copy down may still read it
    wait        the host reads what came down, or writes what goes up; what the device is told then is behind

(Ren et al. 2021 have the optimizer's side of it; their delayed step, which is not bit-equal, is left out.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.optim import Optimizer

from imece.data_parallel.strategy import Strategy
from imece.footprint import OFFLOADS

_FUSED_ON_CPU = frozenset(["Adagrad", "Adam", "AdamW", "SGD"])  # those that torch has as one CPU kernel


class Lane(Protocol):
    """Copies between two memories. See the table above for when each is asked."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, behind all that the device has been told to do; dtypes may differ."""

    def within(self) -> contextlib.AbstractContextManager[object]:
        """What the device is told inside comes behind all copies up, and beside what it computes."""

    def reuse(self, memory: torch.Tensor) -> None:
        """The device goes on behind copies down out of this storage."""

    def wait(self) -> None:
        """All copies are done when this returns."""


class Direct:
    """One memory: a copy is done when it returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def within(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reuse(self, memory: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        pass


class Streams:
    """A GPU and its host: two streams, since a gradient that has to wait must not keep parameters waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._came, self._went = torch.cuda.Event(), torch.cuda.Event()  # the last copy up, and down
        self._reads: dict[int, torch.cuda.Event] = {}  # by storage: the last copy down out of it

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.is_cuda and not source.is_cuda:
            target.copy_(source)
            return
        stream = self._up if target.is_cuda else self._down
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Where dtypes differ it is cast on the device, in memory that belongs to this stream.
            target.copy_(source, non_blocking=True)
            if target.is_cuda:
                self._came.record(stream)
            else:
                self._went.record(stream)
                event = torch.cuda.Event()
                event.record(stream)
                self._reads[source.untyped_storage()._cdata] = event

    def within(self) -> contextlib.AbstractContextManager[object]:
        # Not on the stream of forward: that would have it wait for a unit which comes ahead.
        return torch.cuda.stream(self._up)

    def reuse(self, memory: torch.Tensor) -> None:
        event = self._reads.pop(memory.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        self._came.synchronize()
        self._went.synchronize()
        self._reads.clear()


@dataclass(frozen=True)
class Offload:
    """What lies in the host's memory, and how it gets there and back."""

    parameters: bool
    """This rank's shards of parameters too, where units are gathered; not only what the optimizer steps."""
    lane: Lane
    empty: Callable[[int, torch.dtype], torch.Tensor]
    """(elements, dtype) -> 1D, in the host's memory."""
    takes: Callable[[int], int] = int
    """Bytes of one such tensor -> bytes that it takes there."""

    @property
    def name(self) -> Literal["optimizer", "parameters"]:
        return "parameters" if self.parameters else "optimizer"

    def hosted(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy of it there, with its values."""
        made = self.empty(shard.numel(), shard.dtype)
        with torch.no_grad():
            return made.copy_(shard)


def offload_of(name: str, devices: Iterable[torch.device]) -> Offload:
    """For a model on these devices. ValueError for CPUs, and for several devices."""
    found = sorted({str(each) for each in devices})
    if len(found) != 1:
        raise ValueError(f"offload={name!r} takes a model on one GPU, and this one is on {', '.join(found)}")
    device = torch.device(found[0])
    if device.type != "cuda":
        raise ValueError(
            f"offload={name!r} moves to the host's memory what is in a GPU's, and this model is on "
            f"{device.type}: leave offload out"
        )
    return Offload(name == "parameters", Streams(device), _pinned, pinned_bytes)


def check_strategy(name: str, strategy: Strategy) -> None:
    """ValueError for an unknown name, and for one that this strategy does not go with."""
    if name not in OFFLOADS:
        raise ValueError(f"unknown offload {name!r}: None, {' or '.join(map(repr, OFFLOADS))}")
    if not strategy.optimizer:
        raise ValueError(f"offload is for sharded strategies, such as zero1, not for {strategy.name!r}")
    if name == "parameters" and not strategy.parameters:
        raise ValueError(
            f"offload='parameters' is for zero3 and hybrid; {strategy.name!r} has all parameters on each "
            f"rank: use offload='optimizer'"
        )


def can_offload(name: str, strategy: Strategy) -> bool:
    """Whether `check_strategy` has nothing against it."""
    return strategy.optimizer and (name == "optimizer" or strategy.parameters)


def check_steps_on_host(optimizers: Iterable[Optimizer]) -> None:
    """ValueError, with the reason, for an optimizer that steps on GPUs alone."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if getattr(optimizer, "is_paged", False):
            raise ValueError(
                f"{name} pages its state between GPU and host by itself, and steps on GPUs alone: use the "
                f"one that is not paged with offload, or no offload"
            )
        for group in optimizer.param_groups:
            if group.get("capturable"):
                raise ValueError(f"{name}(capturable=True) steps on GPUs alone: leave it out with offload")
            if group.get("fused") and name not in _FUSED_ON_CPU:
                raise ValueError(f"{name}(fused=True) steps on GPUs alone: leave it out with offload")


def pinned_bytes(nbytes: int) -> int:
    """What torch pins for a tensor of so many: the next power of two (`torch.cuda.host_memory_stats`)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    # Of memory that is not pinned a copy blocks, whatever it is told.
    return torch.empty(numel, dtype=dtype, pin_memory=True)
