"""metrics.jsonl and TensorBoard's events: a kill loses nothing, a resume doubles nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from imece.observe.appending import Appending
from imece.observe.metrics import Metrics, read_metrics


def refuse(text: str) -> None:
    raise AssertionError(f"an unexpected alarm: {text}")


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "lr": 0.001, "step_s": 0.25, **more}


def write(folder: Path, steps: range, from_step: int = 0) -> None:
    metrics = Metrics(folder, from_step=from_step, alarm=refuse)
    for step in steps:
        metrics.write(record(step, run=from_step))
    metrics.close()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_each_step_is_a_line_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", alarm=refuse)
    metrics.write(record(1, skipped="a NaN"))
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert line.endswith("\n")
    assert json.loads(line) == record(1, skipped="a NaN")
    metrics.close()


def test_a_kill_loses_no_step_that_was_written(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        metrics = Metrics(tmp_path, alarm=refuse)
        for step in 1, 2, 3:
            metrics.write({"step": step, "loss": 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3]
    assert scalars(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_files_that_are_removed_begin_anew(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", alarm=refuse)
    metrics.write(record(1))
    shutil.rmtree(tmp_path / "run")
    for step in 2, 3:
        metrics.write(record(step))
    metrics.close()
    assert [each["step"] for each in read_metrics(tmp_path / "run")] == [2, 3]
    assert [step for step, _ in scalars(tmp_path / "run", "loss")] == [2, 3]


def test_what_is_not_finite_is_null_and_no_event(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, alarm=refuse)
    metrics.write(record(1) | {"loss": float("nan"), "grad_norm": float("inf")})
    metrics.write(record(2))
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert read_metrics(tmp_path)[0] == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 0.001,
        "step_s": 0.25,
    }
    assert scalars(tmp_path, "loss") == [(2, 2.5)]


def test_events_have_the_figures_by_their_tags(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, alarm=refuse)
    own = {"val_loss/web": 3.25, "val_time": 1.0}
    metrics.write(record(7, val_loss=3.5, tokens_per_s=1000.0, exposed_s=0.125, skipped="not a number") | own)
    metrics.close()
    for tag, value in (
        ("val_loss", 3.5),
        ("val_loss/web", 3.25),
        ("tokens_per_s", 1000.0),
        ("time/exposed_s", 0.125),
    ):
        assert scalars(tmp_path, tag) == [(7, value)]


def test_going_on_drops_what_came_after(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(7, 9), from_step=6)
    kept = [(each["step"], each["run"]) for each in read_metrics(tmp_path)]
    assert kept == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 6), (8, 6)]
    assert [step for step, _ in scalars(tmp_path, "loss")] == list(range(1, 9))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
    assert not list(tmp_path.glob("*.partial"))


def test_going_on_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for now, steps, before in (
        (7200.0, range(1, 5), 0),
        (3600.0, range(3, 6), 2),
        (3600.0, range(4, 7), 3),
    ):
        monkeypatch.setattr("imece.observe.metrics.time.time", lambda now=now: now)
        write(tmp_path, steps, from_step=before)
    names = sorted(each.name for each in (tmp_path / "tensorboard").iterdir())
    assert names == [f"events.out.tfevents.7200.00000{n}" for n in range(3)]
    assert [step for step, _ in scalars(tmp_path, "loss")] == list(range(1, 7))


def test_beginning_again_drops_all(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 2))
    assert [each["step"] for each in read_metrics(tmp_path)] == [1]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1]


def test_a_run_that_goes_on_where_it_ended_keeps_its_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    write(tmp_path, range(4, 6), from_step=3)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "cut", ['{"step": 4, "lo', '{"step": 4, "loss": 1.0}', "\0" * 30 + "\n", "7\n", "{}\n", "[" * 9999 + "\n"]
)
def test_a_line_that_a_kill_has_cut_is_passed_over(tmp_path: Path, cut: str) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3]
    write(tmp_path, range(4, 5), from_step=3)
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_records_that_could_not_be_dropped_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(1, 6))

    def full(beside: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    alarms: list[str] = []
    metrics = Metrics(tmp_path, from_step=2, alarm=alarms.append)
    metrics.write(record(3, run=2))
    metrics.close()
    assert len(alarms) == 1
    assert [(each["step"], each["run"]) for each in read_metrics(tmp_path)] == [(1, 0), (2, 0), (3, 2)]
    assert not list(tmp_path.glob("*.partial"))


class Disk:
    """A raw file on a disk that may be full, and takes a byte of each write before it says so."""

    def __init__(self, file: Any) -> None:
        self._file, self.full, self._tried = file, False, False

    def write(self, data: bytes) -> int:
        if not self.full:
            return int(self._file.write(data))
        self._tried = not self._tried
        if self._tried:
            return int(self._file.write(data[:1]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[Disk] = []

    def open_on_disk(self: Appending, path: Path) -> None:
        opened(self, path)
        self._file = Disk(self._file)  # type: ignore[assignment]
        disks.append(self._file)  # type: ignore[arg-type]

    opened = Appending.__init__
    monkeypatch.setattr(Appending, "__init__", open_on_disk)
    alarms: list[str] = []
    metrics = Metrics(tmp_path, alarm=alarms.append)
    assert len(disks) == 2, "metrics.jsonl and the events"
    for step in range(1, 7):
        for disk in disks:
            disk.full = step in (3, 4)
        metrics.write(record(step))
    metrics.close()
    assert len(alarms) == 1
    assert "metrics.jsonl" in alarms[0] and "No space left" in alarms[0] and "\n" not in alarms[0]
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 5, 6]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 5, 6]


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    alarms: list[str] = []
    metrics = Metrics(tmp_path / "file" / "run", alarm=alarms.append)
    metrics.write(record(1))
    metrics.close()
    assert len(alarms) == 1
