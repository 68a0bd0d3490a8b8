"""Text on disk, one document after the other; never more than one of them in memory."""

from __future__ import annotations

import codecs
import errno
import functools
import glob
import hashlib
import json
import math
import os
import reprlib
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imece.data import tables
from imece.errors import UserError

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet")  # looked for in folders; capitals are as good

_WHOLE_BYTES = 1 << 18  # a file up to this size is one document
_PIECE_BYTES = 1 << 16  # a larger one is cut at line ends into documents of about this size
_LINE_BYTES = 1 << 12  # a line up to this size is not cut
_FEWEST_DOCUMENTS = 16  # of all text: where one is most of it, to hold that out leaves nothing to learn from
# A folder with the first and one of the others is a run's: what it writes is no text to learn. The lock is
# there before all else, so that its first command reads what later ones do; a copy may lack hidden files.
_CONFIG_OF_RUN, _ALSO_OF_RUN = "config.toml", (".lock", "metrics.jsonl")
_CONVERTED = {  # by the first bytes of a file, what makes text of it
    b"\x1f\x8b": "compressed: unpack it first, with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it first, with zstd -d",
    b"\xfd7zXZ\0": "compressed: unpack it first, with unxz",
    b"BZh": "compressed: unpack it first, with bunzip2",
    b"PK\3\4": "compressed: unpack it first, with unzip",
    codecs.BOM_UTF32_LE: "UTF-32: convert it with iconv -f UTF-32 -t UTF-8",  # it begins as UTF-16 does
    codecs.BOM_UTF32_BE: "UTF-32: convert it with iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}
# In the standard library: what others installed, and tests, of which many are not text on purpose.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class GoneError(UserError):
    """Nothing is where the text should be; perhaps it was there once."""


@dataclass(frozen=True)
class Document:
    """One text that is packed whole and held out whole."""

    name: str  # relative to the folder that all files have in common; "a.jsonl:7" is line 7, or row 7
    text: str  # never empty


def sources(
    paths: Sequence[Path | str], field: str = "text", run_folders: list[Path] | None = None
) -> list[Path]:
    """The files behind folders, globs, single files and datasets: absolute, sorted, each once.

    A folder is searched for SUFFIXES, in all its folders but the hidden ones, and in those that links in it
    lead to; a glob gives the files it matches. Neither finds what lies in a run folder: that of a run on "."
    is itself in the text, and grows with each step. "hf:NAME" or "hf:NAME:SPLIT" is a dataset of the Hugging
    Face Hub, which is downloaded, or a folder that `datasets` saved to disk, which is also known without
    "hf:". No path at all is the Python standard library of this disk, without its tests.

    run_folders: those that were passed over are appended to it.

    What is named by itself is looked into here, so that a mistake shows before any work is done: GoneError
    if it is missing, UserError if it is empty or not UTF-8 text, if the first line of a .jsonl or a table has
    no `field`, or if the package that reads it is missing. GoneError also for a folder or a glob with no such
    file. Whether files inside a folder are text, `documents` finds out.
    """
    if not paths:
        return _standard_library()
    found: dict[str, Path] = {}  # by real path: a file and a link to it are one
    passed: set[str] = set()
    for given in paths:
        for path in sorted(_behind(os.path.expanduser(given), field, passed)):
            found.setdefault(os.path.realpath(path), path)
    if run_folders is not None:
        run_folders += map(Path, sorted(passed))
    files = sorted(found.values())
    if any(_suffix(path) in tables.SUFFIXES for path in files):
        tables.require()
    return files


def absolute_name(given: str) -> str:
    """The same name for `sources`, wherever it is given."""
    called = given.startswith("hf:")
    name, colon, split = given.removeprefix("hf:").partition(":") if called else (given, "", "")
    name = os.path.expanduser(name)
    if called:
        return f"hf:{os.path.abspath(name)}{colon}{split}" if os.path.isdir(name) else given
    if glob.has_magic(name) and not os.path.lexists(name):  # a pattern, and the folder we are in is none
        return os.path.abspath(os.path.join(glob.escape(os.getcwd()), name))
    return os.path.abspath(name)


def documents(
    files: Sequence[Path],
    field: str = "text",
    skipped: dict[Path, str] | None = None,
    *,
    to_hold_out: bool = False,
) -> Iterator[Document]:
    """The documents of `files`, in their order: one a file, or one a line of a .jsonl or a row of a table,
    where it is the text in `field`.

    A text file of more than 256 KiB is cut at line ends into documents of some 64 KiB: so memory stays
    small, and a part of a large file can be held out. Empty files, blank lines, empty texts, nulls and empty
    cells are passed over.

    to_hold_out: a part of the documents is to be held out. Where all files together are less than 4 MiB,
    those of more than a sixteenth of it are then cut too, so finely that no document is much more than that.
    skipped: files that are not UTF-8 text are added to it, each with what is wrong with it, and left out;
    without it they are a UserError. UserError for a line of a .jsonl that is no JSON object, or has no string
    in `field`; for a table, see `tables.rows`.
    """
    root, why_not_text = common_folder(files), functools.cache(_why_not_text)
    largest_bytes = _largest_bytes(files, why_not_text) if to_hold_out else _WHOLE_BYTES
    for path in files:
        name = os.path.relpath(path, root)
        with _reading(path):
            if _suffix(path) in tables.SUFFIXES:
                yield from (Document(f"{name}:{row}", text) for row, text in tables.rows(path, field))
            elif (why_not := why_not_text(path)) is None:
                yield from (
                    _lines(path, name, field)
                    if _suffix(path) == ".jsonl"
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
    """Of a file that stays one document: a power of two, so that files are cut alike while a corpus grows.

    What is no text must not count, and to find that out files are read: until it is known to be enough.
    """
    total_bytes = 0
    for path in files:
        with _reading(path):
            if _suffix(path) in tables.SUFFIXES or why_not_text(path) is None:
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
    """The deepest folder that holds all of them; names are relative to it, so a corpus can be moved."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files]) if files else "/"


def held_out(text: str, share: float, seed: int = 0) -> bool:
    """Whether a document is for validation: by its content alone, wherever it lies and what is beside it.

    share: of the documents, in the mean; 0 holds out none. See `share_of_one`.
    """
    return _draw(text, seed) < share


def share_of_one(files: Sequence[Path], field: str, share: float, seed: int) -> float:
    """The share to call `held_out` with, so that a small corpus has a document for validation too.

    It is `share`, unless that is below every document: then the least that holds one out. 0 stays 0.
    """
    least = 1.0
    for document in documents(files, field, skipped={}, to_hold_out=True) if share else ():
        least = min(least, _draw(document.text, seed))
        if least < share:
            return share
    return math.nextafter(least, 1) if share else 0.0


def fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) from the text's content, independent for each `purpose`: to draw samples by."""
    person = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(text: str, seed: int) -> float:
    return fraction(text, f"held out {seed}")


def _standard_library() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in _walk(root, set()):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # os.walk enters what is left
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"{root}: no .py files, so Python's library cannot be the text: name files to read")
    return sorted(files)


def _walk(root: str, run_folders: set[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk into links too, but not into hidden folders, and into each folder once, whatever leads to it.

    run_folders: it does not go into them either, and adds them. UserError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}): check its permissions")

    seen, waiting = set[str](), [root]
    while waiting:
        links: list[str] = []
        for folder, folders, names in os.walk(waiting.pop(0), onerror=refuse):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            if _CONFIG_OF_RUN in names and any(name in names for name in _ALSO_OF_RUN):
                run_folders.add(real)
                folders.clear()
                continue
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield folder, folders, names
            below = (os.path.join(folder, name) for name in folders)
            links += (path for path in below if os.path.islink(path))
        # After all that is in the root itself, and sorted: names must not depend on a disk's own order.
        waiting += sorted(links)


def _behind(given: str, field: str, run_folders: set[str]) -> Iterator[Path]:
    path = Path(os.path.abspath(given))
    if (dataset := _dataset(given)) is not None:
        if next(documents(dataset, field), None) is None:
            raise UserError(f"{given}: no row of it holds any text in {field!r}: name another dataset")
        yield from dataset
    elif stat.S_ISDIR(mode := _mode(path)):
        walk = _walk(str(path), run_folders)
        files = [Path(f, name) for f, _, names in walk for name in names if _is_wanted(f, name)]
        if not files:
            raise GoneError(f"{path}: no {', '.join(SUFFIXES)} files in this folder: name another, or files")
        yield from files
    elif stat.S_ISREG(mode):
        _check_named(path, field)
        yield path
    elif mode:
        raise UserError(f"{path}: neither a file nor a folder: copy its content to a file and name that")
    elif glob.has_magic(given):
        matched = [Path(os.path.abspath(match)) for match in glob.glob(given, recursive=True)]
        files, is_run = list[Path](), functools.cache(_is_run)
        for match in matched:
            if run := next(filter(is_run, match.parents), None):
                run_folders.add(os.path.realpath(run))
            elif stat.S_ISREG(_mode(match)):
                files.append(match)
        if not files:
            raise GoneError(f"{given}: no file matches this pattern: check the folder and the pattern")
        yield from files
    else:
        raise GoneError(f"{path}: no such file or folder: check the path")


def _dataset(given: str) -> list[Path] | None:
    """The files of a dataset; None if it is no name of one, nor a folder that holds one."""
    called = given.startswith("hf:")
    name, _, split = given.removeprefix("hf:").partition(":") if called else (given, "", "")
    folder = Path(os.path.abspath(os.path.expanduser(name)))
    files = tables.saved(folder, split or None) if os.path.isdir(folder) else None
    return tables.fetched(name, split or None) if called and files is None else files


def _mode(path: Path) -> int:
    """Of what is there, with its kind; 0 if nothing is. UserError where one may not look, for text too."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        name = reprlib.repr(str(path)) if error.errno == errno.ENAMETOOLONG else path
        raise UserError(f"{name}: cannot be read ({error.strerror}): name files that you may read") from error
    except ValueError:  # a NUL
        return 0


def _is_run(folder: Path) -> bool:
    there = [os.path.isfile(folder / name) for name in (_CONFIG_OF_RUN, *_ALSO_OF_RUN)]
    return there[0] and any(there[1:])


def _suffix(path: Path) -> str:
    """By which a file is read: other systems also write it in capitals."""
    return path.suffix.lower()


def _is_wanted(folder: str, name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and os.path.isfile(os.path.join(folder, name))


def _check_named(path: Path, field: str) -> None:
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty: name one that holds text")
        if next(documents([path], field), None) is None:
            raise UserError(f"{path}: nothing in it holds any text in {field!r}: name a file that holds text")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error


def _why_not_text(path: Path) -> str | None:
    """What is wrong with a file that is not UTF-8 text, and what to do; None for text."""
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
        text = path.read_bytes().decode()  # not read_text: it would turn \r\n into \n
        if text:
            yield Document(name, text)
        return
    piece_bytes = min(_PIECE_BYTES, largest_bytes)
    line_bytes = max(piece_bytes, _LINE_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()  # keeps a character that is cut for the next piece
    with path.open("rb") as file:
        number = 1
        # Up to the end of a line; but one of a gigabyte must not become one document.
        while block := file.read(piece_bytes) + file.readline(line_bytes):
            if text := decoder.decode(block):
                yield Document(f"{name}#{number}", text)
                number += 1


def _lines(path: Path, name: str, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8-sig")  # some editors put a byte order mark before line 1
            if line.strip() and (text := _text_of(line, f"{path}:{number}", field)):
                yield Document(f"{name}:{number}", text)


def _text_of(line: str, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}): each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, not an object with a field {field!r}")
    if field not in record:
        fields = tables.few(record)
        raise UserError(f"{where}: no field {field!r}; its fields are {fields}: name the one with the text")
    text = "" if record[field] is None else record[field]  # as an empty cell of a table
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} holds a {type(text).__name__}, not a string: name another")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field {field!r} has half a surrogate pair: repair the line") from error
    return text
