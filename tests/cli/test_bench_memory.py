"""`imece bench memory`, and `imece bench step --strategy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imece.bench import memory
from imece.bench.memory import Plan, Results, Row
from imece.bench.step.step import Memory
from imece.bench.step.step import Plan as StepPlan
from imece.bench.step.step import Results as StepResults
from imece.bench.step.targets import judged
from imece.cli.main import main

ONE = {"parameters": 40, "gradients": 40, "optimizer": 20, "communication": 0, "host": 0}


def test_what_differs_from_the_prediction_is_told() -> None:
    near = Row("10.9M", 2, "zero1", 10, ONE, ONE | {"communication": 4}, 0)
    far = Row("10.9M", 2, "zero2", 10, ONE, ONE | {"communication": 6}, 0)
    assert near.apart == pytest.approx(0.04)
    assert Results(Plan(), [near, far]).wrong == ["10.9M, 2 ranks, zero2: 6.0% from what was predicted"]


def test_the_host_has_a_column_where_something_lies_there() -> None:
    row = Row("10.9M", 2, "zero1", 10, ONE, ONE, 0)
    off = Row("10.9M", 2, "zero1", 10, ONE | {"host": 2 * 10**6}, ONE | {"host": 10**6}, 0)
    assert "host" not in memory.lines([row])[2]
    _, _, heads, *shown = memory.lines([row, off])
    assert heads.split().index("host") == 4 and "1.0 (2.0)" in shown[1]
    plan = Plan(offload="parameters")
    assert [each for each in plan.strategies if plan.can_be(each)] == ["zero3-gather"]
    plan = Plan(offload="optimizer")
    assert [each for each in plan.strategies if not plan.can_be(each)] == ["replicate"]


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "memory.json", tmp_path / "memory.png"
    options = ["--quick", "--strategies", "zero1,zero3", "--json", str(figures), "--plot", str(plot)]
    assert main(["bench", "memory", *options]) == 0
    shown = capsys.readouterr().out
    assert "12.00 B" in shown and "WRONG" not in shown
    rows = json.loads(figures.read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["zero1", "zero3"]
    assert all(row["apart"] < memory.CLOSE for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_strategies_are_measured_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "step.json"
    options = ["--quick", "--tokens", "128", "--strategy", "replicate,zero1,zero3", "--json", str(figures)]
    assert main(["bench", "step", *options]) == 0
    shown = capsys.readouterr().out
    assert "x replicate" in shown and "WRONG" not in shown
    losses = json.loads(figures.read_text())["losses"]
    assert losses["replicate"] == losses["zero1"] == losses["zero3"] != losses["no-sync"]


def test_the_targets_of_strategies() -> None:
    plan = StepPlan(strategy=("replicate", "zero1", "zero3", "fully-shard"))
    seconds = {"no-sync": [0.9], "replicate": [1.0], "zero1": [1.01], "zero3": [1.1], "fully-shard": [2.2]}
    results = StepResults(plan, seconds={128: seconds})
    results.memory[128] = {"zero3": Memory(10, 0, 0), "fully-shard": Memory(9, 0, 0)}
    found = {each.text.removeprefix("128 tokens a rank: "): each.met for each in judged(results)}
    assert found["zero1: at most 1 x the time of replicate"] is False
    assert found["zero3: at most 1.15 x the time of replicate"] is True
    assert found["zero3: at least 1.9 x the tokens/s of fully-shard"] is True
    assert found["zero3: peak resident memory at most 1 x that of fully-shard"] is False
    assert found["zero2: at most 1.05 x the time of replicate"] is None
