"""Writes a model's weights as safetensors files, holding one tensor in memory at a time.

The shapes decide in advance where each tensor lies, so tensors may come in any order.

    model.safetensors                     if everything fits within the limit of one file
    model-00001-of-00003.safetensors      otherwise, with
    model.safetensors.index.json          which tensor is in which file
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imece.models.hugging_face import INDEX, WEIGHTS
from imece.models.stored import Shape

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CHUNK = 4 << 20  # elements converted at a time


def write_weights(
    folder: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    most_bytes: int,
) -> None:
    """Write into an existing folder. tensors: each one of `shapes` once, of any dtype, on any device.

    most_bytes: of tensors in one file; a larger tensor has a file of its own. If this raises (OSError if
    writing fails, or an error of `tensors`), the files must not be used.
    """
    divided = divide(shapes, dtype.itemsize, most_bytes)
    places: dict[str, tuple[Path, int]] = {}
    for number, names in enumerate(divided, 1):
        stem, _, suffix = WEIGHTS.rpartition(".")
        several = f"{stem}-{number:05d}-of-{len(divided):05d}.{suffix}"
        path = folder / (several if len(divided) > 1 else WEIGHTS)
        header, offsets = _header({name: shapes[name] for name in names}, dtype)
        path.write_bytes(header)
        places |= {name: (path, offset) for name, offset in offsets.items()}
    for name, tensor in tensors:
        _write(*places[name], tensor.detach(), dtype)
    if len(divided) > 1:
        total = dtype.itemsize * sum(math.prod(shape) for shape in shapes.values())
        where = {name: path.name for name, (path, _) in sorted(places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def divide(shapes: Mapping[str, Shape], itemsize: int, most_bytes: int) -> list[list[str]]:
    """The names in each file, in order: a new file begins where a tensor would exceed most_bytes."""
    files: list[list[str]] = [[]]
    taken = 0
    for name, shape in shapes.items():
        nbytes = itemsize * math.prod(shape)
        if files[-1] and taken + nbytes > most_bytes:
            files.append([])
            taken = 0
        files[-1].append(name)
        taken += nbytes
    return files


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """(the header of a file of these tensors, where in the file each tensor begins)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name], end = end, end + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _write(path: Path, offset: int, tensor: Tensor, dtype: torch.dtype) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for part in tensor.reshape(-1).split(_CHUNK):
            left = part.to("cpu", dtype).view(torch.uint8).numpy().data
            while left:
                wrote = os.pwrite(descriptor, left, offset)
                left, offset = left[wrote:], offset + wrote
    finally:
        os.close(descriptor)
