"""metrics.jsonl and TensorBoard's events: what each step was like, on disk the moment it is told.

Figures are worth less than the training they are of: no trouble with the disk ends it. It is told once, and
each step tries again.
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
EVENTS = "tensorboard"  # the folder


class Metrics:
    """The writer of a run's figures; one process of the run has it."""

    def __init__(self, folder: Path, *, from_step: int = 0, alarm: Callable[[str], None]) -> None:
        """folder: the run's, made if it is not there. What is there of steps after `from_step` is dropped.

        alarm: told in one line when something cannot be written; once, however long that lasts.
        """
        self._alarm: Callable[[str], None] | None = alarm  # None once it has been told
        self._path, self._events_folder = folder / FILE, folder / EVENTS
        self._file: Appending | None = None
        self._events: Events | None = None
        with self._telling(self._path):
            _keep_until(self._path, from_step)
        with self._telling(self._path):  # also if that failed: the reader can tell what was taken back
            self._file = Appending(self._path)
        with self._telling(self._events_folder):
            self._events = Events(self._events_folder, from_step, time.time())

    def write(self, record: Mapping[str, Any]) -> None:
        """A step's figures: "step" and numbers, strings or None by name. What is not finite becomes null."""
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
        """Close the files; nothing is left to be written."""
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
    """The records of a run folder, by ascending step; [] if there is no file.

    A line that is no record is passed over: a kill or a full disk can cut one. Of several records of a step
    the last in the file counts, and what stands before it of later steps is of a run that was taken back.
    """
    records: list[dict[str, Any]] = []
    for _, record in _lines(folder / FILE):
        while record is not None and records and records[-1]["step"] >= record["step"]:
            records.pop()
        if record is not None:
            records.append(record)
    return records


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line with the record in it, or None if there is none."""
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


def _keep_until(path: Path, step: int) -> None:
    """Take the records after `step`, and lines that are none, out of the file; it changes at one instant."""
    if all(record is not None and record["step"] <= step for _, record in _lines(path)):
        return
    with whole_file(path, durable=True) as file:
        for line, record in _lines(path):
            if record is not None and record["step"] <= step:
                file.write(line)
