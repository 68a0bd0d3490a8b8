"""A run that has lost everything repeats the steps that it made at first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import imece
from imece.checkpoint.state.training_state import TrainingState
from imece.models.presets import preset
from imece.train.config import OptimizerSection, TrainConfig
from imece.train.model.beginning import begin_again, new_model
from imece.train.model.optimizer import make_optimizers

SHAPE = replace(preset("tiny"), layers=1, width=16, heads=2, kv_heads=1, mlp_width=24)


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero3"])
def test_the_same_steps_again(strategy: str) -> None:
    mesh = imece.init()
    try:
        model = new_model(TrainConfig(seed=7), SHAPE)
        optimizers = make_optimizers(model, OptimizerSection())
        wrapped, _ = imece.parallelize(model, optimizers, strategy, mesh)
        state = TrainingState(wrapped, optimizers)

        def steps() -> list[Tensor]:
            found = []
            for number in range(3):
                tokens = torch.arange(16).view(2, 8) + number
                loss = wrapped(tokens).float().logsumexp(-1).mean()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.detach())
            return found

        first = steps()
        begin_again(state, optimizers, TrainConfig(seed=7), model)
        again = steps()
        assert all(map(torch.equal, first, again)) and not torch.equal(first[0], first[2])
    finally:
        mesh.close()
