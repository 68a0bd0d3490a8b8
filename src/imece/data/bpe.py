"""Trains a byte-level BPE on the run's text."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence

import tokenizers
from tokenizers import models, trainers

from imece.data.corpus import Source, divided, fraction, total_bytes
from imece.data.records import TEXT, Reading
from imece.data.tokenizer import (
    END,
    SMALLEST_VOCAB,
    JsonTokenizer,
    Tokenizer,
    letters_of_bytes,
    make_byte_level,
    token_of,
)
from imece.errors import UserError

_PROGRESS_BYTES = 1 << 20
# Longer words are cut before training: each merge visits every word that it occurs in, and a genome on one
# line is a single word.
_LONG_WORD = re.compile(r"(\w{256})")


def train_bpe(
    sources: Sequence[Source],
    reading: Reading = TEXT,
    vocab_size: int = 4096,
    *,
    share: float = 0.02,
    sample_bytes: int = 20_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """A byte-level BPE of the documents of `sources`; the same content gives the same BPE on every machine.

    vocab_size: entries, with `end` and the 256 bytes; a small corpus may fill fewer.
    share: documents that `build` puts into the validation part are not learned from.
    sample_bytes: about this much of a larger corpus is learned from; documents are drawn by content.
    progress: called with (bytes of text read, bytes of all files), about once per MiB.
    UserError if the vocabulary has no room for all bytes.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"a vocabulary of {vocab_size}: at least {SMALLEST_VOCAB}, for all bytes and a document's end"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    make_byte_level(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=letters_of_bytes(), show_progress=False
    )
    total = total_bytes([path for source in sources for path in source.files])

    def sample() -> Iterator[str]:
        done = told = 0
        # Cut as for the token files: a document that is whole here might be held out in part there.
        for _, document, apart in divided(sources, reading, share, skipped={}):
            text = document.text
            drawn = total <= sample_bytes or fraction(text, "tokenizer") < sample_bytes / total
            if drawn and not apart:
                yield from filter(None, _LONG_WORD.split(text))
            done += len(text.encode())
            if progress and done - told >= _PROGRESS_BYTES:
                progress(min(done, total), total)
                told = done
        if progress:
            progress(total, total)

    _interruptible(lambda texts: tokenizer.train_from_iterator(texts, trainer), sample())
    return JsonTokenizer(tokenizer, token_of(tokenizer, END))


def _interruptible(learn: Callable[[Iterator[str]], None], texts: Iterator[str]) -> None:
    """`learn(texts)` on a thread beside, so that Ctrl-C is heard at once: when all is read, it makes merges
    for seconds without coming back to Python, which calls handlers of signals on the main thread alone."""
    errors: list[BaseException] = []
    # Not Thread.join, which after a Ctrl-C takes the thread for one that has ended.
    left, all_read, done = threading.Event(), threading.Event(), threading.Event()

    def read() -> Iterator[str]:
        for text in texts:
            if left.is_set():
                raise KeyboardInterrupt
            yield text
        all_read.set()

    def run() -> None:
        try:
            learn(read())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="imece: learning the tokenizer", daemon=True).start()
    try:
        done.wait()
    finally:
        left.set()
        if not all_read.is_set():  # it would run Python while the interpreter ends
            done.wait(2.0)
    if errors:
        raise errors[0]
