"""Tensors as the engine wants them: flat, contiguous, on the CPU; and checks of what torch passes."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import SupportsIndex, cast

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def nothing() -> None:
    """A last step that does nothing."""


def writing() -> AbstractContextManager[None]:
    """A context in which all tensors may be written to, even those of torch.inference_mode(); no gradients.

    Outside of that mode, which belongs to a thread, torch refuses. torch.inference_mode() itself takes 2 us
    more.
    """
    return cast(AbstractContextManager[None], torch._C._InferenceMode(True))


def plain(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, with its values as its bytes: `z.conj()` and its `.imag` have others.

    ValueError for a sparse tensor.
    """
    check_dense(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_and_back(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The tensor as one contiguous dimension, and a function that copies the result back if that is a copy.

    ValueError: as in `check_written`.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.view(-1), nothing
    check_written(tensor)
    copy = plain(tensor)

    def back() -> None:
        tensor.copy_(copy)

    return copy.view(-1), back


def named(group: dist.ProcessGroup, name: str, older_name: str) -> Callable[..., dist.Work]:
    """torch 2.13 renamed a few methods; older versions know the other name only."""
    found: Callable[..., dist.Work] = getattr(group, name, None) or getattr(group, older_name)
    return found


def check_rank(what: str, rank: int, group: dist.ProcessGroup) -> None:
    """ValueError unless the group has such a rank; TypeError for what is no number, as where arguments are in
    another order."""
    if not isinstance(rank, SupportsIndex):
        raise TypeError(f"{what} rank {rank!r}: a number is expected")
    if not 0 <= rank < group.size():
        raise ValueError(f"{what} rank {rank}: the group has ranks 0 to {group.size() - 1}")


def check_tag(tag: SupportsIndex) -> None:
    """ValueError for an invalid tag of a message; once on its way, it would end the group."""
    if not isinstance(tag, int | SupportsIndex) or not -(2**63) <= operator.index(tag) < 2**63:
        raise ValueError(f"tag {tag!r}: a tag is a whole number of 64 bits")


def check_tensor(op: str, given: object, argument: str = "") -> None:
    """TypeError unless `given` is a tensor. argument: which one, for calls that take two."""
    if isinstance(given, Tensor):
        return
    do = "torch.as_tensor makes one of numbers"
    if isinstance(given, list | tuple):
        lists = f"make one by torch.cat, or call torch.distributed.{op}, which takes lists"
        do = lists if argument else "call it for each"
    where = f"{op}, {argument}" if argument else op
    raise TypeError(f"{where}: a tensor is expected, not {type(given).__name__}; {do}")


def check_dense(tensor: Tensor) -> None:
    """ValueError for a sparse tensor, whose ranks may have different indices."""
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{text(tensor)} is sparse, and ranks exchange dense tensors: pass its to_dense(); or make the "
            "layer whose gradient it is with sparse=False"
        )


def check_written(tensor: Tensor) -> None:
    """ValueError for a tensor that no result can be written to; torch would say so only after
    the exchange."""
    check_dense(tensor)
    if not tensor.is_contiguous() and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"{text(tensor)} is expanded: several of its elements are one in memory, and a result cannot be "
            "written to it; pass its clone()"
        )


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8[nbytes], sharing its memory."""
    flat = tensor.view(-1)
    if flat.numel() <= 1:  # contiguous whatever its stride, but such a stride allows no view as bytes
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def copy_flat(target: Tensor, source: Tensor) -> None:
    """Copy one flat tensor to another, both contiguous, on the CPU and of equally many bytes.

    On one thread with C's memcpy: torch's loop first reads from memory what it will overwrite. With several
    threads, torch's are faster. Not through numpy: after that torch lets nobody free the storage.
    """
    assert target.nbytes == source.nbytes
    if torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have bytes in common."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def same_size(parts: Sequence[Tensor], whole: Tensor, op: str) -> None:
    for rank, part in enumerate(parts):
        if part.numel() != whole.numel() or part.dtype != whole.dtype:
            raise ValueError(
                f"{op}: tensor {rank} of the list is {text(part)} and the other side {text(whole)}"
            )


def split_bytes(tensor: Tensor, splits: list[int], world_size: int) -> list[int]:
    """Bytes for each rank; `splits` counts rows of the first dimension."""
    if not splits:
        if tensor.dim() and tensor.shape[0] % world_size:
            raise ValueError(f"all_to_all: {tensor.shape[0]} rows cannot be divided among {world_size} ranks")
        return [tensor.numel() * tensor.itemsize // world_size] * world_size
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(splits) != world_size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"all_to_all: splits {splits} for {world_size} ranks and {rows} rows")
    row_bytes = tensor.numel() * tensor.itemsize // rows if rows else 0
    return [each * row_bytes for each in splits]
