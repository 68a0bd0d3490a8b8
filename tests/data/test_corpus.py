"""No text is lost between disk and documents, and files that are not text are named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.data import corpus
from imece.data.corpus import documents, fraction, held_out, share_of_one
from imece.data.records import TEXT, Texts
from imece.data.sources import sources
from tests.data.helpers import mistake, write

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def texts(*files: Path, **options: object) -> list[str]:
    return [document.text for document in documents(files, **options)]  # type: ignore[arg-type]


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
    assert texts(write(tmp_path / "b.JSONL", '{"body": "x"}'), reading=Texts("body")) == ["x"]


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
        ("a.json", b'[{"text": "x"}]', ["a.json", ".jsonl", "jq -c", ".txt"]),
        ("a.CSV", b"text\nx\n", ["a.CSV", ".jsonl or .parquet", ".txt"]),
        ("a.jsonl", b"\n \n", ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'{"text": ""}', ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'{"text": null}', ["a.jsonl", "nothing", "'text'"]),
        ("a.jsonl", b'\n{"text": ', ["a.jsonl:2: not JSON (Expecting value at character 9)"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "not JSON"]),
        ("a.jsonl", b"[1]", ["a.jsonl:1", "list", "'text'"]),
        ("a.jsonl", b'{"body": "x", "n": 2}', ["a.jsonl:1", "no field 'text'", "'body', 'n'"]),
        ("a.jsonl", b"{}", ["a.jsonl:1", "no field 'text'", "none at all"]),
        ("a.jsonl", b'{"text": 3}', ["a.jsonl:1", "holds an int"]),
        ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1", "half a surrogate pair"]),
    ],
)
def test_a_file_named_by_itself_is_refused(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    file = write(tmp_path / name, content)
    message = mistake(sources, [file])
    assert all(word in message for word in words), message


def test_of_many_fields_a_few_are_named(tmp_path: Path) -> None:
    record = {"x" * 1000: 1} | {str(number): number for number in range(1000)}
    message = mistake(sources, [write(tmp_path / "a.jsonl", json.dumps(record))])
    assert "xxx', '0', '1', '2', '3', '4', '5', '6' and 993 more: name the one" in message
    assert len(message) < 300


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt", b"\xff")
    monkeypatch.setattr(corpus, "_why_not", lambda reading, path: None)  # it was text a moment ago
    assert "a.txt: changed while it was read" in mistake(texts, file)


# --- what is held out ---


def test_held_out_is_a_share_by_content_alone() -> None:
    lines = [f"document {number}" for number in range(20_000)]
    chosen = {line for line in lines if held_out(line, 0.1)}
    assert 1800 < len(chosen) < 2200
    assert chosen < {line for line in lines if held_out(line, 0.2)}
    assert not any(held_out(line, 0) for line in lines)
    other = {line for line in lines if fraction(line, "tokenizer") < 0.1}
    assert 120 < len(chosen & other) < 290  # independent: 1 % of all
    assert all(0 <= fraction(line, "tokenizer") < 1 for line in lines)


def test_a_small_corpus_has_one_document_held_out(tmp_path: Path) -> None:
    for variant in range(20):
        files = [write(tmp_path / f"{number}.txt", f"text {variant} {number}") for number in range(6)]
        share = share_of_one(files, TEXT, 1e-6)
        assert [held_out(text, share) for text in texts(*files)].count(True) == 1
        assert share_of_one(files, TEXT, share) == share  # enough is enough
        assert share_of_one(files, TEXT, 0) == 0
