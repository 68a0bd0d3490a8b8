"""The format: what manifest.json says, and how a rank's safetensors file follows from it. No disk here.

The manifest is one JSON object on one line. Its last value is the SHA-256 of all bytes before that value's
key, so no byte of it can change unnoticed. All versions of the format keep to this. The header of each
safetensors file is computed from the manifest and compared as bytes: it can say nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch

from imece.checkpoint.states import as_json, from_json
from imece.reading import Json

FORMAT, VERSION = "imece checkpoint", 1
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20  # of a manifest that is read; one of 1000 ranks and 1000 tensors has about 30 MB

_SEAL, _END = b',"sha256":"', b'"}\n'
_TAIL = len(_SEAL) + 64 + len(_END)
_MOST_ELEMENTS = 1 << 62

# By safetensors' names, but for C128, which it does not have.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnknownVersionError(ValueError):
    """A manifest that is complete, but of an unknown format version."""


@dataclass(frozen=True)
class Kind:
    """What every rank knows of a tensor."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{str(DTYPES[self.dtype]).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of one tensor, flat. Never empty."""

    name: str
    kind: Kind
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.kind.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file: the tensor's own if all of it is here."""
        return self.kind.shape if self.stop - self.start == self.kind.numel else (self.stop - self.start,)


@dataclass(frozen=True)
class File:
    """What one rank wrote."""

    nbytes: int  # of the whole file
    sha256: str  # of the whole file, hex
    pieces: tuple[Piece, ...]  # in the order in which they lie in it


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint except its tensors' bytes. ValueError, with the tensor's name, if pieces
    are wrong."""

    step: int
    attempt: str
    metric: float | None
    state: Json
    rank_states: tuple[Any, ...]  # one a rank
    kinds: Mapping[str, Kind]
    files: tuple[File, ...]  # one a rank

    def __post_init__(self) -> None:
        for name, kind in self.kinds.items():
            end = 0
            for _, _, piece in self.pieces.get(name, []):
                if piece.start != end:
                    what = "are in no file" if piece.start > end else "are in two files"
                    low, high = sorted((piece.start, end))
                    raise ValueError(f"tensor {name!r}: its elements [{low}, {high}) {what}")
                end = piece.stop
            if end != kind.numel:
                raise ValueError(f"tensor {name!r}: its elements [{end}, {kind.numel}) are in no file")

    @cached_property
    def pieces(self) -> dict[str, list[tuple[int, int, Piece]]]:
        """For each tensor that has elements, in their order: (rank, offset in its file, piece)."""
        found: dict[str, list[tuple[int, int, Piece]]] = {}
        for rank, file in enumerate(self.files):
            at = file.nbytes - sum(piece.nbytes for piece in file.pieces)
            for piece in file.pieces:
                found.setdefault(piece.name, []).append((rank, at, piece))
                at += piece.nbytes
        for of_one in found.values():
            of_one.sort(key=lambda entry: (entry[2].start, entry[2].stop))
        return found


def file_name(rank: int) -> str:
    """The file with the tensors that this rank wrote."""
    return f"rank-{rank:05d}.safetensors"


def in_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces in the order of a file: the largest elements first, so that each piece is aligned to
    its own."""
    return tuple(sorted(pieces, key=lambda piece: (-piece.kind.itemsize, piece.name)))


def header(pieces: Sequence[Piece]) -> bytes:
    """The beginning of the safetensors file that holds `pieces`, which are in order; their bytes follow.

    There a piece of C128 is one of F64, with a last dim of 2: real and imaginary parts.
    """
    entries: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        dtype, shape = piece.kind.dtype, piece.shape
        if dtype == "C128":
            dtype, shape = "F64", (*shape, 2)
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def seal(body: Json) -> bytes:
    """`body`, which is not empty, as JSON that ends with its own checksum. ValueError for NaN and Inf."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()[:-1]
    return text + _SEAL + hashlib.sha256(text).hexdigest().encode() + _END


def unseal(data: bytes) -> Json:
    """The opposite of `seal`. ValueError if any byte is not as it was written."""
    text, tail = data[:-_TAIL], data[-_TAIL:]
    if tail != _SEAL + hashlib.sha256(text).hexdigest().encode() + _END:
        raise ValueError("its checksum is not that of its content")
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError("no JSON object")
    del body["sha256"]
    return body


def encode(manifest: Manifest) -> bytes:
    """The content of manifest.json. `begins` relies on the order of the first values."""
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "attempt": manifest.attempt,
            "step": manifest.step,
            "metric": manifest.metric,
            "state": as_json(manifest.state, "state"),
            "rank_states": [as_json(each, "rank_state") for each in manifest.rank_states],
            "tensors": kinds_to_json(manifest.kinds),
            "files": [
                {"name": file_name(rank)} | file_to_json(file) for rank, file in enumerate(manifest.files)
            ],
        }
    )


def begins(attempt: str) -> bytes:
    """The first bytes of this attempt's manifest; no other begins like this."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "attempt": attempt}, separators=(",", ":"))
    return text.removesuffix("}").encode()


