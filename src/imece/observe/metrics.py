"""metrics.jsonl and TensorBoard's events: the figures of each step, on disk as soon as they are known.

Figures matter less than training: if the disk fails, the run goes on. That is reported once, and each step
tries again.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from imece.observe.appending import Appending
from imece.observe.events import Events
from imece.writing import whole_file

FILE = "metrics.jsonl"
EVENTS = "tensorboard"  # name of TensorBoard's folder in the run folder


class Metrics:
    """Writes the figures of a run; only one process of the run has one."""

    def __init__(self, folder: Path, *, from_step: int = 0, alarm: Callable[[str], None]) -> None:
        """folder: the run folder, made if missing. Figures of steps after `from_step` are dropped from it.

        alarm: called with one line when writing fails; once, however long it keeps failing.
        """
        self._alarm: Callable[[str], None] | None = alarm  # None once it was called
        self._path, self._events_folder = folder / FILE, folder / EVENTS
        self._file: Appending | None = None
        self._events: Events | None = None
        self.steps_before = 0
        """The last step of which there were figures."""
        with self._telling(self._path):
            self.steps_before = _keep_until(self._path, from_step)
        with self._telling(self._path):  # even if that failed: the reader ignores such records
            self._file = Appending(self._path)
        with self._telling(self._events_folder):
            self._events = Events(self._events_folder, from_step, time.time())

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a step's figures: "step", and numbers, strings or None by name. Non-finite numbers become
        null."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        if self._file is not None:
            with self._telling(self._path):
                self._file.write(json.dumps(clean, allow_nan=False).encode() + b"\n")
        if self._events is not None:
            with self._telling(self._events_folder):
                self._events.write(clean, time.time())

    def close(self) -> None:
        """Close the files; everything is already written."""
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    @contextlib.contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._alarm is not None:
                why = error.strerror or str(error)
                self._alarm(f"{path}: cannot be written ({why}): training goes on, figures are missing")
            self._alarm = None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder by ascending step; [] if there is no file.

    Lines that are no record are skipped: a kill or a full disk can cut a line. If a step has several records,
    the last one counts, and earlier records of later steps are dropped: they belong to a part of the run that
    was taken back.
    """
    records: list[dict[str, Any]] = []
    for _, record in _lines(folder / FILE):
        while record is not None and records and records[-1]["step"] >= record["step"]:
            records.pop()
        if record is not None:
            records.append(record)
    return records


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line with its record, or None if it is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                record = None
            is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
            yield line, record if is_record else None


def _keep_until(path: Path, step: int) -> int:
    """Remove records after `step`, and broken lines, from the file; it is replaced atomically. Returns the
    last step that it had."""
    steps = [None if record is None else int(record["step"]) for _, record in _lines(path)]
    last = max((each for each in steps if each is not None), default=0)
    if last > step or None in steps:
        with whole_file(path, durable=True) as file:
            for line, record in _lines(path):
                if record is not None and record["step"] <= step:
                    file.write(line)
    return last
