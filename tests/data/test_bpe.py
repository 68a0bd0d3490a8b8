"""A BPE is learned from the text that it may see, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imece.data import bpe as bpe_module
from imece.data.bpe import train_bpe
from imece.data.corpus import Source, documents, fraction, held_out
from imece.data.tokenizer import ByteTokenizer, Tokenizer
from tests.data.helpers import mistake, write_functions


def test_a_bpe_has_learned_words_and_all_bytes(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 300
    assert len(bpe.encode("    return argument")) < 8
    assert len(bpe.encode("日")) == 3  # never learned, so its bytes


def test_the_same_text_gives_the_same_bpe(tmp_path: Path, bpe: Tokenizer) -> None:
    other_place = tmp_path / "other"
    other_place.mkdir()
    again = train_bpe([Source(write_functions(other_place))], vocab_size=300)
    assert again.hash == bpe.hash
    assert again.to_json() == bpe.to_json()
    assert train_bpe([Source(write_functions(other_place))], vocab_size=299).hash != bpe.hash
    assert ByteTokenizer().hash == ByteTokenizer().hash != bpe.hash


def test_what_is_held_out_is_not_learned_from(tmp_path: Path) -> None:
    files = []
    for number in range(60):
        files.append(tmp_path / f"{number}.txt")
        secret = held_out(f"{number} visible " * 9, 0.3) or held_out(f"{number} secret " * 9, 0.3)
        files[-1].write_text(f"{number} {'secret' if secret else 'visible'} " * 9)
    kept = [file for file in files if not held_out(file.read_text(), 0.3)]
    assert 20 < len(kept) < 60
    learned_from_kept = train_bpe([Source(kept)], vocab_size=320, share=0).hash
    assert train_bpe([Source(files)], vocab_size=320, share=0.3).hash == learned_from_kept
    assert train_bpe([Source(files)], vocab_size=320, share=0).hash != learned_from_kept


def test_also_the_one_document_of_a_small_corpus_is_held_out(tmp_path: Path) -> None:
    texts = [file.read_text() for file in write_functions(tmp_path, count=5)]
    least = min(texts, key=lambda text: fraction(text, "held out 0"))
    all_of_it, kept = tmp_path / "all.jsonl", tmp_path / "kept.jsonl"
    for path, some in ((all_of_it, texts), (kept, [text for text in texts if text != least])):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    learned_from_kept = train_bpe([Source([kept])], vocab_size=300, share=0).hash
    assert train_bpe([Source([all_of_it])], vocab_size=300, share=1e-9).hash == learned_from_kept
    assert train_bpe([Source([all_of_it])], vocab_size=300, share=0).hash != learned_from_kept


def test_of_one_small_file_too_the_held_out_pieces_are_not_learned_from(tmp_path: Path) -> None:
    book, kept = tmp_path / "book.txt", tmp_path / "kept.jsonl"
    book.write_text(
        "".join(f"line {number} of a book that is {number % 7 * 'long '}\n" for number in range(2000))
    )
    pieces = [document.text for document in documents([book], to_hold_out=True)]
    some = [text for text in pieces if not held_out(text, 0.3)]
    assert 5 < len(some) < len(pieces)
    kept.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    learned_from_kept = train_bpe([Source([kept])], vocab_size=320, share=0).hash
    assert train_bpe([Source([book])], vocab_size=320, share=0.3).hash == learned_from_kept
    assert train_bpe([Source([book])], vocab_size=320, share=0).hash != learned_from_kept


def test_a_word_without_end_is_learned_from_in_pieces(tmp_path: Path) -> None:
    """A genome, or a text in a script without spaces: its merges would each go through all of it."""
    (tmp_path / "a.txt").write_text("a" * 60_000 + "b")
    tokenizer = train_bpe([Source([tmp_path / "a.txt"])], vocab_size=300, share=0)
    lengths = {len(tokenizer.decode([token]).encode()) for token in range(257, tokenizer.vocab_size)}
    assert max(lengths) == 256
    assert tokenizer.decode(tokenizer.encode("a" * 60_000 + "b")) == "a" * 60_000 + "b"
    words = " ".join(f"{word}{'x' * 240}" for word in range(40))
    (tmp_path / "a.txt").write_text(words)
    whole = train_bpe([Source([tmp_path / "a.txt"])], vocab_size=300, share=0).hash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imece.data.bpe._LONG_WORD", re.compile("nothing"))
        assert train_bpe([Source([tmp_path / "a.txt"])], vocab_size=300, share=0).hash == whole


def test_of_a_large_corpus_a_sample_is_learned_from(tmp_path: Path) -> None:
    files = write_functions(tmp_path)
    share = 1000 / sum(file.stat().st_size for file in files)
    drawn = [file for file in files if fraction(file.read_text(), "tokenizer") < share]
    assert 0 < len(drawn) < len(files)
    sampled = train_bpe([Source(files)], vocab_size=300, share=0, sample_bytes=1000)
    kept = tmp_path / "kept.jsonl"  # so few files would be cut
    kept.write_text("".join(json.dumps({"text": file.read_text()}) + "\n" for file in drawn))
    assert sampled.hash == train_bpe([Source([kept])], vocab_size=300, share=0).hash


def test_progress_of_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imece.data.bpe._PROGRESS_BYTES", 500)
    told: list[tuple[int, int]] = []
    files = write_functions(tmp_path)
    train_bpe([Source(files)], vocab_size=257, progress=lambda done, total: told.append((done, total)))
    total = sum(file.stat().st_size for file in files)
    assert len(told) > 5
    assert told == sorted(told)
    assert {each for _, each in told} == {total}
    assert told[-1] == (total, total)


def test_a_vocabulary_without_room(tmp_path: Path) -> None:
    files = write_functions(tmp_path)
    assert train_bpe([Source(files)], vocab_size=257).vocab_size == 257
    assert "a vocabulary of 256: at least 257" in mistake(train_bpe, [Source(files)], vocab_size=256)


def test_a_bad_line_stops_the_learning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    assert "a.jsonl:2: field 'text'" in mistake(train_bpe, [Source([tmp_path / "a.jsonl"])])


@pytest.mark.parametrize("reading", [True, False])
def test_ctrl_c_is_heard_while_a_bpe_is_learned(reading: bool) -> None:
    begun, ended = threading.Event(), threading.Event()

    def texts() -> Iterator[str]:
        begun.set()
        while reading:
            time.sleep(0.01)
            yield "text"
        yield "text"

    def learn(given: Iterator[str]) -> None:
        try:
            list(given)
            hashlib.pbkdf2_hmac("sha256", b"in C,", b"without a look at signals", 6_000_000)
        finally:
            ended.set()

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        bpe_module._interruptible(learn, texts())
    assert ended.is_set() == reading  # no thread that runs Python is left, and nobody waits for one in C


def test_what_is_wrong_with_a_text_is_told_by_the_one_who_learns(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    assert "wrong.jsonl:1: no field 'text'" in mistake(train_bpe, [Source([wrong])], vocab_size=300)
