"""What files have for a model's tensors: for most a tensor each, for some several.

transformers computes all experts of a layer with one parameter, and files have tensors of each expert.

    model      mlp.experts.gate_up_proj [experts, 2 x width, channels]
    files      mlp.experts.0.gate_proj.weight [width, channels]
               mlp.experts.0.up_proj.weight   [width, channels]
               mlp.experts.1.gate_proj.weight [width, channels]
               ...

One after the other, the elements of these pieces are the parameter's. So any part of a parameter is read from
the pieces that have it, and a parameter is written by cutting it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: all elements of a model's tensor, or some that follow each other."""

    key: str  # its name in the file
    shape: Shape


def stored(model: Any, named: Mapping[str, Tensor]) -> dict[str, tuple[Piece, ...]]:
    """What transformers writes into files for these tensors of a model of its own, in the order of their
    elements.

    It is asked with tensors that have no memory, and what it cuts out of these tells where it was. ValueError
    if it does anything else with them.
    """
    outlines = {name: torch.empty(each.shape, device="meta") for name, each in named.items()}
    written = outlines
    with contextlib.suppress(ImportError):  # until version 5 it wrote what it had
        from transformers.core_model_loading import revert_weight_conversion

        with _NothingCopied():
            written = revert_weight_conversion(model, dict(outlines))
    names = {id(each): name for name, each in outlines.items()}
    found: dict[str, list[tuple[int, Piece]]] = {name: [] for name in outlines}
    for key, each in written.items():
        name = names.get(id(each if each._base is None else each._base))
        if name is None or not each.is_contiguous():
            raise ValueError(f"files have {key} in an order that is not read here")
        found[name].append((int(each.storage_offset()), Piece(key, tuple(each.shape))))
    return {name: _in_order(name, pieces, outlines[name].numel()) for name, pieces in found.items()}


def _in_order(name: str, pieces: list[tuple[int, Piece]], elements: int) -> tuple[Piece, ...]:
    """Pieces, given with the place of their first element, in order. ValueError if they are not all of a
    tensor."""
    pieces.sort(key=lambda each: each[0])
    end = 0
    for start, piece in pieces:
        if start != end:
            break
        end += math.prod(piece.shape)
    if end != elements:
        raise ValueError(f"files have only a part of {name}")
    return tuple(piece for _, piece in pieces)


class _NothingCopied(TorchFunctionMode):
    """Meanwhile a part of a tensor stays a view of it, though it should become contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
