"""What a run folder holds, complete or not: the run may still be going on, or have been cut short."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from imece.observe.metrics import read_metrics
from imece.reading import Json, json_if_any
from imece.writing import write_whole

ENDED = "ended"
"""The key of summary.json that says why a run ended early."""
CHECKPOINT = "checkpoint"
"""The key of summary.json with the step of the newest checkpoint on the disk; null: there is none."""

BY_SOURCE = "val_loss_by_source"
"""The key of summary.json with the validation loss of each source, if there are several."""


@dataclass(frozen=True)
class RunFiles:
    """Everything that a run's pictures and pages are made from."""

    path: Path
    records: list[Json]  # from metrics.jsonl, by step
    config: str  # the text of config.toml, or ""
    environment: Json  # {} if the file is missing; so are those below
    summary: Json

    @classmethod
    def read(cls, path: Path) -> Self:
        """A missing or cut file counts as empty, and so does a summary after which the run went on. OSError
        for a config or figures that cannot be read."""
        config = path / "config.toml"
        text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
        records, summary = read_metrics(path), json_if_any(path / "summary.json")
        if records and records[-1]["step"] > summary.get("steps", 0):
            summary = {}
        return cls(path, records, text, json_if_any(path / "environment.json"), summary)

    @property
    def name(self) -> str:
        """The run's name for people."""
        return self.path.resolve().name

    @property
    def argument(self) -> str:
        """The run folder as an argument in a command to copy: relative if it is below the current folder."""
        near = os.path.relpath(self.path)
        return as_argument(self.path if near.startswith("..") else near)

    @property
    def steps_done(self) -> int:
        """The step of the newest record."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def total_steps(self) -> int:
        """The steps that the config asks for, or those that are done if it does not say."""
        try:
            asked = tomllib.loads(self.config).get("steps")
        except tomllib.TOMLDecodeError:
            asked = None
        return asked if isinstance(asked, int) else self.steps_done

    @property
    def ended(self) -> str:
        """Why the run ended early; "" if nothing says so."""
        return str(self.summary.get(ENDED, ""))

    @property
    def kept(self) -> int | None:
        """The step of the newest checkpoint as the summary says, or else the last step."""
        found = self.summary.get(CHECKPOINT, self.steps_done)
        return found if isinstance(found, int) else None

    @property
    def baselines(self) -> dict[str, float]:
        """Name -> nats per token, the worst first."""
        return dict(sorted((self.summary.get("baselines") or {}).items(), key=lambda each: -each[1]))

    @property
    def val_loss(self) -> float | None:
        """The validation loss at the end, or else the newest."""
        newest = [record["val_loss"] for record in self.records if record.get("val_loss") is not None]
        found = self.summary.get("val_loss")
        return float(found) if found is not None else newest[-1] if newest else None


def as_argument(path: str | Path) -> str:
    """A path quoted for the shell, and so that a command does not take it for an option."""
    name = str(path)
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of a run that is under way. A full disk is no error: it is reported where figures and
    checkpoints are written."""
    with contextlib.suppress(OSError):
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode(), durable=True)
