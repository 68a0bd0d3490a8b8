"""Which pieces this rank writes, and copying them out of the tensors into one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from imece.checkpoint.manifest import DTYPE_NAMES, Kind, Piece, in_order
from imece.data_parallel.same import is_made_of_others
from imece.listing import kind_of


@dataclass(frozen=True)
class Slice:
    """One rank's contiguous part of a tensor that is spread over ranks; it may be empty."""

    tensor: torch.Tensor
    """Of any shape, contiguous unless it is the whole; read as flat."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Its elements are [start, start + tensor.numel()) of the whole, flat."""

    @classmethod
    def of(cls, value: torch.Tensor | Slice) -> Slice:
        """The slice itself, or one of a whole tensor."""
        return value if isinstance(value, Slice) else cls(value, tuple(value.shape), 0)


Tensors = Mapping[str, torch.Tensor | Slice]


def kinds(tensors: Tensors) -> dict[str, Kind]:
    """What there is to save, by name: ValueError or TypeError, with the name, for what cannot be saved."""
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors: {kind_of(tensors)}, where TrainingState.tensors() or a dict of tensors belongs"
        )
    found = {}
    for name in sorted(tensors):
        value = tensors[name]
        tensor = value.tensor if isinstance(value, Slice) else value
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"tensor {name!r} is {kind_of(tensor)}: hand in tensors and slices, and numbers, "
                "texts and dicts in the state"
            )
        if is_made_of_others(tensor):
            raise ValueError(
                f"tensor {name!r} is {kind_of(tensor)}, which is made of others: hand in these, each "
                "by a name of its own"
            )
        if name == "__metadata__":
            raise ValueError("no tensor can be called '__metadata__': safetensors keeps that name for itself")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: only strided ones of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)} can be saved"
            )
        if isinstance(value, Slice):
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {name!r}: its slice is not contiguous")
            if not 0 <= value.start <= value.start + tensor.numel() <= math.prod(value.shape):
                raise ValueError(
                    f"tensor {name!r}: [{value.start}, {value.start + tensor.numel()}) is not within "
                    f"the {math.prod(value.shape)} elements of {list(value.shape)}"
                )
        found[name] = Kind(DTYPE_NAMES[tensor.dtype], tuple(value.shape))
    return found


def deal(tensors: Tensors, known: Mapping[str, Kind], rank: int, world_size: int) -> tuple[Piece, ...]:
    """The pieces that `rank` writes, in the order of its file.

    These are its slices; and, with all whole tensors laid one after another on a line of bytes, its own of
    `world_size` equal parts of the line. Ranks with the same whole tensors cut at the same elements.
    """
    pieces = []
    whole = [kind for name, kind in known.items() if not isinstance(tensors[name], Slice)]
    line = sum(kind.numel * kind.itemsize for kind in whole)
    first, last = line * rank // world_size, line * (rank + 1) // world_size
    begin = 0
    for name, kind in known.items():
        value = tensors[name]
        if isinstance(value, Slice):
            start, stop = value.start, value.start + value.tensor.numel()
        else:
            start, stop = (_element(kind, cut - begin) for cut in (first, last))
            begin += kind.numel * kind.itemsize
        if start < stop:
            pieces.append(Piece(name, kind, start, stop))
    return in_order(pieces)


@torch.no_grad()
def copy_into(buffer: torch.Tensor, tensors: Tensors, pieces: Sequence[Piece]) -> None:
    """Copy the pieces into buffer: uint8 [bytes of all pieces], on the CPU, laid out like the file."""
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        source = Slice.of(tensors[piece.name])
        target = buffer[start:end].view(source.tensor.dtype)
        _copy(target, source.tensor, piece.start - source.start, piece.stop - source.start)


def _copy(target: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
    """Copy elements [start, stop) of `source`, flat, to `target`, 1-D, without a copy in between."""
    if source.is_contiguous():
        target.copy_(source.view(-1)[start:stop])
        return
    # reshape(-1) would copy all of it. So: whole rows at once, then the remainders of the rows at both ends.
    row = source[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        _copy(target, source[last], start - last * row, stop - last * row)
        return
    head, tail = first * row - start, last * row - start
    if head:
        _copy(target[:head], source[first - 1], row - head, row)
    target[head:tail].view(last - first, *source.shape[1:]).copy_(source[first:last])
    if tail < len(target):
        _copy(target[tail:], source[last], 0, len(target) - tail)


def _element(kind: Kind, cut: int) -> int:
    """The first element that begins at or after byte `cut` of its tensor."""
    return min(max(-(-cut // kind.itemsize), 0), kind.numel)
