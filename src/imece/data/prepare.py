"""Makes the tokenizer and the token files of a run from the names of its texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from pathlib import Path

from imece.data.bpe import train_bpe
from imece.data.build import build
from imece.data.chats import Chats
from imece.data.corpus import Source, total_bytes
from imece.data.files import locked
from imece.data.mix import whole_weights
from imece.data.records import FIELDS, Answers, Format, Reading, Texts
from imece.data.sources import GoneError, sources
from imece.data.tokenizer import (
    LARGEST_VOCAB,
    SMALLEST_VOCAB,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)
from imece.data.tokens import TokenFiles, open_tokens
from imece.errors import UserError
from imece.listing import many
from imece.writing import other_place

Progress = Callable[[str, int, int], None]  # (what is being done, bytes of text done, bytes of all files)


@dataclass(frozen=True)
class TextSource:
    """The text, its tokenizer, and the share that is only for validation: the text of these fields is also
    that of `imece train --help`."""

    paths: tuple[str, ...] = ()
    """Files, folders, globs (.txt .md .py .rst .jsonl .parquet), hf:NAME[:SPLIT]. Default: Python's standard
    library, as it lies on this machine."""
    weights: tuple[float, ...] = ()
    """In what proportion a run reads the names of --data, such as 3 1 1: each is a source of its own.
    Default: all of it together, by its size."""
    format: Format = "text"
    """text; or records of which only answers are learned: answers (a prompt and its answer) or chat
    (messages)."""
    field: str | None = None
    """The field of a .jsonl or .parquet record that has the text. Default: text; for answers
    prompt,completion; for chat messages."""
    tokenizer: str = "bpe"
    """bpe: trained on this text; bytes; the path of a tokenizer.json; or model: that of the --from folder,
    the default with it."""
    vocab_size: int = 4096
    """Entries of a tokenizer that is trained here."""
    held_out: float = 0.02
    """Share of the documents that is only for validation, chosen by their content."""
    validation: tuple[str, ...] = ()
    """Text that is only for validation, instead of that share; named as for --data."""

    def __post_init__(self) -> None:
        for name in ("paths", "validation"):
            if "" in (paths := getattr(self, name)):
                raise ValueError(f"{name} is {list(paths)}: an empty path names nothing, leave it out")
        whole_weights(self.weights)
        if not self.tokenizer:
            raise ValueError(f"tokenizer is '': such as {TextSource.tokenizer!r}")
        usual, count = FIELDS[self.format], self.fields.count(",") + 1
        if not self.fields or (self.format == "answers" and (count != 2 or "" in self.fields.split(","))):
            raise ValueError(f"field is {self.fields!r}: such as {usual!r} for {self.format}")
        if self.vocab_size < SMALLEST_VOCAB:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: at least {SMALLEST_VOCAB}, for all bytes and an end"
            )
        if self.vocab_size > LARGEST_VOCAB:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: at most {LARGEST_VOCAB}, for all take memory at once"
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}: at least 0 and less than 1, such as 0.02")

    @property
    def fields(self) -> str:
        """The field, or the usual one."""
        return FIELDS[self.format] if self.field is None else self.field

    def check_weights(self) -> None:
        """UserError if there is not one for each of `paths`. Not checked when this is made: a file may give
        the ones, and options the others."""
        count, names = len(self.weights), len(self.paths)
        if count and count != names:
            raise UserError(
                f"--data.weights names {many(count, 'weight')} for {many(names, 'name')} behind --data: one "
                "for each of them, or leave it out"
            )

    @property
    def share(self) -> float:
        """Of the documents of `paths`, for validation."""
        return 0.0 if self.validation else self.held_out


@dataclass(frozen=True)
class Prepared:
    """What training reads."""

    tokenizer: Tokenizer
    tokens: TokenFiles
    files: int  # with text; 0 if only the tokens are known
    source_bytes: int  # of the files on disk; 0 if only the tokens are known
    run_folders: int = 0  # found in the text's folders, and skipped


def prepare(
    source: TextSource, tokenizer_path: Path, folder: Path, progress: Progress | None = None
) -> Prepared:
    """The tokenizer at `tokenizer_path` and the token files in `folder`; makes those that are missing.

    Any number of processes may call this at once: one makes each file, the others wait. An existing
    tokenizer.json is used whatever `source` says, because a model may have been trained with it. Token files
    are made again when the text, the tokenizer or the held-out share has changed. If the text is gone,
    existing token files of this tokenizer are used. Files that are for validation are not trained on.

    progress: called in the process that does the work. UserError for anything wrong with the text, the
    tokenizer or the disk.
    """
    run_folders: list[Path] = []
    reading = reading_of(source, tokenizer_path)
    try:
        validation = sources(source.validation, reading) if source.validation else []
        by_source = _by_source(source, reading, validation, run_folders)
    except GoneError:
        if (made := _made(tokenizer_path, folder)) is None:
            raise
        return made
    tokenizer = _tokenizer(source, reading, by_source, tokenizer_path, progress)
    every = [*(path for each in by_source for path in each.files), *validation]
    making = f"making tokens of {many(len(every), 'file')}"
    tokens = build(
        folder,
        by_source,
        reading,
        tokenizer,
        validation=validation,
        share=source.share,
        progress=partial(progress, making) if progress else None,
    )
    read_bytes = total_bytes(every) - tokens.skipped_bytes
    return Prepared(tokenizer, tokens, len(every) - tokens.skipped, read_bytes, len(run_folders))


def reading_of(source: TextSource, tokenizer_path: Path) -> Reading:
    """How documents are made of its records. UserError if these are messages, and no chat template is beside
    the tokenizer."""
    match source.format:
        case "chat":
            return Chats.of(source.fields, tokenizer_path)
        case "answers":
            return Answers(*source.fields.split(","))
        case "text":
            return Texts(source.fields)


def _by_source(
    source: TextSource, reading: Reading, validation: Sequence[Path], run_folders: list[Path]
) -> list[Source]:
    """The files of each source; without weights all text is one. UserError if a file is of two sources, or if
    one has none that is not for validation."""
    source.check_weights()
    paths = source.paths
    if len(source.weights) < 2:
        return [Source(_others(sources(paths, reading, run_folders), validation))]
    found, owner = list[Source](), dict[str, int]()
    for number, (name, path) in enumerate(zip(_names(paths), paths, strict=True)):
        files = _others(sources([path], reading, run_folders), validation)
        for file in files:
            other = owner.setdefault(os.path.realpath(file), number)
            if other != number:
                raise UserError(
                    f"{file} is in both {paths[other]} and {path}: with --data.weights a file is of one of "
                    "them: name others, or leave that option out"
                )
        found.append(Source(files, name))
    return found


def _names(paths: Sequence[str]) -> list[str]:
    """A short name for each: as much of its end as tells it from the others, and more than a pattern."""
    ends = ["/" + path.rstrip("/") for path in paths]

    def name(path: str) -> str:
        parts = path.rstrip("/").split("/")
        for first in range(len(parts) - 1, -1, -1):
            tail = "/".join(parts[first:])
            if sum(end.endswith(f"/{tail}") for end in ends) == 1 and not has_magic(parts[first]):
                return tail
        return path

    return list(map(name, paths))


def _others(files: list[Path], validation: Sequence[Path]) -> list[Path]:
    """The files that are not for validation. UserError if none is left."""
    apart = set(map(os.path.realpath, validation))
    left = [path for path in files if os.path.realpath(path) not in apart]
    if not left:
        raise UserError(f"{files[0]}: all text is that of --data.validation: name other text with --data")
    return left


def reopen(source: TextSource, tokenizer_path: Path, folder: Path) -> Prepared:
    """What `prepare` made, for a rank that joins ranks that read it, even if the text has changed since.

    If this host lacks the files, they are made here, possibly from another text: see `TokenFiles.identity`.
    UserError as from `prepare`.
    """
    return _made(tokenizer_path, folder) or prepare(source, tokenizer_path, folder)


def _made(tokenizer_path: Path, folder: Path) -> Prepared | None:
    """The tokenizer and token files that are there, if complete and of one making."""
    try:
        tokenizer, tokens = load_tokenizer(tokenizer_path), open_tokens(folder, verify=True)
    except UserError:
        return None
    if tokens.tokenizer_hash != tokenizer.hash:
        return None
    return Prepared(tokenizer, tokens, files=0, source_bytes=0)


def _tokenizer(
    source: TextSource,
    reading: Reading,
    by_source: Sequence[Source],
    path: Path,
    progress: Progress | None,
) -> Tokenizer:
    if not os.path.exists(path):
        try:
            with locked(path.with_name(f".{path.name}.lock")):
                if not os.path.exists(path):  # nobody made it while this process waited
                    _make(source, reading, by_source, progress).save(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}): {other_place(error, 'folder')}"
            ) from error
    return load_tokenizer(path)


def _make(
    source: TextSource,
    reading: Reading,
    by_source: Sequence[Source],
    progress: Progress | None,
) -> Tokenizer:
    if source.tokenizer == "bytes":
        return ByteTokenizer()
    if source.tokenizer == "bpe":
        return train_bpe(
            by_source,
            reading,
            source.vocab_size,
            share=source.share,
            progress=partial(progress, "learning the tokenizer") if progress else None,
        )
    given = Path(os.path.expanduser(source.tokenizer))
    if not os.path.exists(given):
        raise UserError(f"no tokenizer {source.tokenizer!r}: name bpe, bytes or the path of a tokenizer.json")
    return load_tokenizer(given)
