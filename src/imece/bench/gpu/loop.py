"""How much of a step of `imece train` is the loop's own: a run of some steps, as a person would start it."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imece import mesh as meshes
from imece.bench.train.contenders import with_text
from imece.mesh import Mesh
from imece.train.config import (
    BatchSection,
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
    ValidateSection,
)
from imece.train.loop import Loop
from imece.train.run_folder import RunFolder
from imece.train.session import Session
from imece.train.stopping import Stop
from imece.train.watching import Watching

_WARM_UP = 3  # steps
_NEVER_DONE = 10**6  # steps of the run: its last one would validate and save


class _EnoughError(Exception):
    """As many steps as were wanted."""


class _Keeping(Watching):
    """What a run always has, and its records besides; after the wanted steps the loop is left."""

    def __init__(self, session: Session, wanted: int) -> None:
        super().__init__(
            session.folder.path, session.mesh.rank, session.config.steps, session.done, session.alarms
        )
        self.records: list[dict[str, Any]] = []
        self._wanted = wanted

    def step(self, record: Mapping[str, Any]) -> None:
        super().step(record)
        self.records.append(dict(record))
        if len(self.records) == self._wanted:
            raise _EnoughError


def loops_own(mesh: Mesh, preset: str, sequences: int, steps: int) -> float:
    """The median step's share that is neither forward, backward, optimizer nor communication."""
    assert mesh is meshes.current()
    with tempfile.TemporaryDirectory(prefix="imece-bench-") as name:
        config = TrainConfig(
            model=ModelSection(preset=preset),
            data=DataSection(paths=(str(Path(json.__file__).parent),), tokenizer="bytes"),
            batch=BatchSection(sequences=sequences, micro=sequences),
            optimizer=OptimizerSection(warmup=0),
            validate=ValidateSection(every=0),
            checkpoint=CheckpointSection(every=0),
            steps=_NEVER_DONE,
            run=str(Path(name) / "run"),
        )
        config = with_text(config, Path(name), lambda line: None)
        with RunFolder(config.folder).begun(config):
            session = Session.open(config, mesh)
        watching = _Keeping(session, _WARM_UP + steps)
        try:
            session.begin()
            with contextlib.suppress(_EnoughError):
                Loop(session, watching, Stop()).run()
        finally:
            session.checkpoints.close()
            watching.close()
    steady = watching.records[_WARM_UP:]
    return statistics.median(float((each["data_s"] + each["other_s"]) / each["step_s"]) for each in steady)
