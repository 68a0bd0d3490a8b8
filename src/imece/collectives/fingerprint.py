"""What a collective is, in 64 bits: two ranks that disagree find out before a byte of data is summed.

    bit 63    59        55       50            35                                    0
        | op 5 | reduce 4 | dtype 5 | root + 1 15 |              numel 35              |

Code 0 of every field means "none" (a barrier has no dtype, an all_reduce no root). Operation codes stay
below 16, so a packed fingerprint is also a non-negative int64 and fits a torch tensor. The tables are part
of what ranks exchange: append to them, never reorder.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from imece.listing import rank_words

OPS = (
    "", "broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather",
    "scatter", "barrier", "send", "recv", "exchange", "all_gather_list", "open",
)  # fmt: skip
REDUCE_OPS = ("", "sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
DTYPES: tuple[str, ...] = (
    "", "float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "int8",
    "int16", "uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "other",
)  # fmt: skip

MAX_NUMEL = (1 << 35) - 1
_OP_SHIFT, _REDUCE_SHIFT, _DTYPE_SHIFT, _ROOT_SHIFT = 59, 55, 50, 35

# Shifted once here, so that pack() is four dict look-ups and no arithmetic on codes.
_OP_BITS = {name: code << _OP_SHIFT for code, name in enumerate(OPS)}
_REDUCE_BITS = {name: code << _REDUCE_SHIFT for code, name in enumerate(REDUCE_OPS)}
_OTHER_DTYPE = DTYPES.index("other") << _DTYPE_SHIFT
_DTYPE_BITS: dict[torch.dtype | None, int] = {None: 0} | {
    getattr(torch, name): code << _DTYPE_SHIFT for code, name in enumerate(DTYPES) if name and name != "other"
}
DTYPE_CODES = {dtype: bits >> _DTYPE_SHIFT for dtype, bits in _DTYPE_BITS.items()}


class SameLabel(str):
    """A label that all ranks must have in common: only it tells this tensor from others of its size."""


class Announced(NamedTuple):
    """A call as a rank tells the others of it. All ranks must agree in everything but a plain label."""

    op: str  # of OPS
    dtype: torch.dtype | None  # of the tensor that must be alike on all ranks, the input; None: no tensor
    shape: tuple[int, ...]  # of the same tensor
    reduce_op: str = ""  # of REDUCE_OPS
    root: int = -1  # rank in the group
    label: str = ""  # the parameter or bucket, for errors
    way: str = ""  # as in `Said`


class Said(NamedTuple):
    """A call as the others have heard of it from one rank."""

    fingerprint: int
    shape: tuple[int, ...] | None = None  # None if only the number of elements was said
    label: str = ""  # shown, and not compared
    way: str = ""  # such as "schedule ring" or "wire bf16"; "" is the backend's own
    name: int = 0  # `name_of` the label


class Fields(NamedTuple):
    """A fingerprint unpacked: names, not codes."""

    op: str
    reduce_op: str  # "" if none
    dtype: str  # "" if none
    root: int  # rank in the group, -1 if none; for send and recv the peer
    numel: int


def pack(op: str, reduce_op: str, dtype: torch.dtype | None, numel: int, root_or_peer: int = -1) -> int:
    """The fingerprint of one call, a non-negative int below 2**63.

    KeyError for an unknown operation. A numel above MAX_NUMEL wraps around and is compared in its low bits
    only. A root has 15 bits: launchers.py admits no more ranks.
    """
    return (
        _OP_BITS[op]
        | _REDUCE_BITS[reduce_op]
        | _DTYPE_BITS.get(dtype, _OTHER_DTYPE)
        | (root_or_peer + 1) << _ROOT_SHIFT
        | (numel & MAX_NUMEL)
    )


def unpack(fingerprint: int) -> Fields:
    """The fields of a packed fingerprint; codes that this version does not know become "unknown 17"."""

    def name(table: tuple[str, ...], code: int) -> str:
        return table[code] if code < len(table) else f"unknown {code}"

    return Fields(
        op=name(OPS, fingerprint >> _OP_SHIFT & 0x1F),
        reduce_op=name(REDUCE_OPS, fingerprint >> _REDUCE_SHIFT & 0xF),
        dtype=name(DTYPES, fingerprint >> _DTYPE_SHIFT & 0x1F),
        root=(fingerprint >> _ROOT_SHIFT & 0x7FFF) - 1,
        numel=fingerprint & MAX_NUMEL,
    )


def describe(fingerprint: int, names: Sequence[int] | None = None) -> str:
    """One call in words, e.g. "all_reduce(avg) of float32[2359296]" or "broadcast from 2 of int64[8]".

    names: of the group's ranks, in its order; by default the ranks in the group.
    """
    fields = unpack(fingerprint)
    if names is not None and fields.root >= 0:
        fields = fields._replace(root=names[fields.root])
    return words(fields)


def describe_tensor(fingerprint: int) -> str:
    """Only the tensor, e.g. "float32[2359296]"."""
    return _tensor(unpack(fingerprint), None)


def explain(seq: int, said: Mapping[int, Said]) -> str | None:
    """None if all ranks did the same, else the mismatch in words: only what differs, and the labels.

    said: by rank in the world.
    """
    same_call = len({(each.fingerprint, each.shape, each.name) for each in said.values()}) == 1
    same_way = len({each.way for each in said.values()}) == 1
    if same_call and same_way:
        return None
    fields = {rank: unpack(each.fingerprint) for rank, each in said.items()}
    same_op = len({f.op for f in fields.values()}) == 1
    same_but_tensor = same_op and len({(f.reduce_op, f.root) for f in fields.values()}) == 1
    ranks_of: dict[str, list[int]] = {}  # those that did the same are named together
    for rank, each in sorted(said.items()):
        text = (_tensor if same_but_tensor else words)(fields[rank], each.shape)
        if not same_way:
            text += f" with {each.way or 'neither schedule nor wire'}"
        text += f" ({each.label})" if each.label else ""
        ranks_of.setdefault(text, []).append(rank)
    op = next(iter(fields.values())).op if same_op else "collective"
    asked = "run the same forward"
    if same_call:
        asked = "have the same IMECE_SCHEDULE, and give the same schedule, wire and parts"
    elif any(each.name for each in said.values()):
        asked = "run the same units in one order (units= says which: none that only some run, as experts)"
    (ranks, first), *others = [(rank_words(ranks), text) for text, ranks in ranks_of.items()]
    parts = [f"{ranks} {'sent' if same_but_tensor else 'called'} {first}", *map(" ".join, others)]
    who = "both" if len(said) == 2 else "all"
    return f"{op} number {seq} differs between ranks: {', '.join(parts)}. Do {who} ranks {asked}?"


def name_of(label: str) -> int:
    """What ranks compare of a label: a number above 0 of one that all must have in common, else 0."""
    return 1 + zlib.crc32(label.encode()) if isinstance(label, SameLabel) else 0


def six_dims(shape: Sequence[int]) -> list[int]:
    """A shape in six numbers: each dim plus 1, 0 for no dim; dims beyond the sixth are multiplied into the
    sixth."""
    dims = [dim + 1 for dim in shape[:6]]
    for dim in shape[6:]:
        dims[5] = (dims[5] - 1) * dim + 1
    return dims + [0] * (6 - len(dims))


def shape_of(dims: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `six_dims`."""
    return tuple(dim - 1 for dim in dims if dim > 0)


def _tensor(field: Fields, shape: tuple[int, ...] | None) -> str:
    if not field.dtype:
        return "no tensor"
    dims = shape if shape is not None else (field.numel,)
    return f"{field.dtype}[{', '.join(map(str, dims))}]"


def words(field: Fields, shape: tuple[int, ...] | None = None) -> str:
    """One call in words, as `describe`, with the tensor's shape if that is known."""
    text = field.op or "nothing"
    if field.reduce_op:
        text += f"({field.reduce_op})"
    if field.root >= 0:
        text += f" {_ROOT_WORD.get(field.op, 'from')} {field.root}"
    return f"{text} of {_tensor(field, shape)}" if field.dtype else text


_ROOT_WORD = {"send": "to", "reduce": "to", "gather": "to"}
