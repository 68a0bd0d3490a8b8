"""From names of texts to tokens: made once, by one process, with an existing tokenizer if there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from imece.data.bpe import train_bpe
from imece.data.corpus import Source
from imece.data.prepare import TextSource, prepare, reopen
from imece.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.helpers import files_of_at_most, mistake
from tests.data.processes import content, run_processes, write_texts


@pytest.fixture
def texts(tmp_path: Path) -> str:
    write_texts(tmp_path / "texts", "some words", count=40)
    return str(tmp_path / "texts")


def test_the_default_is_ready_to_train_on(tmp_path: Path, texts: str) -> None:
    told: list[tuple[str, int, int]] = []
    (Path(texts) / "binary.txt").write_bytes(b"\0")
    source = TextSource((texts,), vocab_size=270)
    prepared = prepare(
        source, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens", lambda *args: told.append(args)
    )
    assert prepared.files == 40
    assert prepared.source_bytes == sum(file.stat().st_size for file in Path(texts).iterdir()) - 1
    assert prepared.tokenizer.vocab_size == prepared.tokens.vocab_size == 270
    assert prepared.tokenizer.hash == prepared.tokens.tokenizer_hash
    assert prepared.tokenizer.hash == load_tokenizer(tmp_path / "run").hash
    parts = prepared.tokens.train, prepared.tokens.validation
    assert sum(part.documents for part in parts) == 40
    assert parts[1].documents > 0
    decoded = [prepared.tokenizer.decode(part.document(0)[:-1].tolist()) for part in parts]
    assert all(text.startswith("some words ") for text in decoded)
    learned = "learning the tokenizer"
    # So little is learned without a word before the end.
    assert sum(what == learned for what, _, _ in told) == 1
    assert {what for what, _, _ in told} == {learned, "making tokens of 41 files"}
    assert told[-1] == ("making tokens of 41 files", prepared.source_bytes + 1, prepared.source_bytes + 1)
    assert prepared.tokens.skipped_first == (
        "binary.txt: a NUL at byte 0, so not text: name text files only",
    )


def test_text_for_validation(tmp_path: Path, texts: str) -> None:
    """All of it is held out and nothing else, and what both name is not trained on; it is made anew when that
    text changes."""
    apart = sorted(Path(texts).iterdir())[0]
    other = tmp_path / "other.txt"
    other.write_text("another text")
    source = TextSource((texts,), vocab_size=270, validation=(str(apart), str(other)))

    def made() -> tuple[int, int, list[str]]:
        prepared = prepare(source, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
        train, held = prepared.tokens.train, prepared.tokens.validation
        texts = [prepared.tokenizer.decode(held.document(i)[:-1].tolist()) for i in range(held.documents)]
        return prepared.files, train.documents, sorted(texts)

    assert made() == (41, 39, sorted([apart.read_text(), "another text"]))
    other.write_text("changed")
    assert made() == (41, 39, sorted([apart.read_text(), "changed"]))
    whole = TextSource((str(apart),), validation=(texts,))
    assert "all text is that of --data.validation" in mistake(prepare, whole, tmp_path / "t", tmp_path / "b")


def test_a_second_call_finds_nothing_to_do(tmp_path: Path, texts: str) -> None:
    def call(**options: Any) -> tuple[list[str], list[list[int]]]:
        told: list[str] = []
        source = TextSource((texts,), **{"vocab_size": 270, **options})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("imece.data.bpe._PROGRESS_BYTES", 1)
            prepared = prepare(
                source, tmp_path / "tokenizer.json", tmp_path / "tokens", lambda what, *_: told.append(what)
            )
        return sorted(set(told)), content(prepared.tokens)

    first = call()
    assert first[0] == ["learning the tokenizer", "making tokens of 40 files"]
    assert call() == ([], first[1])
    assert call(held_out=0.3)[0] == ["making tokens of 40 files"]
    (tmp_path / "tokenizer.json").unlink()
    assert call(held_out=0.3)[0] == first[0]


def written(path: Path) -> tuple[str, int, int, int]:
    """Which file it is, and when it was written; it may be read meanwhile."""
    found = path.stat()
    return path.name, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def test_a_tokenizer_that_is_there_is_never_replaced(tmp_path: Path, texts: str) -> None:
    path = tmp_path / "tokenizer.json"
    ByteTokenizer().save(path)
    before = written(path)
    for tokenizer in ("bpe", "bytes", str(tmp_path / "nowhere.json")):
        prepared = prepare(TextSource((texts,), tokenizer=tokenizer), path, tmp_path / "tokens")
        assert isinstance(prepared.tokenizer, ByteTokenizer)
        assert prepared.tokens.vocab_size == 257
    assert written(path) == before
    assert sorted(os.listdir(tmp_path)) == ["texts", "tokenizer.json", "tokens"]  # nor is it locked
    path.write_text("{}")
    assert f"{path}: not a tokenizer.json" in mistake(
        prepare, TextSource((texts,)), path, tmp_path / "tokens"
    )
    assert path.read_text() == "{}"


def test_each_kind_of_tokenizer(tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = train_bpe([Source(sorted(Path(texts).iterdir()))], vocab_size=260)
    own.save(tmp_path / "own.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, (name, expected) in enumerate(
        [("bytes", ByteTokenizer().hash), (str(tmp_path / "own.json"), own.hash), ("~/own.json", own.hash)]
    ):
        path = tmp_path / str(number) / "tokenizer.json"
        assert (
            prepare(TextSource((texts,), tokenizer=name), path, tmp_path / "tokens").tokenizer.hash
            == expected
        )
    message = mistake(prepare, TextSource((texts,), tokenizer="byte"), tmp_path / "new.json", tmp_path / "t")
    assert "no tokenizer 'byte': name bpe, bytes or the path of a tokenizer.json" in message
    assert not (tmp_path / "new.json").exists()
    text = TextSource((texts,), tokenizer="x" * 300)
    assert "no tokenizer 'xxx" in mistake(prepare, text, tmp_path / "new.json", tmp_path / "t")


def test_what_stands_beside_a_tokenizer_comes_with_it(tmp_path: Path, texts: str) -> None:
    """Or its copy would have another end, or none, and would begin no document."""
    given = tmp_path / "given/tokenizer.json"
    given.parent.mkdir()
    own = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    own.add_special_tokens(["<s>", "<|im_end|>"])
    own.save(str(given))
    says = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "add_bos_token": True}
    given.with_name("tokenizer_config.json").write_text(json.dumps(says))
    source = TextSource((texts,), tokenizer=str(given))
    prepared = prepare(source, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
    for tokenizer in (load_tokenizer(given), load_tokenizer(tmp_path / "run"), prepared.tokenizer):
        assert (tokenizer.begin, tokenizer.end) == (257, 258)
    part = prepared.tokens.train
    assert all(part.document(i)[[0, -1]].tolist() == [257, 258] for i in range(part.documents))
    prepared.tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).before == 257


def test_what_is_wrong_leaves_no_tokenizer(tmp_path: Path, texts: str) -> None:
    path = tmp_path / "run/tokenizer.json"
    assert "no such file" in mistake(prepare, TextSource(("nowhere",)), path, tmp_path / "tokens")
    assert not path.parent.exists()
    with files_of_at_most(100):
        assert f"{path}: cannot be written" in mistake(
            prepare, TextSource((texts,)), path, tmp_path / "tokens"
        )
    (tmp_path / "file").touch()
    below = tmp_path / "file/tokenizer.json"
    assert f"{below}: cannot be written" in mistake(prepare, TextSource((texts,)), below, tmp_path / "tokens")
    assert os.listdir(path.parent) == [".tokenizer.json.lock"]
    assert prepare(TextSource((texts,)), path, tmp_path / "tokens").files == 40


def test_who_joins_reads_what_the_others_do(tmp_path: Path, texts: str) -> None:
    path, folder = tmp_path / "tokenizer.json", tmp_path / "tokens"
    source = TextSource((texts,), vocab_size=270)
    first = prepare(source, path, folder)
    before = [written(each) for each in sorted(folder.iterdir())]
    write_texts(Path(texts), "added words", count=41)
    for each in (reopen(source, path, folder), reopen(TextSource(("gone",)), path, folder)):
        assert content(each.tokens) == content(first.tokens)
        assert (each.tokens.identity, each.tokenizer.hash) == (first.tokens.identity, first.tokenizer.hash)
    assert [written(each) for each in sorted(folder.iterdir())] == before
    elsewhere = reopen(source, path, tmp_path / "elsewhere")  # a host that has none: of the text as it is now
    assert elsewhere.tokens.identity != first.tokens.identity
    (folder / "train.bin").write_bytes(b"?" * (folder / "train.bin").stat().st_size)
    assert reopen(source, path, folder).tokens.identity == elsewhere.tokens.identity
    ByteTokenizer().save(path)
    assert reopen(source, path, folder).tokens.tokenizer_hash == ByteTokenizer().hash


def test_tokens_are_enough_where_the_text_is_gone(tmp_path: Path, texts: str) -> None:
    """But not those of another tokenizer, nor damaged ones: then it is to be said what is missing."""
    path, folder, source = tmp_path / "tokenizer.json", tmp_path / "tokens", TextSource((texts,))
    first = prepare(source, path, folder)
    Path(texts).rename(tmp_path / "moved")
    gone = prepare(source, path, folder)
    assert content(gone.tokens) == content(first.tokens) and gone.files == gone.source_bytes == 0
    said = f"{texts}: no such file or folder: check the path"
    kept = path.read_bytes()
    ByteTokenizer().save(path)
    assert mistake(prepare, source, path, folder) == said
    path.unlink()
    assert mistake(prepare, source, path, folder) == said
    path.write_bytes(kept)
    (folder / "train.bin").write_bytes(b"?" * (folder / "train.bin").stat().st_size)
    assert mistake(prepare, source, path, folder) == said


def test_of_many_processes_one_makes_each(tmp_path: Path) -> None:
    """Two of five are killed, each while it makes something and the others wait; the next one takes over."""
    found = run_processes("prepare_at_once", tmp_path)
    log = [line.split()[0] for line in found["log"]]
    assert log == ["learns", "pauses", "learns", "builds", "pauses", "builds", "done", "done", "done"]
    assert len(set(found["log"][-3:])) == 1
    assert found["left"] == [
        ".tokenizer.json.lock",
        "lock",
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "train.idx",
        "validation.bin",
        "validation.idx",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 256}, "vocab_size is 256"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"held_out": -0.5}, "held_out is -0.5"),
        ({"held_out": float("nan")}, "held_out is nan"),
        ({"field": ""}, "field is ''"),
        ({"tokenizer": ""}, "tokenizer is ''"),
        ({"paths": ("a", "")}, "paths is ['a', '']"),
        ({"validation": ("",)}, "validation is ['']"),
    ],
)
def test_sources_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as raised:
        TextSource(**options)
    assert words in str(raised.value)
