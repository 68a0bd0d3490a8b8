"""What rank 0 shows and writes down; the other ranks only join in where all are asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imece.observe.display import Display
from imece.observe.metrics import Metrics


class Watching:
    """The live line and the metrics on rank 0; nothing on the others."""

    def __init__(self, folder: Path, rank: int, steps: int, done: int, alarms: deque[str]) -> None:
        self._folder, self._steps, self._alarms = folder, steps, alarms
        self._display: Display | None = None
        self._metrics: Metrics | None = None
        self._late: Mapping[str, Any] | None = None  # of a step that the first rank may not have told yet
        self.take_over(rank, done)

    def take_over(self, rank: int, done: int) -> None:
        """From now on this is rank `rank`: if it is the first, it does what the one before it did.

        What was late of the step before is told then, though the one that is gone may have done so.
        """
        if self._late is not None and self._late["step"] > done:
            self._late = None
        if rank == 0 and self._display is None:
            self._display = Display(self._steps)
            self._metrics = Metrics(self._folder, from_step=done, alarm=self._alarms.append)

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """What is about to happen."""
        if self._display is not None:
            self._display.header(rows)

    def start(self, done: int) -> None:
        """The loop begins after `done` steps."""
        if self._display is not None:
            self._display.start(done)

    def step(self, record: Mapping[str, Any], late: bool = False) -> None:
        """One step is over. late: it is shown and written when `tell` is called."""
        self.pass_on()
        self.tell()
        self._late = record
        if not late:
            self.tell()
            self._late = None

    def tell(self) -> None:
        """What is late. The other ranks keep theirs until the next one: the first may die before."""
        if self._late is not None and self._display is not None and self._metrics is not None:
            record, self._late = self._late, None
            self._metrics.write(record)
            self._display.step(record)

    def under_way(self, text: str) -> None:
        """What takes a while and is no step."""
        if self._display is not None:
            self._display.under_way(text)

    def note(self, text: str) -> None:
        """For people, once: the ranks that say the same are heard only once."""
        if self._display is not None:
            self._display.note(text)

    def pass_on(self) -> None:
        """What threads had to say. A save that failed is known to all ranks; one of them says so."""
        while self._alarms:
            text = self._alarms.popleft()
            if self._display is not None:
                self._display.note(f"warning: {text}")

    def done(
        self, rows: Sequence[tuple[str, str]], sample: str | None, next_commands: Sequence[tuple[str, str]]
    ) -> None:
        """How it ended."""
        if self._display is not None:
            self._display.done(rows, sample, next_commands)

    def close(self) -> None:
        """The last warnings, and the files."""
        self.pass_on()
        if self._display is not None and self._metrics is not None:
            self._display.close()
            self._metrics.close()
