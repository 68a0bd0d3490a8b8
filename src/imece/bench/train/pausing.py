"""A loop of `imece train` that stops after some steps and can go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imece.train.loop import Loop
from imece.train.session import Session
from imece.train.watch.stopping import Stop
from imece.train.watch.watching import Watching


class _EnoughError(Exception):
    """The ordered number of steps is made."""


class _Watching(Watching):
    """Shows and writes what a run always does, and leaves the loop after the ordered steps."""

    def __init__(self, session: Session) -> None:
        super().__init__(
            session.folder.path, session.mesh.rank, session.config.steps, session.done, session.alarms
        )
        self.ordered = 0
        self.records: list[dict[str, Any]] = []

    def step(self, record: Mapping[str, Any], late: bool = False) -> None:
        super().step(record, late)
        self.records.append(dict(record))
        if len(self.records) == self.ordered:
            raise _EnoughError


class PausingLoop:
    """The loop of an open session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._watching = _Watching(session)
        self._loop = Loop(session, self._watching, Stop())

    def go_on(self, steps: int) -> list[dict[str, Any]]:
        """Make this many steps; returns their records."""
        self._watching.ordered, self._watching.records = steps, []
        try:
            self._loop.run()
        except _EnoughError:
            return self._watching.records
        raise RuntimeError("the run came to its end: its config has too few steps")

    def close(self) -> None:
        """Complete what is shown and written."""
        self.session.checkpoints.close()
        self._watching.close()
