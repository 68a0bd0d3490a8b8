"""Reads text from disk, one document after the other, with only one in memory."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imece.data import tables
from imece.data.records import TEXT, Document, Reading, take_instead
from imece.errors import UserError

_WHOLE_BYTES = 1 << 18  # a file up to this size is one document
_PIECE_BYTES = 1 << 16  # a larger file is cut at line ends into documents of about this size
_LINE_BYTES = 1 << 12  # a line up to this size is not cut
_HELD_OUT = "held out 0"  # for `fraction`: any other word would choose other documents
_FEWEST_DOCUMENTS = 16  # with fewer, holding out a large one would leave little to learn from
_CONVERTED = {  # first bytes of a file that is not UTF-8 -> how to convert it
    b"\x1f\x8b": "compressed: unpack it first, with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it first, with zstd -d",
    b"\xfd7zXZ\0": "compressed: unpack it first, with unxz",
    b"BZh": "compressed: unpack it first, with bunzip2",
    b"PK\3\4": "compressed: unpack it first, with unzip",
    codecs.BOM_UTF32_LE: "UTF-32: convert it with iconv -f UTF-32 -t UTF-8",  # starts as UTF-16 does
    codecs.BOM_UTF32_BE: "UTF-32: convert it with iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}


_AS_IT_IS = "or name it .txt to learn it as it is"
_RECORDS = {  # suffixes of files whose records are not read here -> what to do; as text they would be learned
    # with their quotes and commas
    ".json": f"records of .json are not read: one object a line in a .jsonl (jq -c '.[]'), {_AS_IT_IS}",
    ".csv": f"records of .csv are not read: convert it to .jsonl or .parquet, {_AS_IT_IS}",
    ".tsv": f"records of .tsv are not read: convert it to .jsonl or .parquet, {_AS_IT_IS}",
}


def documents(
    files: Sequence[Path],
    reading: Reading = TEXT,
    skipped: dict[Path, str] | None = None,
    *,
    to_hold_out: bool = False,
) -> Iterator[Document]:
    """The documents of `files` in order: one per file, or one per line of a .jsonl or row of a table, as
    `reading` makes them.

    A text file of more than 256 KiB is cut at line ends into documents of some 64 KiB: so memory stays small,
    and a part of a large file can be held out. Empty files, blank lines, empty texts, nulls and empty cells
    are skipped.

    to_hold_out: a part of the documents will be held out. If all files together have less than 4 MiB, files
    of more than a sixteenth of that are then cut too, into pieces of at most about a sixteenth.
    skipped: receives files that are not UTF-8 text, or hold records of another kind, each with what is wrong
    with it; without it they are a UserError. UserError for a line of a .jsonl that is not a JSON object or
    lacks a field of the reading, and as from the reading; for tables see `tables.rows`.
    """
    root, why_not_text = common_folder(files), functools.cache(functools.partial(_why_not, reading))
    largest_bytes = _largest_bytes(files, why_not_text) if to_hold_out else _WHOLE_BYTES
    for path in files:
        name = os.path.relpath(path, root)
        with _reading(path):
            if suffix_of(path) in tables.SUFFIXES:
                for row, values in tables.rows(path, reading):
                    if document := reading.document(f"{name}:{row}", f"{path}:{row}", values):
                        yield document
            elif (why_not := why_not_text(path)) is None:
                yield from (
                    _lines(path, name, reading)
                    if suffix_of(path) == ".jsonl"
                    else _pieces(path, name, largest_bytes)
                )
            elif skipped is None:
                raise UserError(f"{path}: {why_not}")
            else:
                skipped[path] = why_not


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: changed while it was read ({error}): begin again") from error


def _largest_bytes(files: Sequence[Path], why_not_text: Callable[[Path], str | None]) -> int:
    """The largest file that stays one document: a power of two, so that a growing corpus is cut alike.

    Files without text must not count, so files are read until there is known to be enough text.
    """
    total_bytes = 0
    for path in files:
        with _reading(path):
            if suffix_of(path) in tables.SUFFIXES or why_not_text(path) is None:
                total_bytes += path.stat().st_size
        if total_bytes >= _FEWEST_DOCUMENTS * _WHOLE_BYTES:
            return _WHOLE_BYTES
    return 1 << max(1, total_bytes // _FEWEST_DOCUMENTS).bit_length() - 1


def total_bytes(files: Sequence[Path]) -> int:
    """The sizes of the files on disk, together. UserError if one is gone."""
    try:
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}): check the path") from error


def common_folder(files: Sequence[Path]) -> str:
    """The deepest folder that holds all files. Names are relative to it, so that a corpus can be moved."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files]) if files else "/"


