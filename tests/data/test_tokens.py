"""Opening returns what was written; damage to any byte is reported with the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from imece.data.batches import Batches
from imece.data.build import build
from imece.data.corpus import Source, held_out
from imece.data.records import TEXT
from imece.data.sources import sources
from imece.data.tokenizer import ByteTokenizer
from imece.data.tokens import MANIFEST, TokenFiles, open_tokens
from imece.train.evaluate import evaluate
from imece.train.model.precision import Precision
from tests.data.helpers import mistake

_FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx")


@pytest.fixture
def made(tmp_path: Path) -> TokenFiles:
    for number in range(9):
        path = tmp_path / f"text/{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}")
    return build(
        tmp_path / "tokens", [Source(sources([tmp_path / "text"]))], TEXT, ByteTokenizer(), share=0.3
    )


def test_a_part_is_its_documents(made: TokenFiles) -> None:
    opened = open_tokens(made.folder, verify=True)
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for part in (opened.train, opened.validation):
        for index in range(part.documents):
            *text, end = part.document(index).tolist()
            assert end == part.end == 256
            found[part.name].append(bytes(text).decode())
        assert part.text_bytes == sum(map(len, found[part.name]))
        assert part.tokens.dtype == np.uint16
        assert len(part.tokens) == part.text_bytes + part.documents
    texts = [f"text {number}" for number in range(9)]
    assert found["validation"] == [text for text in texts if held_out(text, 0.3)] != []
    assert found["train"] == [text for text in texts if not held_out(text, 0.3)]
    assert (opened.vocab_size, opened.tokenizer_hash, opened.skipped) == (257, ByteTokenizer().hash, 0)


def test_what_is_mapped_cannot_be_written_to(made: TokenFiles) -> None:
    with pytest.raises(ValueError, match="read-only"):
        made.train.tokens[0] = 1


@pytest.mark.parametrize("name", _FILES)
def test_damage_is_named(made: TokenFiles, name: str) -> None:
    path = made.folder / name
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", b""):
        path.write_bytes(damaged)
        assert f"{path}: {len(damaged)} bytes" in mistake(open_tokens, made.folder)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert f"{path}: damaged" in mistake(open_tokens, made.folder, verify=True)
    path.unlink()
    assert f"{path}: cannot be read (No such file" in mistake(open_tokens, made.folder)
    path.write_bytes(whole)
    open_tokens(made.folder, verify=True)


def test_tokens_that_somebody_writes_to_while_they_are_read(made: TokenFiles) -> None:
    batches, path = Batches(made.train, 4, 2, seed=0), made.folder / "train.bin"
    batches.for_rank(0, 0, 1)
    with path.open("r+b") as file:
        file.write(b"\x01\x01" * len(made.train.tokens))  # 257
    said = mistake(batches.for_rank, 0, 0, 1)
    assert said.startswith(f"{path}: token 257 of a vocabulary of 257: somebody writes to it")
    assert mistake(evaluate, torch.nn.Linear(1, 1), made.train, 4, 1, Precision("fp32", "cpu")) == said


def test_offsets_are_looked_at_every_time(made: TokenFiles) -> None:
    path = made.folder / "train.idx"
    offsets = np.fromfile(path, np.int64)
    for place, value in ((0, 1), (-1, offsets[-1] + 1), (2, offsets[1]), (2, offsets[3] + 1), (1, -1)):
        damaged = offsets.copy()
        damaged[place] = value
        damaged.tofile(path)
        assert f"{path}: damaged, its offsets do not ascend" in mistake(open_tokens, made.folder)


def test_a_damaged_manifest(made: TokenFiles) -> None:
    path = made.folder / MANIFEST
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert str(path) in mistake(open_tokens, made.folder)
    for damaged in (b"", b"[]", b"3", b"{}", b'{"version": 2}', whole[: len(whole) // 2], b"\xff"):
        path.write_bytes(damaged)
        assert f"{path}: damaged" in mistake(open_tokens, made.folder)
    content = json.loads(whole)
    path.write_text(json.dumps(content | {"version": 1}))
    assert f"{path}: version 1, not 2" in mistake(open_tokens, made.folder)
    path.unlink()
    assert f"{path}: no such file, so no finished token files" in mistake(open_tokens, made.folder)
    assert "no finished token files" in mistake(open_tokens, made.folder / "nowhere")
    path.mkdir()
    assert f"{path}: cannot be read (Is a directory)" in mistake(open_tokens, made.folder)
