"""What a run says of its text before it begins."""

from __future__ import annotations

import json
from pathlib import Path

from imece.data.batches import Batches
from imece.data.prepare import prepare
from imece.train.config import DataSection, TrainConfig
from imece.train.header import describe_data, notes_on_data


def test_of_many_texts_the_first_are_named(tmp_path: Path) -> None:
    """As a shell makes of a pattern: the header is one line for each of its rows."""
    files = [tmp_path / f"{number}.txt" for number in range(9)]
    for file in files:
        file.write_text(f"{file.name} and more\n")
    for given, named in ((3, "0.txt, 1.txt, 2.txt: 3 files"), (9, "0.txt, 1.txt, 2.txt and 6 more: 9 files")):
        config = TrainConfig(data=DataSection(paths=tuple(map(str, files[:given])), tokenizer="bytes"))
        made = tmp_path / f"run of {given}"
        said = describe_data(prepare(config.data, made / "tokenizer.json", made), config)
        assert said.replace(f"{tmp_path}/", "").startswith(f"{named}, ")


def test_a_text_for_validation_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} and more\n")
    data = DataSection(paths=(str(tmp_path),), validation=(str(tmp_path / "b.txt"),), tokenizer="bytes")
    config = TrainConfig(data=data)
    prepared = prepare(config.data, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
    said = describe_data(prepared, config)
    assert f"{tmp_path}, for validation {tmp_path}/b.txt: 2 files, " in said and "50 % of them" in said


def test_records_that_are_left_out_are_told(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a" * size, "completion": "b"}) + "\n" for size in (3, 20, 30, 4)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = DataSection(paths=(str(tmp_path),), tokenizer="bytes", held_out=0, format="answers")
    config = TrainConfig(data=data)
    prepared = prepare(config.data, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
    assert "69 tokens, 8 of answers (0 % of them held out)" in describe_data(prepared, config)
    batches = Batches(prepared.tokens.train, 20, 1, seed=1)
    assert notes_on_data(prepared, config, batches) == [
        "warning: 2 of 4 records are left out, with more than 21 tokens: --model.max-seq 32 takes all"
    ]


def test_what_is_unexpected_of_the_text_is_told(tmp_path: Path) -> None:
    """The share that is held out is that of the text, whatever was asked for."""
    lines = [json.dumps({"text": "h" * size}) + "\n" for size in (99, 199, 9999)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for name in ("b.txt", "c.txt", "d.txt", "e.txt", "f.txt"):
        (tmp_path / name).write_bytes(b"\0" * 1000)

    def told(held_out: float) -> tuple[str, list[str]]:
        data = DataSection(paths=(str(tmp_path),), tokenizer="bytes", held_out=held_out)
        config = TrainConfig(data=data, seed=3)
        prepared = prepare(config.data, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
        return describe_data(prepared, config), notes_on_data(prepared, config)

    why = "a NUL at byte 0, so not text: name text files only"
    left_out = [*(f"left out: {name}.txt: {why}" for name in "bcd"), "left out: 2 more"]
    assert told(0.01) == (
        f"{tmp_path}: 1 file, 10.3 kB, 10.3k tokens (97.1 % of them held out), 5 files left out as not text",
        [
            *left_out,
            "warning: 97.1 % of the text is held out for validation, --data.held-out asks for 1 %: documents "
            "are held out whole, and there are 3: more or shorter ones help",
        ],
    )
    assert told(0.5)[1] == told(0)[1] == left_out
    for file in tmp_path.glob("*.*"):
        file.unlink()
    gone = f"{tmp_path}: gone, its tokens as they were made, 10.3k tokens (0 % of them held out), 5 files"
    assert told(0)[0].startswith(gone)
