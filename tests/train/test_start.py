"""What a rank does before it has anything to train."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imece.data.batches import Batches
from imece.data.prepare import prepare
from imece.errors import UserError
from imece.train import start
from imece.train.config import DataSection, TrainConfig
from imece.train.run_lock import HELD, RunLock
from imece.train.session import Session
from imece.train.stopping import Stop

AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
Rank = Callable[..., None]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rank:
    """Runs one, without the others, until it opens its session."""

    def run(number: int, *, joining: bool = False) -> None:
        mesh = SimpleNamespace(rank=number, world=SimpleNamespace(joining=joining), hosts=[[0, 1]])
        monkeypatch.setattr("imece.mesh.init", lambda axes, ranks: mesh)
        start.run_rank(TrainConfig(run=str(tmp_path / "run")), Stop())

    monkeypatch.setattr(start, "check_same_start", lambda config, mesh: None)
    monkeypatch.setattr(start, "together", lambda mesh, call: call())
    return run


def is_free(folder: Path) -> bool:
    """Whether another command could begin in it."""
    try:
        with RunLock(folder) as lock:
            lock.begin()
    except UserError:
        return False
    return True


def test_every_rank_holds_the_run(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of any other launcher is refused; of its own ranks all keep others away, whichever die."""
    seen: list[bool] = []

    def opening(*_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.delenv(HELD, raising=False)
            for name in AGAIN:
                patch.delenv(name, raising=False)
            seen.append(is_free(tmp_path / "run"))
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "open", opening)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    for number, joining in ((1, False), (0, True), (0, False)):
        with pytest.raises(ZeroDivisionError):
            rank(number, joining=joining)
    assert seen == [False, False, False]
    # One that the launcher of this very run has started, and one of a job that starts again, are not refused.
    for name in ("", HELD, *AGAIN):
        with RunLock(tmp_path / "run") as other, monkeypatch.context() as patch:
            other.begin()
            if name:
                patch.setenv(name, "1")
            with pytest.raises(ZeroDivisionError if name else UserError) as ending:
                rank(0)
        if not name:
            assert re.match(
                r"a run is under way in .*/run \(begun by process \d+ on \S+\): ", str(ending.value)
            )
    assert len(seen) == 6


def test_the_run_is_under_way_as_long_as_a_rank_lives(tmp_path: Path) -> None:
    with RunLock(tmp_path) as second:
        with RunLock(tmp_path) as first:
            first.begin()
            second.join()
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == b"", "nobody is at it, so it names nobody"


def test_what_ends_a_rank_that_joins_is_told(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(session: Session) -> None:
        assert not hasattr(session, "checkpoints"), "it has them once it is where the others are"
        raise RuntimeError("the others have gone")

    monkeypatch.setattr(Session, "open", lambda *_: Session.__new__(Session))
    monkeypatch.setattr(Session, "begin", begin)
    with pytest.raises(RuntimeError, match=r"^the others have gone$"):
        rank(0, joining=True)


def test_a_cache_of_torch_that_cannot_be_made(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def unwritable(name: str, package: str | None = None) -> object:
        if name == "torch._dynamo":
            raise PermissionError(13, "Permission denied", "/cache")
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", unwritable)
    with pytest.raises(UserError, match=r"'/cache'\): set TMPDIR or TORCHINDUCTOR_CACHE_DIR to a "):
        rank(0)


def test_gpus_that_torch_cannot_use_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts them, and may be too old for torch."""
    monkeypatch.setattr(start, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    for available, ranks in ((False, 2), (True, 5)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert start.default_ranks() == ranks


def test_of_many_texts_the_first_are_named(tmp_path: Path) -> None:
    """As a shell makes of a pattern: the header is one line for each of its rows."""
    files = [tmp_path / f"{number}.txt" for number in range(9)]
    for file in files:
        file.write_text(f"{file.name} and more\n")
    for given, named in ((3, "0.txt, 1.txt, 2.txt: 3 files"), (9, "0.txt, 1.txt, 2.txt and 6 more: 9 files")):
        config = TrainConfig(data=DataSection(paths=tuple(map(str, files[:given])), tokenizer="bytes"))
        made = tmp_path / f"run of {given}"
        said = start.describe_data(prepare(config.data.source(), made / "tokenizer.json", made), config)
        assert said.replace(f"{tmp_path}/", "").startswith(f"{named}, ")


def test_a_text_for_validation_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} and more\n")
    data = DataSection(paths=(str(tmp_path),), validation=(str(tmp_path / "b.txt"),), tokenizer="bytes")
    config = TrainConfig(data=data)
    prepared = prepare(config.data.source(), tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
    said = start.describe_data(prepared, config)
    assert f"{tmp_path}, for validation {tmp_path}/b.txt: 2 files, " in said and "50 % of them" in said


def test_records_that_are_left_out_are_told(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a" * size, "completion": "b"}) + "\n" for size in (3, 20, 30, 4)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = DataSection(paths=(str(tmp_path),), tokenizer="bytes", held_out=0, format="answers")
    config = TrainConfig(data=data)
    prepared = prepare(config.data.source(), tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
    assert "69 tokens, 8 of answers (0 % of them held out)" in start.describe_data(prepared, config)
    batches = Batches(prepared.tokens.train, 20, 1, seed=1)
    assert start.notes_on_data(prepared, config, batches) == [
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
        prepared = prepare(config.data.source(), tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")
        return start.describe_data(prepared, config), start.notes_on_data(prepared, config)

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