def decode(data: bytes) -> Manifest:
    """The opposite of `encode`.

    ValueError, saying what is wrong, if it is damaged or impossible: sizes that do not add up, file names
    that no rank would write. UnknownVersionError if it is of another version.
    """
    body = unseal(data)
    if body.get("format") != FORMAT or body.get("version") != VERSION:
        raise UnknownVersionError(
            f"{body.get('format')!r} version {body.get('version')!r}, but this imece reads "
            f"{FORMAT!r} version {VERSION}"
        )
    try:
        kinds = kinds_from_json(body["tensors"])
        files = tuple(file_from_json(entry, kinds) for entry in body["files"])
        for rank, entry in enumerate(body["files"]):
            if entry["name"] != file_name(rank):
                raise ValueError(f"file {rank} is called {entry['name']!r}, not {file_name(rank)!r}")
        if not files or len(body["rank_states"]) != len(files):
            raise ValueError(f"{len(files)} files and {len(body['rank_states'])} states of ranks")
        metric = body["metric"]
        if metric is not None and not isinstance(metric, float):
            raise ValueError(f"its metric is {metric!r}")
        return Manifest(
            step=_whole(body["step"]),
            attempt=str(body["attempt"]),
            metric=metric,
            state=dict(from_json(body["state"])),
            rank_states=tuple(map(from_json, body["rank_states"])),
            kinds=kinds,
            files=files,
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not as a manifest should be ({error!r})") from error


def kinds_to_json(kinds: Mapping[str, Kind]) -> Json:
    return {name: [kind.dtype, kind.shape] for name, kind in kinds.items()}


def kinds_from_json(value: Mapping[str, Any]) -> dict[str, Kind]:
    kinds = {}
    for name, (dtype, shape) in value.items():
        sizes = tuple(_whole(size) for size in shape)
        if dtype not in DTYPES or len(sizes) > 64 or math.prod(max(n, 1) for n in sizes) > _MOST_ELEMENTS:
            raise ValueError(f"tensor {name!r} is {dtype}{list(sizes)}, which no tensor can be")
        kinds[name] = Kind(dtype, sizes)
    return kinds


def file_to_json(file: File) -> Json:
    return {
        "bytes": file.nbytes,
        "sha256": file.sha256,
        "pieces": [[piece.name, piece.start, piece.stop] for piece in file.pieces],
    }


def file_from_json(value: Mapping[str, Any], kinds: Mapping[str, Kind]) -> File:
    pieces = tuple(
        Piece(name, kinds[name], _whole(start), _whole(stop)) for name, start, stop in value["pieces"]
    )
    if pieces != in_order(pieces) or len({piece.name for piece in pieces}) != len(pieces):
        raise ValueError("the pieces of a file are not in order")
    for piece in pieces:
        if not piece.start < piece.stop <= piece.kind.numel:
            raise ValueError(f"tensor {piece.name!r}: no elements [{piece.start}, {piece.stop})")
    nbytes = len(header(pieces)) + sum(piece.nbytes for piece in pieces)
    if _whole(value["bytes"]) != nbytes:
        raise ValueError(f"a file of {value['bytes']} bytes, but its pieces make {nbytes}")
    return File(nbytes, str(value["sha256"]), pieces)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:  # True is an int to isinstance
        raise ValueError(f"{value!r} is no whole number")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
