"""What ranks that share a GPU save, other strategies and numbers of ranks load and continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

import imece
from imece.checkpoint import Checkpoints, open_checkpoint
from imece.checkpoint.files import step_folder
from imece.checkpoint.state.training_state import TrainingState
from tests.gpu.devices import DEVICES, run_on
from tests.gpu.training import new_model, train

STEPS = 2
ROOM = 1e-4


def saved(device: str, folder: str, strategy: str) -> list[float]:
    """Train, save, and go on: the losses after the save."""
    mesh = imece.init(device=device, backend="gloo")
    model = new_model(device)
    wrapped, optimizer = imece.parallelize(model, AdamW(model.parameters(), 1e-3), strategy)
    train(wrapped, optimizer, device, mesh.rank, STEPS)
    checkpoints = Checkpoints(Path(folder), rank=mesh.rank, world_size=mesh.world_size, alarm=print)
    checkpoints.save(STEPS, TrainingState(wrapped, [optimizer]).tensors(), {}, None)
    later = train(wrapped, optimizer, device, mesh.rank, STEPS, first=STEPS)  # what is saved is a snapshot
    assert checkpoints.finish()
    checkpoints.close()
    return later


def loaded(device: str, folder: str, strategies: list[str]) -> list[list[float]]:
    """The losses after it was loaded into other values, in each strategy."""
    mesh = imece.init(device=device, backend="gloo")
    found = []
    for strategy in strategies:
        model = new_model(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        wrapped, optimizer = imece.parallelize(model, AdamW(model.parameters(), 1e-3), strategy)
        TrainingState(wrapped, [optimizer]).load(open_checkpoint(step_folder(Path(folder), STEPS)))
        found.append(train(wrapped, optimizer, device, mesh.rank, STEPS, first=STEPS))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["replicate", "zero3"])
def test_what_one_strategy_saves_others_go_on_with(device: str, strategy: str, tmp_path: Path) -> None:
    after = run_on(saved, 2, device, [str(tmp_path), strategy])
    others = ["replicate", "zero1", "zero2", "zero3"]
    for rank, found in enumerate(run_on(loaded, 2, device, [str(tmp_path), others])):
        assert len(found) == len(others)
        for losses in found:
            assert losses == pytest.approx(after[rank], abs=ROOM)
