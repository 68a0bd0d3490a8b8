"""Token files are built once, whenever needed, and are complete at every instant."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from imece.data import build as build_module
from imece.data.bpe import train_bpe
from imece.data.build import build
from imece.data.corpus import Source
from imece.data.files import locked
from imece.data.records import TEXT, Texts
from imece.data.sources import sources
from imece.data.tokenizer import ByteTokenizer, load_tokenizer
from imece.data.tokens import MANIFEST, TokenFiles, open_tokens
from tests.data.helpers import files_of_at_most, mistake
from tests.data.processes import content, open_or_none, run_processes, write_texts

_NAMES = sorted([MANIFEST, "lock", "train.bin", "train.idx", "validation.bin", "validation.idx"])


class Built:
    """Calls `build` and counts how often it had something to do."""

    def __init__(self) -> None:
        self.times = 0
        self._done = 0

    def __call__(self, *args: Any, **options: Any) -> TokenFiles:
        self._done = 0
        return build(*args, **{"share": 0.3, "progress": self._progress, **options})

    def _progress(self, done: int, total: int) -> None:
        assert self._done <= done <= total
        self.times += self._done == 0
        self._done = done


# --- when ---


def test_it_is_rebuilt_when_something_changes_and_only_then(tmp_path: Path) -> None:
    folder, texts, built = tmp_path / "tokens", tmp_path / "texts", Built()
    files = write_texts(texts, "one")
    tokenizer = ByteTokenizer()

    def times(*args: Any, **options: Any) -> int:
        """Of builds for two calls; what it opened is what a fresh folder would get."""
        before = built.times
        first = built(*args, **options)
        assert content(built(*args, **options)) == content(first)
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        fresh = build(tmp_path / "fresh", *args[1:], **{"share": 0.3, **options})
        assert content(fresh) == content(first)
        return built.times - before

    assert times(folder, [Source(files)], TEXT, tokenizer) == 1
    assert times(folder, [Source(files)], TEXT, tokenizer) == 0
    os.utime(files[0])
    assert times(folder, [Source(files)], TEXT, tokenizer) == 0  # the same content
    files[0].write_text("two 0")
    assert times(folder, [Source(files)], TEXT, tokenizer) == 1  # other content of the same size
    files[-1].rename(texts / "9.txt")
    files = sources([texts])
    assert times(folder, [Source(files)], TEXT, tokenizer) == 1  # only another name
    files = files[1:]
    assert times(folder, [Source(files)], TEXT, tokenizer) == 1
    assert times(folder, [Source(files)], Texts("other"), tokenizer) == 1
    assert times(folder, [Source(files)], TEXT, tokenizer) == 1
    assert times(folder, [Source(files)], TEXT, tokenizer, share=0.5) == 1
    smaller = train_bpe([Source(files)], vocab_size=257)
    assert times(folder, [Source(files)], TEXT, smaller, share=0.5) == 1
    texts.rename(tmp_path / "moved")
    moved = sources([tmp_path / "moved"])[1:]
    assert times(folder, [Source(moved)], TEXT, smaller, share=0.5) == 0


def test_what_was_made_when_files_were_cut_otherwise_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on with the tokens that it began with."""
    (tmp_path / "book.txt").write_text("".join(f"line {number} of a book\n" for number in range(500)))
    files, built = [tmp_path / "book.txt", *write_texts(tmp_path / "texts", "one", count=1)], Built()
    with monkeypatch.context() as patch:
        patch.setattr("imece.data.corpus._FEWEST_DOCUMENTS", 0)
        old = built(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer())
    assert old.train.documents + old.validation.documents == 2
    assert built(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer()).identity == old.identity
    assert built.times == 1


@pytest.mark.parametrize("name", [name for name in _NAMES if name != "lock"])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_what_is_damaged_is_built_again(tmp_path: Path, name: str, how: str) -> None:
    files, built = write_texts(tmp_path / "texts", "one"), Built()
    expected = content(built(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer()))
    path = tmp_path / "tokens" / name
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-3] if how == "cut" else whole[:20] + bytes([whole[20] ^ 4]) + whole[21:])
    assert content(built(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer())) == expected
    assert built.times == 2
    assert path.read_bytes() == whole


def test_a_large_vocabulary_has_wider_tokens(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 65_535, "?": 1, "</s>": 2}
    for last, dtype in ((65_535, np.uint16), (65_536, np.uint32)):
        package = tokenizers.Tokenizer(models.WordLevel(vocab | {"b": last}, unk_token="?"))
        package.pre_tokenizer = pre_tokenizers.Whitespace()
        package.add_special_tokens(["</s>"])
        package.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "a.txt").write_text("b a b")
        tokens = build(
            tmp_path / "t", [Source([tmp_path / "a.txt"])], TEXT, load_tokenizer(tmp_path), share=0
        )
        assert tokens.train.tokens.dtype == dtype
        assert tokens.train.tokens.tolist() == [last, 0, last, 2]


