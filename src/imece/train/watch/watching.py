"""What rank 0 shows and records; the other ranks only take part in collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imece.listing import many
from imece.observe.display import Display
from imece.observe.metrics import Metrics


class Watching:
    """The live line and the metrics on rank 0; nothing on other ranks."""

    def __init__(self, folder: Path, rank: int, steps: int, done: int, alarms: deque[str]) -> None:
        self._folder, self._steps, self._done, self._alarms = folder, steps, done, alarms
        self._display: Display | None = None
        self._metrics: Metrics | None = None
        self._late: Mapping[str, Any] | None = None  # the first rank may not have reported it
        self.take_over(rank, done)

    def take_over(self, rank: int, done: int) -> None:
        """From now on this is rank `rank`; the first rank shows and records.

        A held-back record is reported then, although the rank that is gone may have done so.
        """
        if self._late is not None and self._late["step"] > done:
            self._late = None
        if rank == 0 and self._display is None:
            self._display = Display(self._steps)
            self._metrics = Metrics(self._folder, from_step=done, alarm=self._alarms.append)

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """What is about to happen; and how many steps are lost, if the run had come further."""
        if self._display is not None and self._metrics is not None:
            self._display.header(rows)
            before = self._metrics.steps_before
            if (lost := before - self._done) > 0:
                are = "is" if lost == 1 else "are"
                self._display.note(f"the run had come to step {before:,}: {many(lost, 'step')} {are} lost")

    def start(self, done: int) -> None:
        """The loop begins after `done` steps."""
        if self._display is not None:
            self._display.start(done)

    def step(self, record: Mapping[str, Any], late: bool = False) -> None:
        """A step is over. late: hold its record back until `tell`."""
        self.pass_on()
        self.tell()
        self._late = record
        if not late:
            self.tell()
            self._late = None

    def tell(self) -> None:
        """Report what was held back. Other ranks keep theirs until the next step, because the first may die
        before."""
        if self._late is not None and self._display is not None and self._metrics is not None:
            record, self._late = self._late, None
            self._metrics.write(record)
            self._display.step(record)

    def under_way(self, text: str) -> None:
        """Say that something slow has begun that is not a step."""
        if self._display is not None:
            self._display.under_way(text)

    def note(self, text: str) -> None:
        """A message for people; if several ranks give the same, it is shown once."""
        if self._display is not None:
            self._display.note(text)

    def pass_on(self) -> None:
        """Show the messages of threads. All ranks know of a failed save; one of them reports it."""
        while self._alarms:
            text = self._alarms.popleft()
            if self._display is not None:
                self._display.note(f"warning: {text}")

    def done(
        self, rows: Sequence[tuple[str, str]], sample: str | None, next_commands: Sequence[tuple[str, str]]
    ) -> None:
        """Show how the run ended."""
        if self._display is not None:
            self._display.done(rows, sample, next_commands)

    def close(self) -> None:
        """Show the last warnings, and close the files."""
        self.pass_on()
        if self._display is not None and self._metrics is not None:
            self._display.close()
            self._metrics.close()
