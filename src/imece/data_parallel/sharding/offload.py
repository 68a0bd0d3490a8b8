"""What the optimizer steps, kept in the host's memory instead of the device's.

    device      where forward and backward run
    host        the other memory: a GPU's host; the optimizer steps there
    hosted      in the host's memory: a shard of masters, of summed gradients or of parameters
    up, down    a copy from the host to the device, and the reverse
    lane        the order of copies: beside what the device computes, but not before what they read is written

A copy that does not block has only begun when the call returns. So every place where one memory relies on the
other asks the lane:

    within      a collective reads what comes up
    reuse       memory is written again while a copy down may still read it
    wait        the host reads what came down, or writes what goes up; later work of the device comes behind
                it

(Ren et al. 2021 describe the optimizer's side; their delayed step, which is not bit-equal, is left out.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.optim import Optimizer

from imece.data_parallel.strategy import Strategy

_FUSED_ON_CPU = frozenset(["Adagrad", "Adam", "AdamW", "SGD"])  # those that torch has as one CPU kernel


class Lane(Protocol):
    """Copies between two memories. The table above says when to call which method."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, behind everything the device has been told so far; dtypes may differ."""

    def within(self) -> contextlib.AbstractContextManager[object]:
        """Inside, the device's work comes behind all copies up, and beside what it computes."""

    def reuse(self, memory: torch.Tensor) -> None:
        """The device continues behind all copies down out of this storage."""

    def wait(self) -> None:
        """All copies are done when this returns."""


class Direct:
    """A single memory: a copy is done when `copy` returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def within(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reuse(self, memory: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        pass


class Streams:
    """A GPU and its host: two streams, so that a gradient that has to wait does not hold up parameters."""

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
            # If dtypes differ, the device casts, in memory that belongs to this stream.
            target.copy_(source, non_blocking=True)
            if target.is_cuda:
                self._came.record(stream)
            else:
                self._went.record(stream)
                event = torch.cuda.Event()
                event.record(stream)
                self._reads[source.untyped_storage()._cdata] = event

    def within(self) -> contextlib.AbstractContextManager[object]:
        # Not on the stream of forward, which would then wait for a unit that is gathered ahead.
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
    """Also this rank's shards of parameters, if units are gathered; not only what the optimizer steps."""
    lane: Lane
    empty: Callable[[int, torch.dtype], torch.Tensor]
    """(elements, dtype) -> 1D, in the host's memory."""
    takes: Callable[[int], int] = int
    """Bytes of such a tensor -> bytes that it takes in the host's memory."""

    @property
    def name(self) -> Literal["optimizer", "parameters"]:
        return "parameters" if self.parameters else "optimizer"

    def hosted(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy of the shard in the host's memory."""
        made = self.empty(shard.numel(), shard.dtype)
        with torch.no_grad():
            return made.copy_(shard)


def offload_of(name: str, devices: Iterable[torch.device]) -> Offload:
    """The Offload for a model on these devices. ValueError for CPUs, and for several devices."""
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
    """ValueError for an offload, one of OFFLOADS, that does not go with this strategy."""
    if not strategy.optimizer:
        raise ValueError(f"offload is for sharded strategies, such as zero1, not for {strategy.name!r}")
    if name == "parameters" and not strategy.parameters:
        raise ValueError(
            f"offload='parameters' is for zero3 and hybrid; {strategy.name!r} has all parameters on each "
            f"rank: use offload='optimizer'"
        )


def can_offload(name: str, strategy: Strategy) -> bool:
    """Whether `check_strategy` accepts this."""
    return strategy.optimizer and (name == "optimizer" or strategy.parameters)


def check_steps_on_host(optimizers: Iterable[Optimizer]) -> None:
    """ValueError, with the reason, for an optimizer that steps only on GPUs."""
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
    """Bytes that torch pins for a tensor of this size: the next power of two
    (`torch.cuda.host_memory_stats`)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    # Copies out of memory that is not pinned block, whatever flag they get.
    return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")