def test_batches_of_documents_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_texts(tmp_path / "texts", "some words", count=30)
    tokenizer = train_bpe([Source(files)], vocab_size=280)
    expected = content(build(tmp_path / "whole", [Source(files)], TEXT, tokenizer))
    monkeypatch.setattr(build_module, "_BATCH_DOCUMENTS", 4)
    assert content(build(tmp_path / "four", [Source(files)], TEXT, tokenizer)) == expected
    monkeypatch.setattr(build_module, "_BATCH_BYTES", 30)
    assert content(build(tmp_path / "bytes", [Source(files)], TEXT, tokenizer)) == expected


def test_progress_does_not_run_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table holds more text than it has bytes on disk."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(build_module, "total_bytes", lambda files: 20)
    monkeypatch.setattr(build_module, "_BATCH_DOCUMENTS", 1)
    files = write_texts(tmp_path / "texts", "one")
    build(tmp_path / "t", [Source(files)], TEXT, ByteTokenizer(), progress=lambda *both: told.append(both))
    assert told == [(5, 20), (10, 20), (15, 20), (20, 20), (20, 20), (20, 20), (20, 20)]


# --- what cannot be ---


def test_a_small_corpus_is_split_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number} of a text\n" for number in range(200)))
    tokens = build(tmp_path / "tokens", [Source([tmp_path / "a.txt"])], TEXT, ByteTokenizer(), share=0.001)
    assert tokens.validation.documents == 1
    assert tokens.train.documents > 8


def test_parts_that_would_be_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a single line")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    arguments = (tmp_path / "tokens", [Source([tmp_path / "a.txt"])], TEXT, ByteTokenizer())
    assert mistake(build, *arguments) == (
        f"{tmp_path / 'a.txt'} holds one document, of 13 bytes, and it is held out for validation: "
        "--data.held-out 0, or more text"
    )
    tokens = build(*arguments, share=0)
    assert (tokens.train.documents, tokens.validation.documents) == (1, 0)
    assert len(tokens.validation.tokens) == 0
    why = "b.txt: not UTF-8 at byte 0: convert it with iconv"
    assert f"{tmp_path / 'b.txt'}: no text in 1 file ({why}): name others" == mistake(
        build, arguments[0], [Source([tmp_path / "b.txt"])], *arguments[2:], share=0
    )
    for share in (1, -0.1, float("nan")):
        assert f"a held-out share of {share}" in mistake(build, *arguments, share=share)
    skipped = build(arguments[0], [Source([tmp_path / "a.txt", tmp_path / "b.txt"])], *arguments[2:], share=0)
    assert (skipped.skipped, skipped.skipped_bytes) == (1, 1)
    assert skipped.skipped_first == (why,)


