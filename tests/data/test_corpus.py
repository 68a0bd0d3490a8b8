"""No text gets lost on its way from disk to documents, and what is no text is named in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.data import corpus
from imece.data.corpus import documents, fraction, held_out, share_of_one, sources, total_bytes
from tests.data.helpers import mistake

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(*files: Path, **options: object) -> list[str]:
    return [document.text for document in documents(files, **options)]  # type: ignore[arg-type]


# --- which files ---


def test_a_folder_gives_what_its_suffixes_say_but_nothing_hidden(tmp_path: Path) -> None:
    wanted = [
        write(tmp_path / name, "x") for name in ("A.TXT", "a.py", "b/c.txt", "b/d/e.md", "f.jsonl", "g.rst")
    ]
    for name in ("a.bin", "b/.git/h.py", ".i/j.txt", "k", "l.py~"):
        write(tmp_path / name, "x")
    (tmp_path / "m.py").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "n.py")
    assert sources([tmp_path]) == sorted(wanted)
    assert sources([str(tmp_path)]) == sorted(wanted)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Once each, whatever circles they make; what is in the folder itself keeps its own name."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    write(root / "z/own.txt", "own")
    write(root / ".hidden/store/a.txt", "hidden")
    write(elsewhere / "b/c.txt", "linked")
    write(tmp_path / "further/d.txt", "further")
    for link, target in {
        root / "a": root / "z",
        root / "b": elsewhere,
        root / "c": elsewhere / "b",
        root / "store": root / ".hidden/store",
        root / "z/up": root,
        root / "nowhere": tmp_path / "gone",
        elsewhere / "back": root,
        elsewhere / "on": tmp_path / "further",
    }.items():
        link.symlink_to(target)
    found = [os.path.relpath(path, root) for path in sources([root])]
    assert found == ["b/b/c.txt", "b/on/d.txt", "store/a.txt", "z/own.txt"]


def test_each_file_comes_once_whatever_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a.py", "x"), write(tmp_path / "b.py", "y")
    os.symlink(first, tmp_path / "c.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources(["b.py", "a.py", tmp_path, f"{tmp_path}/*.py", "~/a.py", "./b.py"]) == [first, second]


def test_globs_find_any_file(tmp_path: Path) -> None:
    wanted = write(tmp_path / "a/b/c.tex", "x")
    assert sources([f"{tmp_path}/**/*.tex"]) == [wanted]
    bracketed = write(tmp_path / "[a].txt", "x")
    assert sources([str(bracketed)]) == [bracketed]  # a file of that name goes before a pattern


def test_what_runs_write_is_no_text(tmp_path: Path) -> None:
    """Wherever the run folder lies, and whatever is in it; but not what only looks like a part of one."""
    wanted = [write(tmp_path / name, "x") for name in ("a.txt", "b/config.toml.txt", "b/c.md")]
    write(tmp_path / "b/metrics.jsonl", '{"text": "mine"}')
    for run in (tmp_path / "runs/small", tmp_path / "b/other"):
        for name in ("config.toml", "metrics.jsonl", "checkpoints/notes.txt"):
            write(run / name, '{"step": 1}')
    (tmp_path / "link").symlink_to("runs/small")
    passed: list[Path] = []
    assert sources([tmp_path, tmp_path / "b"], run_folders=passed) == sorted(
        [*wanted, tmp_path / "b/metrics.jsonl"]
    )
    runs = [tmp_path / "b/other", tmp_path / "runs/small"]
    assert passed == runs
    passed.clear()
    assert sources([f"{tmp_path}/**/*.[tm]*"], run_folders=passed) == sorted(wanted)
    assert passed == runs
    named = tmp_path / "runs/small/checkpoints/notes.txt"
    assert sources([named]) == [named]
    assert "no .txt, .md" in mistake(sources, [runs[0]])
    assert "no file matches" in mistake(sources, [f"{runs[0]}/*"])


@pytest.mark.parametrize("also", [".lock", "metrics.jsonl"])
def test_a_run_is_one_from_its_first_moment_on(tmp_path: Path, also: str) -> None:
    """Or its first command would read what it keeps of a tokenizer, and the next one would not."""
    wanted = write(tmp_path / "a.txt", "x")
    for name in ("config.toml", also, "from/merges.txt"):
        write(tmp_path / "run" / name, "x")
    for whole in (tmp_path, f"{tmp_path}/**/*.txt"):
        passed: list[Path] = []
        assert sources([whole], run_folders=passed) == [wanted]
        assert passed == [tmp_path / "run"]


def test_names_that_hold_wherever_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a [b]"
    write(folder / "c?.txt", "x")
    (folder / "set").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    escaped = f"{tmp_path}/a [[]b]"
    for name, expected in {
        "c.txt": f"{folder}/c.txt",
        "../d": f"{tmp_path}/d",
        "~/d": "/home/me/d",
        "c?.txt": f"{folder}/c?.txt",  # a file of that name goes before a pattern
        "?.txt": f"{escaped}/?.txt",
        "../**/*": f"{tmp_path}/**/*",
        "/e/*": "/e/*",
        "hf:set": f"hf:{folder}/set",
        "hf:./set:train": f"hf:{folder}/set:train",
        "hf:user/set:train": "hf:user/set:train",
    }.items():
        assert corpus.absolute_name(name) == expected
        assert corpus.absolute_name(expected) == expected


def test_without_paths_it_is_the_standard_library() -> None:
    files = sources([])
    root = corpus.common_folder(files)
    names = [os.path.relpath(file, root) for file in files]
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert total_bytes(files) > 5_000_000


# --- what is in them ---


@given(_TEXT, st.integers(1, 40), st.integers(1, 80))
def test_the_pieces_of_a_file_are_its_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece_bytes: int, whole_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    file, beside = write(folder / "a.txt", text), write(folder / "b.jsonl", '{"text": "beside"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_PIECE_BYTES", piece_bytes)
        patch.setattr(corpus, "_WHOLE_BYTES", whole_bytes)
        patch.setattr(corpus, "_LINE_BYTES", 1)
        *found, last = texts(file, beside)
        alone = texts(file)
    assert last == "beside"
    assert "".join(found) == "".join(alone) == text
    assert "" not in found + alone
    if len(text.encode()) > whole_bytes:
        assert max(len(piece.encode()) for piece in found) <= 2 * piece_bytes + 3


def test_a_large_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    line = "a line of some length, and more\r\n"
    large, beside = write(tmp_path / "a.txt", line * 20_000), write(tmp_path / "b.txt", line * 130_000)
    pieces = texts(large, beside)
    assert "".join(pieces) == line * 150_000
    assert 70 < len(pieces) < 80
    assert all(piece.endswith("\r\n") and piece.startswith("a line") for piece in pieces)
    # A smaller one stays whole, unless there is little else to hold out.
    small = write(tmp_path / "c.txt", line * 1000)
    assert texts(small, beside, to_hold_out=True)[0] == line * 1000
    assert texts(small) == [line * 1000]
    assert 16 <= len(texts(small, to_hold_out=True)) <= 32
    assert "".join(texts(small, to_hold_out=True)) == line * 1000


def test_no_document_of_a_little_text_is_most_of_it(tmp_path: Path) -> None:
    book = write(tmp_path / "book.txt", "".join(f"line {number} of a book\n" for number in range(8000)))
    note = write(tmp_path / "note.txt", "a note\n")
    pieces = texts(book, note, to_hold_out=True)
    assert pieces[-1] == "a note\n" and "".join(pieces[:-1]) == book.read_text()
    assert max(map(len, pieces)) <= book.stat().st_size / 15 and len(pieces) <= 33
    # Whatever the names are, whatever lies beside that is no text, and when a little more is written.
    other = write(tmp_path / "a/z.txt", book.read_text())
    write(tmp_path / "a/b.txt", b"\0" * (5 << 20))
    write(tmp_path / "a/a.txt", "a note\n")
    assert sorted(texts(*sources([tmp_path / "a"]), skipped={}, to_hold_out=True)) == sorted(pieces)
    write(other, book.read_text() + "one more line\n")
    assert texts(other, note, to_hold_out=True)[: len(pieces) - 2] == pieces[:-2]


def test_a_line_without_end_does_not_become_one_document(tmp_path: Path) -> None:
    text = "€" * 200_000  # three bytes each: every cut but few would be inside of one
    pieces = texts(write(tmp_path / "a.txt", text), write(tmp_path / "b.txt", "x"))[:-1]
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 1 << 18


def test_documents_have_names_that_do_not_depend_on_the_place(tmp_path: Path) -> None:
    for root in (tmp_path / "one", tmp_path / "two"):
        write(root / "a/b.py", "x")
        write(root / "c.jsonl", '{"text": "y"}\n\n{"text": "z"}\n')
        names = [document.name for document in documents(sources([root]))]
        assert names == ["a/b.py", "c.jsonl:1", "c.jsonl:3"]


def test_the_texts_of_a_jsonl(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"text": "first", "n": 1}',
        "",
        "  ",
        '{"text": ""}',
        '{"text": null}',
        '{"text": "a\\nb\\u0000\\ud83d\\ude00"}',
    ]
    file = write(tmp_path / "a.jsonl", "\r\n".join(lines))
    assert texts(file) == ["first", "a\nb\0😀"]
    assert texts(write(tmp_path / "b.JSONL", '{"body": "x"}'), field="body") == ["x"]


def test_what_is_not_text_in_a_folder_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "one")
    latin = write(tmp_path / "b.py", "größer".encode("latin-1"))
    write(tmp_path / "c.txt", "")
    binary = write(tmp_path / "d.txt", b"PK\0\0")
    half = write(tmp_path / "e.txt", "€".encode()[:2])
    skipped: dict[Path, str] = {}
    assert texts(*sources([tmp_path]), skipped=skipped) == ["one"]
    assert skipped == {
        latin: "not UTF-8 at byte 2: convert it with iconv",
        binary: "a NUL at byte 2, so not text: name text files only",
        half: "not UTF-8 at byte 0: convert it with iconv",
    }


# --- what is wrong ---


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", ["a.txt", "empty"]),
        ("a.txt", b"ab\0c", ["a.txt", "NUL at byte 2"]),
        ("a.txt", "größer".encode("utf-16"), ["a.txt", "UTF-16", "iconv -f UTF-16"]),
        ("a.txt", "größer".encode("utf-32"), ["a.txt", "UTF-32", "iconv -f UTF-32"]),
        ("a.txt", b"ab\xe9c", ["a.txt", "not UTF-8 at byte 2"]),
        ("a.txt", b"ab\xe2\x82", ["a.txt", "not UTF-8 at byte 2"]),
        ("a.txt", b"x" * (1 << 20) + b"\xe2", ["not UTF-8 at byte 1048576"]),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xe2x", ["not UTF-8 at byte 1048575"]),
        ("a.jsonl", b"\n \n", ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'{"text": ""}', ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'{"text": null}', ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'\n{"text": ', ["a.jsonl:2", "not JSON"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "not JSON"]),
        ("a.jsonl", b"[1]", ["a.jsonl:1", "list", "'text'"]),
        ("a.jsonl", b'{"body": "x", "n": 2}', ["a.jsonl:1", "no field 'text'", "'body', 'n'"]),
        ("a.jsonl", b"{}", ["a.jsonl:1", "no field 'text'", "none at all"]),
        ("a.jsonl", b'{"text": 3}', ["a.jsonl:1", "holds a int"]),
        ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1", "half a surrogate pair"]),
    ],
)
def test_a_file_named_by_itself_is_refused(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    file = write(tmp_path / name, content)
    message = mistake(sources, [file])
    assert all(word in message for word in words), message


def test_places_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert "no such file" in mistake(sources, [tmp_path / "a.txt"])
    assert "no .txt, .md" in mistake(sources, [tmp_path / "empty"])
    assert "neither a file" in mistake(sources, [tmp_path / "pipe"])
    assert "no file matches" in mistake(sources, [f"{tmp_path}/*.txt"])
    assert "no file matches" in mistake(sources, [f"{tmp_path}/*"])  # folders and pipes only
    assert "no such file" in mistake(total_bytes, [tmp_path / "a.txt"]).lower()


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "folder/a.txt", "x")
    locked = tmp_path / "folder/b"
    locked.mkdir()

    def refuse(path: object, *_: object, **__: object) -> None:  # root may read all, so we play the kernel
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert "a.txt: cannot be read (Permission denied)" in mistake(sources, [file])
        assert "a.txt: cannot be read (Permission denied)" in mistake(texts, file)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) if path == str(locked) else scandir(path))
    assert f"{locked}: cannot be read (Permission denied)" in mistake(sources, [tmp_path / "folder"])


def test_what_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may list and not enter, and a text where a path is wanted."""
    file, find = write(tmp_path / "shut/a.txt", "x"), os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{file.parent}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return find(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    shut = "a.txt: cannot be read (Permission denied): name files that you may read"
    for path in (file, tmp_path / "s*/a.txt", tmp_path / "sh*/a*"):
        assert mistake(sources, [path]).endswith(shut)
    long = mistake(sources, [f"{tmp_path}/{'once upon a * ' * 1000}"])
    assert " upon a * ': cannot be read (File name too long)" in long and len(long) < 120
    assert "no such file" in mistake(sources, ["a\0b"])


def test_of_many_fields_a_few_are_named(tmp_path: Path) -> None:
    record = {"x" * 1000: 1} | {str(number): number for number in range(1000)}
    message = mistake(sources, [write(tmp_path / "a.jsonl", json.dumps(record))])
    assert "xxx', '0', '1', '2', '3', '4', '5', '6' and 993 more: name the one" in message
    assert len(message) < 300


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt", b"\xff")
    monkeypatch.setattr(corpus, "_why_not_text", lambda path: None)  # it was text a moment ago
    assert "a.txt: changed while it was read" in mistake(texts, file)


# --- what is held out ---


def test_held_out_is_a_share_by_content_alone() -> None:
    lines = [f"document {number}" for number in range(20_000)]
    chosen = {line for line in lines if held_out(line, 0.1)}
    assert 1800 < len(chosen) < 2200
    assert chosen < {line for line in lines if held_out(line, 0.2)}
    assert not any(held_out(line, 0) for line in lines)
    other = {line for line in lines if held_out(line, 0.1, seed=1)}
    assert 120 < len(chosen & other) < 290  # independent: 1 % of all
    assert all(0 <= fraction(line, "tokenizer") < 1 for line in lines)
    drawn = fraction("document 3", "held out 7")
    assert not held_out("document 3", drawn, 7)
    assert held_out("document 3", drawn + 1e-12, 7)


def test_a_small_corpus_has_one_document_held_out(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{number}.txt", f"text {number}") for number in range(6)]
    found = texts(*files)
    for seed in range(20):
        share = share_of_one(files, "text", 1e-6, seed)
        assert [held_out(text, share, seed) for text in found].count(True) == 1
        assert share_of_one(files, "text", share, seed) == share  # enough is enough
        assert share_of_one(files, "text", 0, seed) == 0
