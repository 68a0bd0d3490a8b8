"""The figures of a step as a TensorBoard event."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imece.observe.appending import Appending

# Key of a record -> TensorBoard's tag. It groups its charts by what is before a slash.
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


class Events:
    """Scalars in a new file of `folder`; one event holds all of a step.

    Not torch's SummaryWriter: it makes an event of each scalar, and writes from a thread, where an error of
    the disk ends the thread and nobody is told.
    """

    def __init__(self, folder: Path, from_step: int, now: float) -> None:
        """TensorBoard is told to forget what earlier files of `folder` hold of steps after `from_step`.

        now: unix seconds; TensorBoard reads the files in their order. OSError if the file cannot be made.
        """
        # A fifth of a second of importing, which only a program that makes events should wait for.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._file = Appending(folder / f"events.out.tfevents.{now:.6f}")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=now, file_version="brain.Event:2"))
        started = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=now, step=from_step + 1, session_log=started))

    def write(self, record: Mapping[str, object], now: float) -> None:
        """The numbers of `record` that have a tag, at its "step". OSError if they cannot be written."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for key, tag in TAGS.items()
            if isinstance(value := record.get(key), int | float)
        ]
        self._add(self._event(wall_time=now, step=record["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
