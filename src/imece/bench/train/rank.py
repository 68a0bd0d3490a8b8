"""One rank of `imece train` in `imece bench train`: runs the real loop, some steps at a time."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from imece import opening
from imece.bench import crew
from imece.bench.resident import peak_bytes, peak_from_now_on
from imece.bench.train.pausing import PausingLoop
from imece.checkpoint.files import step_folder
from imece.checkpoint.load import all_steps
from imece.checkpoint.manifest import file_name
from imece.collectives import ops
from imece.train.config import CheckpointSection
from imece.train.opening import open_session
from imece.train.run.folder import RunFolder
from imece.train.session import Session


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        sys.stdout = _Screen(open(os.devnull, "wb"))  # noqa: SIM115 - as long as the process
        os.environ["TERM"] = "xterm"  # so that the live line is drawn, as at a terminal
        self._mesh = opening.init(device="cpu")
        self._runs: dict[str, PausingLoop] = {}

    def open(self, way: str, folder: str) -> dict[str, Any]:
        """Begin the run of a run folder's config; returns its size, its batch in words, and the seconds of
        compiling."""
        session = open_session(RunFolder(Path(folder)).config(), self._mesh)
        self._runs[way] = PausingLoop(session)
        return {
            "parameters": session.model.config.parameter_count,
            "batch": session.plan.describe(),
            "compile_s": session.compile_s,
        }

    def measure(self, way: str, steps: int) -> dict[str, Any]:
        """Average seconds of `steps` steps after a barrier, the last loss, and every step's phases."""
        ops.barrier(group=self._mesh.world_group)
        begin = time.perf_counter()
        records = self._runs[way].go_on(steps)
        seconds = (time.perf_counter() - begin) / steps
        return {
            "seconds": seconds,
            "loss": records[-1]["loss"],
            "phases": [_phases(each) for each in records],
        }

    def measure_save(self, way: str, steps: int) -> dict[str, Any]:
        """Seconds of each of `steps` steps; a save follows the first one and counts with it.

        whole: whether the save was on the disk at the end, so that none of its cost is missing.
        """
        session = self._runs[way].session
        usual, at = session.config, session.done + 1
        session.config = dataclasses.replace(usual, checkpoint=CheckpointSection(every=at))
        ops.barrier(group=self._mesh.world_group)
        seconds = [each["step_s"] + each.get("save_s", 0.0) for each in self._runs[way].go_on(steps)]
        session.config = usual
        whole = at in all_steps(session.folder.checkpoints)
        _finish(session)
        return {"steps_s": seconds, "whole": whole}

    def save(self, way: str) -> dict[str, Any]:
        """Growth of resident bytes during a save, and the bytes that it wrote.

        No step runs meanwhile: the memory that steps take and free would hide it. grown_bytes is None if the
        kernel does not tell.
        """
        session = self._runs[way].session
        before = peak_from_now_on()
        session.save()
        _finish(session)
        after = peak_bytes()
        folder = step_folder(session.folder.checkpoints, session.done)
        written = (folder / file_name(self._mesh.rank)).stat().st_size
        return {"grown_bytes": None if before is None else after - before, "written_bytes": written}


class _Screen(io.TextIOWrapper):
    """A terminal that nobody sees."""

    def isatty(self) -> bool:
        return True


def _finish(session: Session) -> None:
    if not session.checkpoints.finish():
        raise RuntimeError("; ".join(session.alarms))


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: record[name] for name in record if name.endswith("_s") and name != "tokens_per_s"}


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
