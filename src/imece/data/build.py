"""Makes the token files, exactly once, however many processes want them and whenever one is killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from imece.data.corpus import Source, common_folder, divided, documents, total_bytes
from imece.data.files import DIGEST_BYTES, file_digest, locked
from imece.data.records import Document, Encoded, Reading
from imece.data.tokenizer import Tokenizer
from imece.data.tokens import (
    ANSWERS,
    MANIFEST,
    PARTS,
    SOURCES,
    SUFFIXES,
    TokenFiles,
    open_tokens,
    write_manifest,
)
from imece.errors import UserError
from imece.listing import many
from imece.writing import leftovers, other_place, sync, sync_folder

Progress = Callable[[int, int], None]  # (bytes of text tokenized, bytes of all files)

_Divided = tuple[Source, Document, bool]  # whether it is for validation

_LOCK = "lock"
_PARTIAL = ".partial"
_NAMES = tuple(f"{part}.{suffix}" for part in PARTS for suffix in (*SUFFIXES, ANSWERS))
_BATCH_BYTES = 1 << 20  # text tokenized at once; the package needs some 40 times as much memory
_BATCH_DOCUMENTS = 1024
_NAMED = 3  # files without text that a message names


def build(
    folder: Path | str,
    sources: Sequence[Source],
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    validation: Sequence[Path] = (),
    share: float = 0.02,
    progress: Progress | None = None,
) -> TokenFiles:
    """Make the token files in `folder`, unless they are there, undamaged and up to date.

    Any number of processes may call this at once: one builds, the others wait and open the result. If the
    builder is killed, the next process builds. `progress` is called only in the process that builds. To find
    out whether the files are up to date, every process reads all of the text and all tokens, about 1 GB/s.

    sources: one without a name, or several that are weighed. validation: files of which all documents are in
    the validation part.
    share: of the documents of `sources`, which `corpus.held_out` puts there too; at least one of each source,
    unless it is 0. UserError if a part gets no document of a source, if the folder has files under
    our names that are not ours, or if it cannot be written.
    """
    folder = Path(folder)
    if not 0 <= share < 1:
        raise UserError(f"a held-out share of {share}: at least 0 and less than 1, such as 0.02")
    wanted = _wanted(sources, reading, tokenizer, share)
    if validation:
        wanted["validation"] = _source_hash(validation, reading)
    try:
        while True:
            seen = _manifest_file(folder)
            # Without the lock: this reads all tokens, and many ranks do it at once.
            if found := _made_from(folder, wanted):
                return found  # a copy, or a shared folder that only others may write to, could not be locked
            if foreign := _foreign(folder):
                raise UserError(
                    f"{folder} holds a {foreign} that others made, which would be overwritten: name another "
                    "folder for the token files"
                )
            with locked(folder / _LOCK):
                if _manifest_file(folder) == seen:  # otherwise another process has built meanwhile
                    with _no_leftovers(folder):
                        _build(
                            folder, sources, validation, reading, tokenizer, wanted,
                            progress or (lambda _done, _total: None),
                        )  # fmt: skip
                    return open_tokens(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write the token files ({error.strerror}): {other_place(error, 'folder')}"
        ) from error


def discard(folder: Path) -> None:
    """Remove what `build` makes, whole or not; the folder stays. OSError if that fails."""
    _remove_partial(folder)
    for name in (MANIFEST, *_NAMES, _LOCK):
        (folder / name).unlink(missing_ok=True)


def _source_hash(files: Sequence[Path], reading: Reading) -> str:
    """A hash of names, sizes and contents: any change changes it, but moving all files together does not."""
    root, total = common_folder(files), hashlib.blake2b(reading.key.encode(), digest_size=DIGEST_BYTES)
    for path in files:
        total.update(json.dumps([os.path.relpath(path, root), *file_digest(path)]).encode())
    return total.hexdigest()


def _wanted(
    sources: Sequence[Source], reading: Reading, tokenizer: Tokenizer, share: float
) -> dict[str, Any]:
    """Everything that the content of the token files depends on."""
    return {
        "sources": [[each.name, _source_hash(each.files, reading)] for each in sources],
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "begin": tokenizer.begin,
        "end": tokenizer.end,
        "held_out": share,
    }


def _manifest_file(folder: Path) -> tuple[int, int] | None:
    """Identifies the manifest file that is there: each `build` writes a new one, even with equal content."""
    try:
        # Opened, because a file server's client may cache the state of an older file.
        with (folder / MANIFEST).open("rb") as file:
            found = os.fstat(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def _made_from(folder: Path, wanted: dict[str, Any]) -> TokenFiles | None:
    """The token files in the folder, if they were made from `wanted`; None if they are absent, damaged or
    other."""
    try:
        if open_tokens(folder).made_from != wanted:  # reads only a few tokens
            return None
        found = open_tokens(folder, verify=True)
        return found if found.made_from == wanted else None
    except UserError:
        return None


def _foreign(folder: Path) -> str | None:
    """A file that has one of our names in a folder without our lock, which we make before anything else."""
    there = [name for name in (*_NAMES, MANIFEST) if os.path.lexists(folder / name)]
    return there[0] if there and not os.path.lexists(folder / _LOCK) else None


def _build(
    folder: Path,
    sources: Sequence[Source],
    apart: Sequence[Path],
    reading: Reading,
    tokenizer: Tokenizer,
    wanted: dict[str, Any],
    progress: Progress,
) -> None:
    """Build while holding the lock. The order of the lines matters: whenever this is killed, a manifest
    stands for complete files.

    The sources were hashed before they are read here. If one changes in between, the hash is of the old
    content, and the next call builds again. apart: files that are for validation.
    """
    share = wanted["held_out"]
    files = [path for source in sources for path in source.files]
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    total, done, skipped = total_bytes([*files, *apart]), 0, dict[Path, str]()
    given = divided(sources, reading, share, skipped)
    named = ((Source(apart), document, True) for document in documents(apart, reading, skipped))
    with (
        closing(_PartWriter(folder, "train", dtype, reading)) as train,
        closing(_PartWriter(folder, "validation", dtype, reading)) as validation,
    ):
        for batch in _batches(itertools.chain(given, named)):
            encoded = reading.encode(tokenizer, [document for _, document, _ in batch])
            for (source, document, held_out), each in zip(batch, encoded, strict=True):
                part = validation if held_out else train
                part.add(each, document.learned_bytes, source.name)
                done += len(document.text.encode())
            progress(min(done, total), total)  # a table's text may be larger than its file
        progress(total, total)
        for source in sources:
            _check_parts(train, validation, share, source, skipped)
        if apart and not validation.all.documents:
            raise UserError(f"{common_folder(apart)}: no text in the files for validation: name others")
        for writer in (train, validation):
            writer.finish()
    # From here on the old files are replaced one by one, so they must not pass for a set.
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    for name in _NAMES:
        if os.path.exists(made := folder / f"{name}{_PARTIAL}"):
            os.replace(made, folder / name)
        else:  # of answers, and there are none now
            (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    write_manifest(
        folder,
        {
            "made_from": wanted,
            "dtype": dtype.name,
            "skipped": len(skipped),
            "skipped_bytes": total_bytes(list(skipped)),
            "skipped_first": _first_few(skipped, common_folder(files)),
            "train": train.counts(),
            "validation": validation.counts(),
        },
    )


def _first_few(skipped: Mapping[Path, str], root: str) -> list[str]:
    some = itertools.islice(skipped.items(), _NAMED)
    return [f"{os.path.relpath(path, root)}: {why_not}" for path, why_not in some]


def _check_parts(
    train: _PartWriter,
    validation: _PartWriter,
    share: float,
    source: Source,
    skipped: Mapping[Path, str],
) -> None:
    files, apart = source.files, validation.of_source[source.name]
    held_out = apart.documents
    number = train.of_source[source.name].documents + held_out
    name = files[0] if len(files) == 1 else common_folder(files)
    if not number:
        skipped = {path: why_not for path, why_not in skipped.items() if path in files}
        why = f" ({'; '.join(_first_few(skipped, common_folder(files)))})" if skipped else ""
        raise UserError(f"{name}: no text in {many(len(files), 'file')}{why}: name others")
    if number == 1 and held_out:
        raise UserError(
            f"{name} holds one document, of {apart.bytes:,} bytes, and it is held out for "
            "validation: --data.held-out 0, or more text"
        )
    for part, left, wish in (("train", number - held_out, True), ("validation", held_out, share > 0)):
        if wish and not left:
            raise UserError(
                f"{name}: of {number} documents none is left for {part}: "
                "set another held-out share, or 0, or give more documents"
            )


@contextmanager
def _no_leftovers(folder: Path) -> Iterator[None]:
    """Remove half-written files: those of killed processes, and our own if we fail."""
    _remove_partial(folder)
    try:
        yield
    finally:
        _remove_partial(folder)


def _remove_partial(folder: Path) -> None:
    for leftover in (
        *(folder / f"{name}{_PARTIAL}" for name in _NAMES),
        *leftovers(folder, MANIFEST),
    ):
        leftover.unlink(missing_ok=True)


def _batches(all_documents: Iterator[_Divided]) -> Iterator[list[_Divided]]:
    batch: list[_Divided] = []
    size = 0
    for each in all_documents:
        batch.append(each)
        size += len(each[1].text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class _Counts:
    """What a part has of a source."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    learned: int = 0  # of them, if only answers are


