"""`imece bench save`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from imece.bench.save import save
from imece.bench.save.save import FIXED_BYTES, Plan, Results, Row
from imece.cli.main import main

SHARE = 10**8


def row(delays: list[float], written: int = SHARE, grown: int | None = SHARE) -> Row:
    return Row("zero1", 10**7, 4 * SHARE, SHARE, written, grown, [1.0], [0.1], [3.0], delays)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (row([0.2, 1.0, 3.0]), ["met", "met", "met"]),
        (row([1.1, 1.2, 0.3]), ["MISSED", "met", "met"]),
        (row([0.0], written=SHARE + FIXED_BYTES + 1), ["met", "MISSED", "met"]),
        (row([0.0], grown=SHARE + FIXED_BYTES + 1), ["met", "met", "MISSED"]),
        (row([0.0], grown=None), ["met", "met", "--"]),
    ],
)
def test_the_targets(measured: Row, words: list[str]) -> None:
    assert [each.line.split()[0] for each in save.judged(Results(Plan(), [measured]))] == words


def test_a_folder_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "save", "--folder", "x" * 300]) == 2
    assert "x: no folder that can be written to: make it, or name another\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, folder = tmp_path / "save.json", tmp_path / "folder"
    folder.mkdir()
    options = ["--quick", "--strategies", "hybrid", "--folder", str(folder), "--json", str(figures)]
    assert main(["bench", "save", *options]) == 0
    shown = capsys.readouterr().out
    assert "\nmedians of 1 round; " in shown
    assert "later by steps" in shown and "a rank writes at most its share" in shown
    rows = json.loads(figures.read_text())["rows"]
    assert [each["strategy"] for each in rows] == ["hybrid"]
    for each in rows:
        assert each["state_bytes"] > 12 * each["parameters"]  # two states of AdamW beside the parameters
        assert each["written_bytes"] - each["share_bytes"] < 2**20
        assert each["grown_bytes"] is None or each["grown_bytes"] - each["share_bytes"] < FIXED_BYTES
        assert len(each["delays"]) == 1
    assert os.listdir(folder) == []
