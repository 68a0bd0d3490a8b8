"""A late report comes once, from whichever rank is then the first."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from imece.train.watch.watching import Watching
from tests.observe.test_display import record

STEPS = 9


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def watching(folder: Path, rank: int) -> Watching:
    made = Watching(folder, rank, STEPS, 0, deque())
    made.start(0)
    return made


def of(step: int) -> dict[str, Any]:
    return {**record(step)}


def test_what_is_late_is_told_with_the_next_step_or_before(tmp_path: Path) -> None:
    first = watching(tmp_path, 0)
    first.step(of(1))
    first.step(of(2), late=True)
    assert steps(tmp_path) == [1]
    first.tell()
    first.tell()
    assert steps(tmp_path) == [1, 2]
    first.step(of(3), late=True)
    first.step(of(4), late=True)
    assert steps(tmp_path) == [1, 2, 3]
    first.step(of(5))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("late", "done", "told"), [(True, 2, [2, 3]), (True, 1, [3]), (False, 2, [3])])
def test_another_rank_takes_over(tmp_path: Path, late: bool, done: int, told: list[int]) -> None:
    """Of step 2 nobody knows whether the one before it has told; nobody wants it if the run went back."""
    other = watching(tmp_path, 1)
    other.step(of(1), late)
    other.step(of(2), late)
    other.tell()
    other.take_over(0, done)
    other.start(done)
    other.step(of(3))
    assert steps(tmp_path) == told


@pytest.mark.parametrize(
    ("done", "said"), [(1, "the run had come to step 4: 3 steps are lost"), (3, ": 1 step is lost"), (4, "")]
)
def test_steps_that_are_lost_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], done: int, said: str
) -> None:
    before = watching(tmp_path, 0)
    for step in (1, 2, 3, 4):
        before.step(of(step))
    before.close()
    capsys.readouterr()
    Watching(tmp_path, 0, STEPS, done, deque()).header([("run", "again")])
    out = capsys.readouterr().out
    assert said in out and ("lost" in out) == bool(said)
    assert steps(tmp_path) == list(range(1, done + 1))
