"""Tensors that the mesh's axis tensor divides: one tensor per part in the files, whole for readers.

    NAME@dim1-0of2    part 0 of 2 of NAME, along dim 1

A part along dim 0 is a range of the whole, one along another dim is not. So each part is a tensor of its own,
and the ranks that have it share the writing as for any other tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from imece.checkpoint.manifest import Kind
from imece.model_parallel.divided import Divided

_PART = re.compile(r"(.+)@dim(\d+)-(\d+)of(\d+)")


@dataclass(frozen=True)
class Parts:
    """The parts of one tensor."""

    dim: int
    names: tuple[str, ...]


def part_name(name: str, dim: int, index: int, count: int) -> str:
    return f"{name}@dim{dim}-{index}of{count}"


def whole_and_parts(kinds: Mapping[str, Kind]) -> tuple[dict[str, Kind], dict[str, Parts]]:
    """(every tensor as a whole, the parts of those that have parts). kinds: as in the files."""
    whole, parts = {}, {}
    for name, kind in kinds.items():
        found = _PART.fullmatch(name)
        if found is None:
            whole[name] = kind
            continue
        of, dim, index, count = found[1], *map(int, found.groups()[1:])
        names = tuple(part_name(of, dim, at, count) for at in range(count))
        if any(kinds.get(each) != kind for each in names) or dim >= len(kind.shape):
            whole[name] = kind  # a whole tensor with such a name
        elif index == 0:
            whole[of] = Kind(kind.dtype, Divided(dim, 0, count).whole_shape(kind.shape))
            parts[of] = Parts(dim, names)
    return whole, parts
