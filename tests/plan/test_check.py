"""Prediction beside measurement: the arithmetic, and broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imece.errors import UserError
from imece.plan.check import PLAN_FILE, check_json, check_lines, read_plan, rows

CONTENT: dict[str, Any] = {
    "version": 1,
    "predicted": {
        "plan": "ZeRO-1",
        "counted_bytes": {"parameters": 100, "gradients": 100, "optimizer": 100, "communication": 10},
        "needed_bytes": 400,
        "step_s": 1.5,
    },
    "measured": {
        "memory_bytes": {"parameters": 100, "gradients": 80, "optimizer": 125, "communication": 10},
        "rank_bytes": 500,
        "step_s": 1.0,
    },
}  # fmt: skip


def test_rows_compare_alike_with_alike() -> None:
    found = {row.what: row for row in rows(CONTENT)}
    assert {what: row.off for what, row in found.items()} == {
        "parameters": 0.0,
        "gradients": pytest.approx(0.25),
        "optimizer": pytest.approx(-0.2),
        "communication": 0.0,
        "state": pytest.approx(310 / 315 - 1),
        "whole rank": pytest.approx(-0.2),
        "step": pytest.approx(0.5),
    }


def test_what_is_offloaded_has_a_row() -> None:
    counted = {"counted_bytes": CONTENT["predicted"]["counted_bytes"] | {"host": 60}}
    measured = {"memory_bytes": CONTENT["measured"]["memory_bytes"] | {"host": 50}}
    found = {row.what: row.off for row in rows({"predicted": counted, "measured": measured})}
    assert found["host memory"] == pytest.approx(0.2) and found["state"] == pytest.approx(310 / 315 - 1)


def test_lines_name_the_worst() -> None:
    lines = list(check_lines(CONTENT))
    assert lines[-1] == "furthest off: step, predicted 50.0 % too high"
    step = next(line for line in lines if line.startswith("step"))
    assert step.split() == ["step", "1.50", "s", "1.00", "s", "+50.0", "%"]
    assert check_json(CONTENT)["rows"][-1]["off"] == pytest.approx(0.5)


def test_lines_name_no_worst_where_all_is_as_predicted() -> None:
    predicted, measured = CONTENT["predicted"], CONTENT["measured"] | {"rank_bytes": 400.1, "step_s": 1.4995}
    measured = measured | {"memory_bytes": predicted["counted_bytes"]}
    lines = list(check_lines({"predicted": predicted, "measured": measured}))
    assert lines[-1] == "all within 0.1 % of what was predicted"


def test_a_run_that_has_not_ended_and_one_without_a_time() -> None:
    unmeasured = list(check_lines(CONTENT | {"measured": None}))[-1]
    assert unmeasured.startswith("nothing is measured: ") and unmeasured.endswith("it goes on, or was killed")
    untimed = CONTENT | {
        "predicted": {**CONTENT["predicted"], "step_s": None, "why": "not measured: --here does"}
    }
    assert list(check_lines(untimed))[-1] == "not predicted: step (not measured: --here does)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "imece train writes it into its run folder"),
        ("{", "is not what imece train writes"),
        ("[]", "is not what imece train writes"),
        ("{}", "is not what imece train writes: it has no 'version'"),
        ('{"version": 2}', "has format 2"),
        ('{"version": 1, "predicted": 3}', "is not what imece train writes"),
        ('{"version": 1, "predicted": {"counted_bytes": []}}', "counted_bytes is no table"),
        ('{"version": 1, "predicted": {}, "measured": [1]}', "measured is no table"),
        (
            '{"version": 1, "predicted": {"counted_bytes": {"parameters": "x"}}}',
            "parameters is 'x', which is no size or time",
        ),
        ('{"version": 1, "predicted": {}, "measured": {"step_s": NaN}}', "step_s is nan, which is no"),
        ('{"version": 1, "predicted": {"needed_bytes": -1}}', "needed_bytes is -1, which is no"),
        pytest.param(f'{{"version": 1, "predicted": {{"step_s": {10**400}}}}}', "step_s is 1000", id="huge"),
    ],
)
def test_no_plan_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_plan(tmp_path)
    assert "\n" not in str(caught.value)


def test_reading_back(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(json.dumps(CONTENT))
    assert read_plan(tmp_path) == CONTENT
