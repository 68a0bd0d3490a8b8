"""Writes the figures of a step as a TensorBoard event."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imece.observe.appending import Appending

# Key of a record -> TensorBoard's tag. TensorBoard groups charts by the part before the slash.
TAGS = {
    "loss": "loss",
    "val_loss": "val_loss",
    "tokens_per_s": "tokens_per_s",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "mfu": "mfu",
    "memory_bytes": "memory_bytes",
    "step_s": "time/step_s",
    "data_s": "time/data_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "exposed_s": "time/exposed_s",
    "optimizer_s": "time/optimizer_s",
    "copy_s": "time/copy_s",
    "other_s": "time/other_s",
    "val_s": "time/val_s",
    "save_s": "time/save_s",
}
VAL_LOSS_OF = "val_loss/"
"""What the key of a source's validation loss begins with, before its name."""

_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d{6})")


class Events:
    """Scalars in a new file of `folder`; one event holds all scalars of a step.

    Not torch's SummaryWriter: that makes one event for each scalar, and writes in a thread, which ends
    silently when the disk fails.
    """

    def __init__(self, folder: Path, from_step: int, now: float) -> None:
        """Makes TensorBoard forget what earlier files of `folder` hold of steps after `from_step`.

        now: unix seconds. OSError if the file cannot be made.
        """
        # This import takes a fifth of a second, which only a program that writes events should pay.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._file = Appending(folder / f"events.out.tfevents.{_after_all(folder, now):.6f}")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=now, file_version="brain.Event:2"))
        started = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=now, step=from_step + 1, session_log=started))

    def write(self, record: Mapping[str, object], now: float) -> None:
        """Write the numbers of `record` that have a tag, at its "step". OSError if that fails."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for key, value in record.items()
            if (tag := TAGS.get(key, key if key.startswith(VAL_LOSS_OF) else None)) is not None
            and isinstance(value, int | float)
        ]
        self._add(self._event(wall_time=now, step=record["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _after_all(folder: Path, now: float) -> float:
    """`now`, or a moment after the newest file of `folder`: TensorBoard reads files in the order of their
    names, and the clock may have been set back, or be that of another machine."""
    files = [_NAME.fullmatch(each.name) for each in folder.glob("*")]
    return max([now, *(float(found[1]) + 1e-6 for found in files if found is not None)])
