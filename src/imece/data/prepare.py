"""From the names of texts to the tokenizer and the token files of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imece.data.build import build
from imece.data.corpus import total_bytes
from imece.data.files import locked, other_place
from imece.data.sources import GoneError, sources
from imece.data.tokenizer import (
    LARGEST_VOCAB,
    SMALLEST_VOCAB,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from imece.data.tokens import TokenFiles, open_tokens
from imece.errors import UserError
from imece.listing import many

Progress = Callable[[str, int, int], None]  # (what is under way, bytes of text done, bytes of all files)


@dataclass(frozen=True)
class TextSource:
    """The text, how it becomes tokens, and how much of it is for validation only."""

    paths: tuple[str, ...] = ()
    """Files, folders, globs and datasets (hf:NAME, hf:NAME:SPLIT); none: the Python standard library here."""
    field: str = "text"
    """Where the text is in a line of a .jsonl, or in a row of a table."""
    tokenizer: str = "bpe"
    """bpe: trained on this text; bytes; or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """Entries of a tokenizer that is trained."""
    held_out: float = 0.02
    """Share of the documents that is for validation only, chosen by their content."""
    seed: int = 0
    """Another seed holds out other documents."""

    def __post_init__(self) -> None:
        if any(not path for path in self.paths):
            raise ValueError(f"paths is {list(self.paths)}: an empty path names nothing, leave it out")
        for name in ("field", "tokenizer"):
            if not getattr(self, name):
                raise ValueError(f"{name} is '': such as {TextSource.__dataclass_fields__[name].default!r}")
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


@dataclass(frozen=True)
class Prepared:
    """What training reads."""

    tokenizer: Tokenizer
    tokens: TokenFiles
    files: int  # that were text; 0 where only its tokens are known
    source_bytes: int  # theirs on disk; 0 where only its tokens are known
    run_folders: int = 0  # in the text's folders, and passed over


def prepare(
    source: TextSource, tokenizer_path: Path, folder: Path, progress: Progress | None = None
) -> Prepared:
    """The tokenizer at `tokenizer_path` and the token files in `folder`, made here unless they are there.

    Any number of processes may call it at once: one makes each, the others wait. A tokenizer.json that is
    there is used as it is, whatever `source` says: a model may have been trained with it. Token files are
    made again when the text, the tokenizer or what is held out has changed. Where the text is gone,
    those that were made with this tokenizer are used as they are.

    progress: called in the process that does the work. UserError for whatever is wrong with the text, the
    tokenizer or the disk.
    """
    run_folders: list[Path] = []
    try:
        files = sources(source.paths, source.field, run_folders)
    except GoneError:
        if (made := _made(tokenizer_path, folder)) is None:
            raise
        return made
    tokenizer = _tokenizer(source, files, tokenizer_path, progress)
    making = f"making tokens of {many(len(files), 'file')}"
    tokens = build(
        folder,
        files,
        source.field,
        tokenizer,
        share=source.held_out,
        seed=source.seed,
        progress=partial(progress, making) if progress else None,
    )
    read_bytes = total_bytes(files) - tokens.skipped_bytes
    return Prepared(tokenizer, tokens, len(files) - tokens.skipped, read_bytes, len(run_folders))


def reopen(source: TextSource, tokenizer_path: Path, folder: Path) -> Prepared:
    """What `prepare` has made, for a rank that joins others who read it, whatever has become of the text.

    A host that does not have it whole prepares it, and then it may be of another text: see
    `TokenFiles.identity`. UserError as `prepare`.
    """
    return _made(tokenizer_path, folder) or prepare(source, tokenizer_path, folder)


def _made(tokenizer_path: Path, folder: Path) -> Prepared | None:
    """What is there, if it is whole and of one piece."""
    try:
        tokenizer, tokens = load_tokenizer(tokenizer_path), open_tokens(folder, verify=True)
    except UserError:
        return None
    if tokens.tokenizer_hash != tokenizer.hash:
        return None
    return Prepared(tokenizer, tokens, files=0, source_bytes=0)


def _tokenizer(source: TextSource, files: Sequence[Path], path: Path, progress: Progress | None) -> Tokenizer:
    if not os.path.exists(path):
        try:
            with locked(path.with_name(f".{path.name}.lock")):
                if not os.path.exists(path):  # nobody made it while we waited
                    _make(source, files, progress).save(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}): {other_place(error)} folder"
            ) from error
    return load_tokenizer(path)


def _make(source: TextSource, files: Sequence[Path], progress: Progress | None) -> Tokenizer:
    if source.tokenizer == "bytes":
        return ByteTokenizer()
    if source.tokenizer == "bpe":
        return train_bpe(
            files,
            source.field,
            source.vocab_size,
            share=source.held_out,
            seed=source.seed,
            progress=partial(progress, "learning the tokenizer") if progress else None,
        )
    given = Path(os.path.expanduser(source.tokenizer))
    if not os.path.exists(given):
        raise UserError(f"no tokenizer {source.tokenizer!r}: name bpe, bytes or the path of a tokenizer.json")
    return load_tokenizer(given)