def test_a_bad_line_leaves_the_old_files(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "texts", "one")
    expected = content(build(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer()))
    (tmp_path / "texts/a.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    bad = sources([tmp_path / "texts"])
    assert "a.jsonl:2" in mistake(build, tmp_path / "tokens", [Source(bad)], TEXT, ByteTokenizer())
    assert content(open_tokens(tmp_path / "tokens", verify=True)) == expected
    assert sorted(os.listdir(tmp_path / "tokens")) == _NAMES
    files[0].unlink()
    assert f"{files[0]}: cannot be read" in mistake(
        build, tmp_path / "t", [Source(files)], TEXT, ByteTokenizer()
    )


def test_a_full_disk(tmp_path: Path) -> None:
    """Wherever the disk is full: one line, no half file, and the old files as long as none was replaced."""
    folder = tmp_path / "tokens"
    old = content(
        build(folder, [Source(write_texts(tmp_path / "old", "old"))], TEXT, ByteTokenizer(), share=0.3)
    )
    files = write_texts(tmp_path / "new", "new" * 10)
    seen = Counter[str]()
    arguments = (folder, [Source(files)], TEXT, ByteTokenizer())
    for size in (0, 5, 30, 60, 200, 300, 340, 600, 700):
        before = open_or_none(folder)
        with files_of_at_most(size):
            message = mistake(build, *arguments, share=0.3)
        assert f"{folder}: cannot write the token files (File too large)" in message
        assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
        now = open_or_none(folder)
        assert now in (before, None)
        seen["old" if now == old else "none"] += 1
    assert seen["old"] > 2 and seen["none"] > 0, seen
    assert content(build(*arguments, share=0.3)) == content(build(tmp_path / "t", *arguments[1:], share=0.3))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is, unless it is mounted with flock."""

    def none(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    files = write_texts(tmp_path / "text", "some")
    said = mistake(build, tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer(), share=0.3)
    assert "(no file locks there: Lustre has them if mounted with flock): name another folder" in said


def test_places_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_texts(tmp_path / "texts", "one")
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        assert f"{folder}: cannot write" in mistake(build, folder, [Source(files)], TEXT, ByteTokenizer())
    # A folder of others, as far as `build` can tell: it does not even take the lock.
    expected = content(build(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer()))
    (tmp_path / "tokens/lock").unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert content(build(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer())) == expected
    assert not (tmp_path / "tokens/lock").exists()


@pytest.mark.parametrize("name", [MANIFEST, "train.bin", "validation.idx"])
def test_files_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    """Other programs have a train.bin too; what is in a folder without any of our names stays as well."""
    files, folder = write_texts(tmp_path / "texts", "one"), tmp_path / "theirs"
    arguments = (folder, [Source(files)], TEXT, ByteTokenizer())
    folder.mkdir()
    (folder / name).write_text("{}")
    (folder / "big.iso.partial").write_text("half of it")
    assert mistake(build, *arguments) == (
        f"{folder} holds a {name} that others made, which would be overwritten: name another folder for the "
        "token files"
    )
    assert sorted(os.listdir(folder)) == sorted([name, "big.iso.partial"])
    assert (folder / name).read_text() == "{}"
    (folder / name).unlink()
    build(*arguments, share=0.3)
    assert sorted(os.listdir(folder)) == sorted([*_NAMES, "big.iso.partial"])
    (folder / "lock").unlink()  # a copy without it is as good, as long as it is up to date
    build(*arguments, share=0.3)
    assert "that others made" in mistake(build, *arguments, share=0.4)


def test_what_a_killed_one_left_goes_away(tmp_path: Path) -> None:
    files, folder = write_texts(tmp_path / "texts", "one"), tmp_path / "tokens"
    build(folder, [Source(files)], TEXT, ByteTokenizer(), share=0.3)
    for name in ("train.bin.partial", "validation.idx.partial", "manifest.json.123.partial"):
        (folder / name).touch()
    build(folder, [Source(files)], TEXT, ByteTokenizer(), share=0.4)
    assert sorted(os.listdir(folder)) == _NAMES


# --- killed, and together ---


def test_nothing_gets_its_name_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_texts(tmp_path / "texts", "one")
    synced, renamed = set[str](), list[str]()
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.add(f"{path} of {len(renamed)}" if Path(path).is_dir() else path)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        assert str(source) in synced
        if Path(target).name == MANIFEST:  # all others have their names, for good
            assert f"{target.parent} of {len(renamed)}" in synced
        replace(source, target)
        renamed.append(Path(target).name)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    build(tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer())
    assert sorted(renamed) == [name for name in _NAMES if name != "lock"]
    assert renamed[-1] == MANIFEST
    assert f"{tmp_path}/tokens of {len(renamed)}" in synced


def test_only_who_builds_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is read beside all others, also by the many that waited until it was built."""
    files, built = write_texts(tmp_path / "texts", "one"), Built()
    arguments = (tmp_path / "tokens", [Source(files)], TEXT, ByteTokenizer())
    log = list[str]()

    @contextmanager
    def waiting(path: Path) -> Iterator[None]:
        """For the lock, while another process builds."""
        with monkeypatch.context() as patch:
            patch.setattr(build_module, "locked", locked)
            built(*arguments)
        log.append("lock")
        with locked(path):
            yield
        log.append("free")

    def opening(folder: Path, *, verify: bool = False) -> TokenFiles:
        log.append("verify" if verify else "open")
        return open_tokens(folder, verify=verify)

    monkeypatch.setattr(build_module, "locked", waiting)
    expected = content(built(*arguments))
    assert log == ["lock", "free"] and built.times == 1
    monkeypatch.setattr(build_module, "open_tokens", opening)
    for damage in (False, True):
        log.clear()
        if damage:
            (tmp_path / "tokens/train.bin").write_bytes(b"?" * (tmp_path / "tokens/train.bin").stat().st_size)
        assert content(built(*arguments)) == expected
        assert built.times == 1 + damage
    assert log == [*["open", "verify"] * 2, "open", "lock", "free", "open", "verify"]


def test_killed_at_every_line(tmp_path: Path) -> None:
    seen = run_processes("kill_at_every_line", tmp_path)
    assert seen["old"] > 50
    assert seen["none"] > 10
    assert seen["new"] > 0
    assert seen["half"] > 20