class _PartWriter:
    """Appends documents to two files under temporary names, or to three if only answers are learned."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], reading: Reading) -> None:
        self.all, self.of_source = _Counts(), defaultdict[str, _Counts](_Counts)
        self._dtype = dtype
        suffixes = (*SUFFIXES, ANSWERS) if reading.whole else SUFFIXES
        self._files = {suffix: (folder / f"{name}.{suffix}{_PARTIAL}").open("wb") for suffix in suffixes}
        self._checksums = {suffix: hashlib.blake2b(digest_size=DIGEST_BYTES) for suffix in suffixes}
        self._append("idx", np.int64(0).tobytes())

    def add(self, encoded: Encoded, text_bytes: int, source: str) -> None:
        self._append("bin", encoded.ids.astype(self._dtype).tobytes())
        if encoded.learned is not None:
            self._append(ANSWERS, encoded.learned.tobytes())
        for counts in (self.all, self.of_source[source]):
            counts.documents += 1
            counts.bytes += text_bytes
            counts.tokens += len(encoded.ids)
            counts.learned += int(encoded.learned.sum()) if encoded.learned is not None else 0
        self._append("idx", np.int64(self.all.tokens).tobytes())

    def _append(self, suffix: str, content: bytes) -> None:
        self._files[suffix].write(content)
        self._checksums[suffix].update(content)

    def finish(self) -> None:
        for file in self._files.values():
            sync(file)

    def close(self) -> None:
        """Close all files, even if the first cannot write its rest."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def counts(self) -> dict[str, Any]:
        checksums = {suffix: digest.hexdigest() for suffix, digest in self._checksums.items()}
        counts = {**asdict(self.all), "checksums": checksums}
        named = {name: asdict(each) for name, each in self.of_source.items() if name and each.tokens}
        return counts | ({SOURCES: named} if named else {})
