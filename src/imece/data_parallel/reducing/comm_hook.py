"""Communication hooks, which reduce buckets instead of imece, and the bucket object that they get.

That object has the interface of torch.distributed.GradBucket, which cannot be constructed from Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from imece.data_parallel.reducing.buckets import Bucket

Hook = Callable[[Any, Any], torch.futures.Future[Any]]

_OF_ONE_CALL = (
    default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook,
)  # fmt: skip


class GradBucket:
    """One bucket of gradients, at the moment when it would be reduced."""

    def __init__(
        self, index: int, buffer: torch.Tensor, gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor], last: bool,
    ) -> None:  # fmt: skip
        self._index, self._buffer, self._last = index, buffer, last
        self._own_buffer = buffer
        self._gradients, self._parameters = list(gradients), list(parameters)

    def index(self) -> int:
        """The bucket's number, in the order in which buckets leave."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, flat, not yet divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views into the buffer, shaped like the parameters.

        RuntimeError if a hook has set a buffer with fewer elements.
        """
        if self._buffer is self._own_buffer:
            return self._gradients
        return [self._in_set_buffer(each) for each in self._gradients]

    def _in_set_buffer(self, gradient: torch.Tensor) -> torch.Tensor:
        """The same elements in the buffer that a hook has set, which may have another dtype."""
        own = self._own_buffer
        start = (gradient.data_ptr() - own.data_ptr()) // own.itemsize if gradient.numel() else 0
        flat = self._buffer.narrow(0, start, gradient.numel())
        return flat.as_strided(gradient.shape, gradient.stride(), flat.storage_offset())

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Use another buffer from here on."""
        self._buffer = tensor


@dataclass
class CommHook:
    """A hook with its state."""

    state: Any
    call: Hook

    @classmethod
    def of(cls, state: object, hook: object) -> CommHook:
        """TypeError unless `hook` can be called; ValueError if its annotations describe another interface."""
        if not callable(hook):
            raise TypeError(f"a communication hook is a function (state, bucket) -> Future, not {hook!r}")
        signature = inspect.signature(hook)
        bucket = signature.parameters.get("bucket")
        if bucket is not None and bucket.annotation not in (
            inspect.Parameter.empty, dist.GradBucket, GradBucket, "dist.GradBucket", "GradBucket",
        ):  # fmt: skip
            raise ValueError(
                f"a communication hook's bucket is a dist.GradBucket; {_name(hook)} wants {bucket.annotation}"
            )
        given = signature.return_annotation
        if given is not inspect.Signature.empty and "Future" not in str(given):
            raise ValueError(
                f"a communication hook returns a torch.futures.Future; {_name(hook)} returns {given}"
            )
        return cls(state, hook)

    def one_by_one(self, device: torch.device) -> bool:
        """Whether a bucket on `device` waits for the one before it.

        On CPUs a hook's later collectives leave from other threads: the next bucket's collective could come
        between them on one rank and not on another.
        """
        return device.type == "cpu" and not any(self.call is each for each in _OF_ONE_CALL)

    def reduce(self, bucket: Bucket, *, last: bool) -> torch.futures.Future[Any]:
        """The future that the hook returns for a bucket."""
        parameters = [slot.parameter for slot in bucket.slots]
        views = [slot.view for slot in bucket.slots]
        return self.call(self.state, GradBucket(bucket.index, bucket.buffer, views, parameters, last))


def take_result(result: Any, bucket: Bucket) -> None:
    """Put the result of a hook's future into the bucket. TypeError if it is no tensor."""
    if isinstance(result, list | tuple):
        (result,) = result
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"the communication hook's future gave {type(result).__name__}, not a tensor")
    buffer = bucket.buffer
    if buffer.is_complex() and not result.is_complex():
        buffer = torch.view_as_real(buffer).view(-1)  # torch's collectives return complex tensors like this
    if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
        buffer.copy_(result.view(-1))


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", hook))