@dataclass(frozen=True)
class Source:
    """Files that are read as one: whose documents are held out, and of several sources weighed, together."""

    files: Sequence[Path]
    name: str = ""  # "" for the only one


def divided(
    sources: Sequence[Source], reading: Reading, share: float, skipped: dict[Path, str]
) -> Iterator[tuple[Source, Document, bool]]:
    """The documents of each source in order, and whether they are for validation: a share of each source, at
    least one document, unless share is 0. skipped: as in `documents`."""
    for source in sources:
        of_it = share_of_one(source.files, reading, share)
        for document in documents(source.files, reading, skipped, to_hold_out=of_it > 0):
            yield source, document, held_out(document.text, of_it)


def held_out(text: str, share: float) -> bool:
    """Whether a document is for validation: depends on its content only, not on its place or its neighbours.

    share: of all documents, on average; 0 holds out none. See `share_of_one`.
    """
    return fraction(text, _HELD_OUT) < share


def share_of_one(files: Sequence[Path], reading: Reading, share: float) -> float:
    """The share for `held_out` that gives a small corpus a document for validation, too.

    It is `share`, unless that holds out nothing: then the smallest share that holds out one. 0 stays 0.
    """
    least = 1.0
    for document in documents(files, reading, skipped={}, to_hold_out=True) if share else ():
        least = min(least, fraction(document.text, _HELD_OUT))
        if least < share:
            return share
    return math.nextafter(least, 1) if share else 0.0


def fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) from the text's content, independent for each `purpose`, for drawing samples."""
    person = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def suffix_of(path: Path) -> str:
    """The suffix that decides how a file is read, in lower case: other systems also write it in capitals."""
    return path.suffix.lower()


def _why_not(reading: Reading, path: Path) -> str | None:
    """What is wrong with a file that is not UTF-8 text, or not of records where those are read, and what to
    do; None for text."""
    if (records := _RECORDS.get(suffix_of(path))) is not None:
        return records
    if reading.whole and suffix_of(path) not in (".jsonl", *tables.SUFFIXES):
        return f"no records with {_names(reading.fields)}: name a .jsonl or .parquet"
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        start = file.read(max(map(len, _CONVERTED)))
        for magic, cure in _CONVERTED.items():
            if start.startswith(magic):
                return cure
        file.seek(0)
        while True:
            block = file.read(1 << 20)
            if (nul := block.find(b"\0")) >= 0:
                return f"a NUL at byte {offset + nul}, so not text: name text files only"
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"not UTF-8 at byte {offset - pending + error.start}: convert it with iconv"
            if not block:
                return None
            offset += len(block)


def _pieces(path: Path, name: str, largest_bytes: int) -> Iterator[Document]:
    if path.stat().st_size <= largest_bytes:
        text = path.read_bytes().decode()  # read_text would turn \r\n into \n
        if text:
            yield Document(name, text, len(text.encode()))
        return
    piece_bytes = min(_PIECE_BYTES, largest_bytes)
    line_bytes = max(piece_bytes, _LINE_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()  # keeps a cut character for the next piece
    with path.open("rb") as file:
        number = 1
        # Up to the end of a line, but a line of a gigabyte must not become one document.
        while block := file.read(piece_bytes) + file.readline(line_bytes):
            if text := decoder.decode(block):
                yield Document(f"{name}#{number}", text, len(text.encode()))
                number += 1


def _lines(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8-sig")  # some editors put a byte order mark before line 1
            if line.strip():
                where = f"{path}:{number}"
                values = _values(line, where, reading)
                if document := reading.document(f"{name}:{number}", where, values):
                    yield document


def _values(line: str, where: str, reading: Reading) -> list[object]:
    """What the record in a line has in the fields of the reading."""
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        # Its own words name a line too, always the first.
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos + 1}"
        raise UserError(f"{where}: not JSON ({why}): each line must be one JSON object") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UserError(f"{where}: a JSON {kind}, not an object with {_names(reading.fields)}")
    for field in reading.fields:
        if field not in record:
            raise UserError(
                f"{where}: no field {field!r}; its fields are {tables.few(record)}: "
                f"{take_instead(reading, record)}"
            )
    return [record[field] for field in reading.fields]


def _names(fields: Sequence[str]) -> str:
    return f"a field {fields[0]!r}" if len(fields) == 1 else f"the fields {', '.join(map(repr, fields))}"
