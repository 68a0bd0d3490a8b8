"""A model's training state, put together from pieces in ranks' memory; it is read like a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from imece.checkpoint.load import Source
from imece.errors import UserError

DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
"""All of torch's dtypes by name: memory may hold some that no file has, such as complex32."""


class Pieces(Source):
    """Named tensors whose pieces lie in memory; reading copies out of them."""

    folder = Path("the memory of the other ranks")

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: Tensor) -> None:
        """Add elements from `start` on of the tensor `name`; flat: 1-D, on the CPU."""
        self._shapes[name] = shape
        self._pieces.setdefault(name, []).append((start, flat))

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0][1].dtype

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flat tensor, 1-D. UserError if one is in nobody's memory."""
        out = torch.empty(stop - start, dtype=self.dtype(name), device="cpu")
        self.fill(out, name, start)
        return out

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill all of `target` with its elements from `start` on. UserError if one is in nobody's memory."""
        stop, at = start + target.numel(), start
        flat = target.detach().view(-1) if target.is_contiguous() else target.new_empty(target.numel())
        for first, piece in sorted(self._pieces.get(name, ()), key=lambda each: each[0]):
            high = min(stop, first + len(piece))
            if first <= at < high:
                flat[at - start : high - start] = piece[at - first : high - first]
                at = high
        if at < stop:
            raise UserError(f"{name}: elements from {at} on are in the memory of no rank")
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))
