"""Makes the token files, exactly once, however many processes want them and whenever one is killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from imece.data.corpus import common_folder, documents, held_out, share_of_one, total_bytes
from imece.data.files import DIGEST_BYTES, file_digest, locked, other_place
from imece.data.records import Document, Encoded, Reading
from imece.data.tokenizer import Tokenizer
from imece.data.tokens import ANSWERS, MANIFEST, PARTS, SUFFIXES, TokenFiles, open_tokens, write_manifest
from imece.errors import UserError
from imece.listing import many
from imece.writing import leftovers, sync, sync_folder

Progress = Callable[[int, int], None]  # (bytes of text tokenized, bytes of all files)

_LOCK = "lock"
_PARTIAL = ".partial"
_NAMES = tuple(f"{part}.{suffix}" for part in PARTS for suffix in (*SUFFIXES, ANSWERS))
_BATCH_BYTES = 1 << 20  # text tokenized at once; the package needs some 40 times as much memory
_BATCH_DOCUMENTS = 1024
_NAMED = 3  # files without text that a message names


def build(
    folder: Path | str,
    files: Sequence[Path],
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    validation: Sequence[Path] = (),
    share: float = 0.02,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokenFiles:
    """Make the token files in `folder`, unless they are there, undamaged and up to date.

    Any number of processes may call this at once: one builds, the others wait and open the result. If the
    builder is killed, the next process builds. `progress` is called only in the process that builds. To find
    out whether the files are up to date, every process reads all of `files` and all tokens, about 1 GB/s.

    validation: files of which all documents are in the validation part.
    share, seed: choose the documents of `files` that `corpus.held_out` puts there too; at least one, unless
    share is 0. UserError if a part gets no document, if the folder has files under our names that are not
    ours, or if it cannot be written.
    """
    folder = Path(folder)
    if not 0 <= share < 1:
        raise UserError(f"a held-out share of {share}: at least 0 and less than 1, such as 0.02")
    wanted = _wanted(files, reading, tokenizer, share, seed)
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
                            folder, files, validation, reading, tokenizer, wanted,
                            progress or (lambda _done, _total: None),
                        )  # fmt: skip
                    return open_tokens(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write the token files ({error.strerror}): {other_place(error)} folder"
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
    files: Sequence[Path], reading: Reading, tokenizer: Tokenizer, share: float, seed: int
) -> dict[str, Any]:
    """Everything that the content of the token files depends on."""
    wanted = {
        "source": _source_hash(files, reading),
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "held_out": {"share": share, "seed": seed},
    }
    return wanted if tokenizer.begin is None else wanted | {"begin": tokenizer.begin}


def _manifest_file(folder: Path) -> tuple[int, int] | None:
    """Identifies the manifest file that is there: each `build` writes a new one, even with equal content."""
    try:
        with (folder / MANIFEST).open(
            "rb"
        ) as file:  # opened, because a file server's client may cache the state of an older file
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
    files: Sequence[Path],
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
    share, seed = wanted["held_out"]["share"], wanted["held_out"]["seed"]
    share = share_of_one(files, reading, share, seed)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    total, done, skipped = total_bytes([*files, *apart]), 0, dict[Path, str]()
    streams = (
        (share, documents(files, reading, skipped, to_hold_out=share > 0)),
        (1.0, documents(apart, reading, skipped)),
    )
    with (
        closing(_PartWriter(folder, "train", dtype, reading)) as train,
        closing(_PartWriter(folder, "validation", dtype, reading)) as validation,
    ):
        for share_of_it, batch in ((each, batch) for each, stream in streams for batch in _batches(stream)):
            for document, encoded in zip(batch, reading.encode(tokenizer, batch), strict=True):
                part = validation if held_out(document.text, share_of_it, seed) else train
                part.add(encoded, document.learned_bytes)
                done += len(document.text.encode())
            progress(min(done, total), total)  # a table's text may be larger than its file
        progress(total, total)
        _check_parts(train, validation, share, files, skipped)
        if apart and not validation.documents:
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
    files: Sequence[Path],
    skipped: Mapping[Path, str],
) -> None:
    number = train.documents + validation.documents
    name = files[0] if len(files) == 1 else common_folder(files)
    if not number:
        why = f" ({'; '.join(_first_few(skipped, common_folder(files)))})" if skipped else ""
        raise UserError(f"{name}: no text in {many(len(files), 'file')}{why}: name others")
    if number == 1 and validation.documents:
        raise UserError(
            f"{name} holds one document, of {validation.text_bytes:,} bytes, and it is held out for "
            "validation: --data.held-out 0, or more text"
        )
    for writer, wish in ((train, True), (validation, share > 0)):
        if wish and not writer.documents:
            raise UserError(
                f"{name}: of {number} documents none is left for {writer.name}: "
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


def _batches(all_documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in all_documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _PartWriter:
    """Appends documents to two files under temporary names, or to three if only answers are learned."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], reading: Reading) -> None:
        self.name = name
        self.documents = self.tokens = self.text_bytes = self.learned = 0
        self._dtype = dtype
        suffixes = (*SUFFIXES, ANSWERS) if reading.whole else SUFFIXES
        self._files = {suffix: (folder / f"{name}.{suffix}{_PARTIAL}").open("wb") for suffix in suffixes}
        self._checksums = {suffix: hashlib.blake2b(digest_size=DIGEST_BYTES) for suffix in suffixes}
        self._append("idx", np.int64(0).tobytes())

    def add(self, encoded: Encoded, text_bytes: int) -> None:
        self._append("bin", encoded.ids.astype(self._dtype).tobytes())
        if encoded.learned is not None:
            self._append(ANSWERS, encoded.learned.tobytes())
            self.learned += int(encoded.learned.sum())
        self.documents += 1
        self.tokens += len(encoded.ids)
        self.text_bytes += text_bytes
        self._append("idx", np.int64(self.tokens).tobytes())

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
        return {
            "documents": self.documents,
            "bytes": self.text_bytes,
            "tokens": self.tokens,
            **({"learned": self.learned} if ANSWERS in checksums else {}),
            "checksums": checksums,
        }
