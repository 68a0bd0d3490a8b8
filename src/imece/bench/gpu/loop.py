"""Measures how much of a step of `imece train` its loop takes, in a short run started as a user would."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path

from imece import mesh as meshes
from imece.bench.train.contenders import NEVER_DONE, QUICK, with_text
from imece.bench.train.pausing import PausingLoop
from imece.mesh import Mesh
from imece.train.config import BatchSection, CheckpointSection, ModelSection, ValidateSection
from imece.train.opening import open_session
from imece.train.run.folder import RunFolder

_WARM_UP = 3  # steps


def loops_own(mesh: Mesh, preset: str, sequences: int, steps: int) -> float:
    """The share of the median step that is neither forward, backward, optimizer nor communication."""
    assert mesh is meshes.current()
    with tempfile.TemporaryDirectory(prefix="imece-bench-") as name:
        config = dataclasses.replace(
            QUICK,
            model=ModelSection(preset=preset),
            batch=BatchSection(sequences=sequences, micro=sequences),
            validate=ValidateSection(every=0),
            checkpoint=CheckpointSection(every=0),
            steps=NEVER_DONE,
            run=str(Path(name) / "run"),
        )
        config = with_text(config, Path(name), lambda line: None)
        with RunFolder(config.folder).begun(config):
            session = open_session(config, mesh)
        loop = PausingLoop(session)
        try:
            session.begin()
            steady = loop.go_on(_WARM_UP + steps)[_WARM_UP:]
        finally:
            loop.close()
    return statistics.median(float((each["data_s"] + each["other_s"]) / each["step_s"]) for each in steady)
