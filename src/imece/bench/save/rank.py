"""One rank of `imece bench save`: trains and saves a model in one strategy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import imece
from imece.bench import crew
from imece.bench.reference_model import MODELS, batch, new_decoder, optimizer_of
from imece.bench.resident import peak_bytes, peak_from_now_on
from imece.checkpoint.files import step_folder
from imece.checkpoint.manifest import file_name
from imece.checkpoint.save import Checkpoints
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import ops


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._mesh = imece.init(device="cpu")
        self._saves = 0
        self._alarms: list[str] = []

    def build(self, strategy: str, model: str, tokens: int, folder: str) -> dict[str, Any]:
        """Make the model; returns its size."""
        self._shape, self._tokens = MODELS[model], tokens
        made = new_decoder(self._shape)
        parameters = sum(each.numel() for each in made.parameters())
        self._model, self._optimizer = imece.parallelize(made, optimizer_of(made), strategy)
        self._state = TrainingState(self._model, [self._optimizer])
        self._folder = Path(folder)
        self._checkpoints = Checkpoints(
            self._folder, rank=self._mesh.rank, world_size=self._mesh.world_size, keep=1,
            alarm=self._alarms.append,
        )  # fmt: skip
        return {"parameters": parameters}

    def step(self) -> dict[str, Any]:
        """Seconds of a step after a barrier, and whether the save was still under way after it."""
        inputs = batch(self._shape, self._tokens, self._mesh.rank)
        ops.barrier(group=self._mesh.world_group)
        began = time.perf_counter()
        self._model(inputs).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "saving": self._checkpoints.is_saving}

    def save(self) -> dict[str, Any]:
        """Begin a save; returns the seconds in which training stood still."""
        ops.barrier(group=self._mesh.world_group)
        began = time.perf_counter()
        self._begin()
        return {"seconds": time.perf_counter() - began}

    def finish(self) -> dict[str, Any]:
        """Wait until the newest save is on the disk; returns the bytes that this rank wrote."""
        if not self._checkpoints.finish():
            raise RuntimeError("; ".join(self._alarms))
        written = step_folder(self._folder, self._saves) / file_name(self._mesh.rank)
        return {"written_bytes": written.stat().st_size}

    def memory(self) -> dict[str, Any]:
        """Bytes by which resident memory grew during the first save; None if unknown.

        No step runs meanwhile: the memory that steps take and free would hide it.
        """
        before = peak_from_now_on()
        self._begin()
        written = self.finish()
        return written | {"grown_bytes": None if before is None else peak_bytes() - before}

    def _begin(self) -> None:
        self._saves += 1
        self._checkpoints.save(self._saves, self._state.tensors(), {}, None)


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
