"""Makes the token files, once, whoever else wants them and whenever it is killed."""

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
import numpy.typing as npt

from imece.data.corpus import Document, common_folder, documents, held_out, share_of_one, total_bytes
from imece.data.files import DIGEST_BYTES, file_digest, locked, other_place
from imece.data.tokenizer import Tokenizer
from imece.data.tokens import MANIFEST, PARTS, SUFFIXES, TokenFiles, open_tokens, write_manifest
from imece.errors import UserError
from imece.listing import many
from imece.writing import leftovers, sync, sync_folder

Progress = Callable[[int, int], None]  # (bytes of text tokenized, bytes of all files)

_LOCK = "lock"
_PARTIAL = ".partial"
_NAMES = tuple(f"{part}.{suffix}" for part in PARTS for suffix in SUFFIXES)
_BATCH_BYTES = 1 << 20  # of text that is tokenized at once; the package needs some 40 times that
_BATCH_DOCUMENTS = 1024
_NAMED = 3  # of the files that are no text


def build(
    folder: Path | str,
    files: Sequence[Path],
    field: str,
    tokenizer: Tokenizer,
    *,
    share: float = 0.02,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokenFiles:
    """Makes the token files in `folder`, unless they are there, undamaged and up to date.

    Any number of processes may call it at once: one builds, the others wait and then open what it built. If
    that one is killed, the next one builds. `progress` is called only in a process that builds. To find out,
    each of them reads all of `files` and all tokens, about 1 GB a second, all at the same time.

    share, seed: of the documents that `corpus.held_out` puts into the validation part; at least one, if share
    is not 0. UserError if a part that was asked for gets no document, if the folder has files of others under
    our names, and if it cannot be written to.
    """
    folder = Path(folder)
    if not 0 <= share < 1:
        raise UserError(f"a held-out share of {share}: at least 0 and less than 1, such as 0.02")
    wanted = _wanted(files, field, tokenizer, share, seed)
    try:
        while True:
            seen = _manifest_file(folder)
            # Without the lock: it reads all tokens, and many ranks do so at once.
            if found := _made_from(folder, wanted):
                return found  # perhaps a copy, or a shared folder in which only others may write, and so lock
            if foreign := _foreign(folder):
                raise UserError(
                    f"{folder} holds a {foreign} that others made, which would be overwritten: name another "
                    "folder for the token files"
                )
            with locked(folder / _LOCK):
                if _manifest_file(folder) == seen:  # else another one has built while this one waited
                    with _no_leftovers(folder):
                        _build(
                            folder, files, field, tokenizer, wanted, progress or (lambda _done, _total: None)
                        )
                    return open_tokens(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write the token files ({error.strerror}): {other_place(error)} folder"
        ) from error


def discard(folder: Path) -> None:
    """Take away what `build` makes, whole or not; the folder itself stays. OSError if that cannot be."""
    _remove_partial(folder)
    for name in (MANIFEST, *_NAMES, _LOCK):
        (folder / name).unlink(missing_ok=True)


def _source_hash(files: Sequence[Path], field: str) -> str:
    """Over names, sizes and contents: it changes whenever any of them does, and not when all are moved."""
    root, total = common_folder(files), hashlib.blake2b(field.encode(), digest_size=DIGEST_BYTES)
    for path in files:
        total.update(json.dumps([os.path.relpath(path, root), *file_digest(path)]).encode())
    return total.hexdigest()


def _wanted(
    files: Sequence[Path], field: str, tokenizer: Tokenizer, share: float, seed: int
) -> dict[str, Any]:
    """All that the content of the token files depends on."""
    wanted = {
        "source": _source_hash(files, field),
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "held_out": {"share": share, "seed": seed},
    }
    return wanted if tokenizer.begin is None else wanted | {"begin": tokenizer.begin}


def _manifest_file(folder: Path) -> tuple[int, int] | None:
    """Which one is there: each `build` makes another, be its content the same."""
    try:
        with (folder / MANIFEST).open(
            "rb"
        ) as file:  # opened, or a file server's client may know an older one
            found = os.fstat(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def _made_from(folder: Path, wanted: dict[str, Any]) -> TokenFiles | None:
    """What is in the folder, if it is that; None if it is absent, damaged or of something else."""
    try:
        if open_tokens(folder).made_from != wanted:  # this reads few of them
            return None
        found = open_tokens(folder, verify=True)
        return found if found.made_from == wanted else None
    except UserError:
        return None


def _foreign(folder: Path) -> str | None:
    """What has one of our names in a folder that is none of ours: those have a lock before anything else."""
    there = [name for name in (*_NAMES, MANIFEST) if os.path.lexists(folder / name)]
    return there[0] if there and not os.path.lexists(folder / _LOCK) else None


def _build(
    folder: Path,
    files: Sequence[Path],
    field: str,
    tokenizer: Tokenizer,
    wanted: dict[str, Any],
    progress: Progress,
) -> None:
    """Needs the lock. The order matters at every line: whenever it is killed, a manifest is of whole files.

    The sources were hashed before they are read here. If one changes in between, the hash is that of the
    old content, and the next call builds again.
    """
    share, seed = wanted["held_out"]["share"], wanted["held_out"]["seed"]
    share = share_of_one(files, field, share, seed)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    begin = np.array([] if tokenizer.begin is None else [tokenizer.begin], np.uint32)
    total, done, skipped = total_bytes(files), 0, dict[Path, str]()
    with (
        closing(_PartWriter(folder, "train", dtype)) as train,
        closing(_PartWriter(folder, "validation", dtype)) as validation,
    ):
        for batch in _batches(documents(files, field, skipped, to_hold_out=share > 0)):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                part = validation if held_out(document.text, share, seed) else train
                text_bytes = len(document.text.encode())
                part.add(np.append(begin, ids), tokenizer.end, text_bytes)
                done += text_bytes
            progress(min(done, total), total)  # tables hold more text than they have bytes on disk
        progress(total, total)
        _check_parts(train, validation, share, files)
        for writer in (train, validation):
            writer.finish()
    # From here on the old files are replaced one by one: they must not be taken for a set.
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    for name in _NAMES:
        os.replace(folder / f"{name}{_PARTIAL}", folder / name)
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


def _check_parts(train: _PartWriter, validation: _PartWriter, share: float, files: Sequence[Path]) -> None:
    number = train.documents + validation.documents
    name = files[0] if len(files) == 1 else common_folder(files)
    if not number:
        raise UserError(f"{name}: no text in {many(len(files), 'file')}: name others")
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
    """Half-written files go away: those of a process that was killed, and our own if we fail."""
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
    """Two files under temporary names, to which documents are appended."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self.name = name
        self.documents = self.tokens = self.text_bytes = 0
        self._dtype = dtype
        self._files = {suffix: (folder / f"{name}.{suffix}{_PARTIAL}").open("wb") for suffix in SUFFIXES}
        self._checksums = {suffix: hashlib.blake2b(digest_size=DIGEST_BYTES) for suffix in SUFFIXES}
        self._append("idx", np.int64(0).tobytes())

    def add(self, ids: npt.NDArray[np.uint32], end: int, text_bytes: int) -> None:
        self._append("bin", np.append(ids, np.uint32(end)).astype(self._dtype).tobytes())
        self.documents += 1
        self.tokens += len(ids) + 1
        self.text_bytes += text_bytes
        self._append("idx", np.int64(self.tokens).tobytes())

    def _append(self, suffix: str, content: bytes) -> None:
        self._files[suffix].write(content)
        self._checksums[suffix].update(content)

    def finish(self) -> None:
        for file in self._files.values():
            sync(file)

    def close(self) -> None:
        """Both files, also if one cannot take what is still to be written."""
        with suppress(OSError):
            self._files["bin"].close()
        with suppress(OSError):
            self._files["idx"].close()

    def counts(self) -> dict[str, Any]:
        checksums = {suffix: digest.hexdigest() for suffix, digest in self._checksums.items()}
        return {
            "documents": self.documents,
            "bytes": self.text_bytes,
            "tokens": self.tokens,
            "checksums": checksums,
        }
