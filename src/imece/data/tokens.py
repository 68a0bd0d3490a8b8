"""The token files: what tokenizing makes once, and all processes of a host map into memory.

train.bin       the tokens of all training documents; each text ends with the tokenizer's `end`, and begins
                with its `begin` if it has one
train.idx       int64 [documents + 1]: where in train.bin each document begins, then the number of tokens
train.ans       bool [tokens]: which are learned; only if the documents are records, of which answers are
validation.bin, validation.idx, validation.ans
manifest.json   what they were made from, their sizes and checksums; written last: without it there is nothing
lock            held by the process that builds; it may stay for ever

If the text is of several sources, in a proportion of their own, their documents follow each other, and the
manifest has the sizes of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from imece.data.files import digest, file_digest
from imece.errors import UserError
from imece.writing import write_whole

MANIFEST = "manifest.json"
PARTS = ("train", "validation")
SUFFIXES = ("bin", "idx")
ANSWERS = "ans"  # the suffix of the third file, if there is one
SOURCES = "sources"  # the manifest's key of what each of several sources has of a part

_VERSION = 2


@dataclass(frozen=True)
class Part:
    """The documents for training, or those for validation. Both arrays are mapped from disk, read-only."""

    name: str  # "train" or "validation"
    tokens: npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32 [number of tokens]
    offsets: npt.NDArray[np.int64]  # [documents + 1]
    end: int  # id of the token at the end of each document
    text_bytes: int  # of the text that the tokens were made from; of records, only that of the answers
    learned: npt.NDArray[np.bool_] | None = None  # [number of tokens], mapped too; None: all are learned
    learned_tokens: int = 0  # if only answers are
    begin: int | None = None  # id of the token at the beginning of each document, if there is one
    source: str = ""  # its name, if this is only what the part has of one of several sources
    divided: tuple[Part, ...] = ()  # the same by source, if there are several
    vocab_size: int | None = None  # all ids are below it; None: not known

    @property
    def sources(self) -> tuple[Part, ...]:
        """What is of each source, one after the other; of a single one all of it."""
        return self.divided or (self,)

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.name} part of {self.source}" if self.source else f"{self.name} part"

    @property
    def targets(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) if self.learned is None else self.learned_tokens

    @property
    def read_before(self) -> int:
        """Tokens before a document that it is read with: the end token of the one before, unless it has a
        begin token of its own."""
        return 1 if self.begin is None else 0

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The tokens of one document, with those that begin and end it."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def check(self, read: npt.NDArray[np.int64]) -> None:
        """UserError if one of these tokens, which were read, cannot have been written by `build`."""
        if self.vocab_size is not None and (found := int(read.max(initial=0))) >= self.vocab_size:
            where = getattr(self.tokens, "filename", self.title)
            raise UserError(
                f"{where}: token {found} of a vocabulary of {self.vocab_size}: somebody writes to it; "
                "started again, imece train makes it anew"
            )


@dataclass(frozen=True)
class TokenFiles:
    folder: Path
    train: Part
    validation: Part
    vocab_size: int
    tokenizer_hash: str
    skipped: int  # files that were not text
    skipped_bytes: int  # together
    skipped_first: tuple[str, ...]  # the first few, each with what is wrong with it
    made_from: Mapping[str, Any]  # everything that the content depends on, as `build` wrote it
    identity: str  # of the content: if two are equal, every step reads the same


def open_tokens(folder: Path | str, *, verify: bool = False) -> TokenFiles:
    """Map the files that `build` made into memory.

    UserError, with the file's name, if one is missing, has another size than the manifest says, or if its
    offsets are not offsets. Only with `verify` are tokens read and compared with their checksums.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    made_from, dtype = manifest["made_from"], np.dtype(manifest["dtype"])
    train, validation = (_open_part(folder, name, dtype, made_from, manifest[name], verify) for name in PARTS)
    return TokenFiles(
        folder=folder,
        train=train,
        validation=validation,
        vocab_size=made_from["vocab_size"],
        tokenizer_hash=made_from["tokenizer"],
        skipped=manifest["skipped"],
        skipped_bytes=manifest["skipped_bytes"],
        skipped_first=tuple(manifest["skipped_first"]),
        made_from=made_from,
        identity=digest(json.dumps(_content(manifest)).encode()),
    )


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Complete the files: from now on they count as there. OSError if the manifest cannot be written."""
    checked = {"version": _VERSION, "checksum": digest(json.dumps(content).encode()), **content}
    write_whole(folder / MANIFEST, json.dumps(checked, indent=2).encode() + b"\n", durable=True)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if (version := manifest.pop("version")) != _VERSION:
            raise UserError(f"{path}: version {version}, not {_VERSION}: imece train makes it again")
        if manifest.pop("checksum") != digest(json.dumps(manifest).encode()):
            raise UserError(f"{path}: damaged, its checksum is another: imece train makes it again")
        return dict(manifest)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file, so no finished token files: imece train makes them"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error!r}): imece train makes it again") from error


def _content(manifest: Mapping[str, Any]) -> list[Any]:
    """What the tokens are, and of which source each is."""
    divided = [manifest[name][SOURCES] for name in PARTS if SOURCES in manifest[name]]
    return [manifest[name]["checksums"] for name in PARTS] + divided


def _open_part(
    folder: Path,
    name: str,
    dtype: np.dtype[Any],
    made_from: Mapping[str, Any],
    counts: dict[str, Any],
    verify: bool,
) -> Part:
    tokens = _map(folder / f"{name}.bin", dtype, counts["tokens"])
    path = folder / f"{name}.idx"
    offsets = _map(path, np.dtype(np.int64), counts["documents"] + 1)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or bool((offsets[1:] <= offsets[:-1]).any()):
        raise UserError(
            f"{path}: damaged, its offsets do not ascend to {len(tokens)}: imece train makes it again"
        )
    for suffix in counts["checksums"] if verify else ():
        path = folder / f"{name}.{suffix}"
        if file_digest(path)[0] != counts["checksums"][suffix]:
            raise UserError(f"{path}: damaged, its checksum is another: imece train makes it again")
    learned = None
    if ANSWERS in counts["checksums"]:
        learned = _map(folder / f"{name}.{ANSWERS}", np.dtype(np.bool_), counts["tokens"])
    part = Part(
        name, tokens, offsets, made_from["end"], counts["bytes"], learned, counts["learned"],
        begin=made_from["begin"], vocab_size=made_from["vocab_size"],
    )  # fmt: skip
    return replace(part, divided=tuple(_divided(part, counts.get(SOURCES, {}))))


def _divided(part: Part, sources: Mapping[str, Mapping[str, int]]) -> Iterator[Part]:
    """What the part has of each source, by their counts."""
    first = 0
    for source, counts in sources.items():
        last = first + counts["documents"]
        begin, end = part.offsets[[first, last]].tolist()
        yield replace(
            part,
            tokens=part.tokens[begin:end],
            offsets=part.offsets[first : last + 1] - begin,
            text_bytes=counts["bytes"],
            learned=part.learned[begin:end] if part.learned is not None else None,
            learned_tokens=counts["learned"],
            source=source,
        )
        first = last


def _map(path: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    expected = length * dtype.itemsize
    try:
        found = path.stat().st_size
        if found != expected:
            raise UserError(
                f"{path}: {found} bytes, but the manifest says {expected}: imece train makes it again"
            )
        # numpy cannot map an empty file
        return np.memmap(path, dtype, "r", shape=(length,)) if length else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): imece train makes it again") from error
