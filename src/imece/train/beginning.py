"""What a run has before its first step: the same, whenever it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from imece.checkpoint.training_state import TrainingState
from imece.checkpoint.weights import MODEL, shaped
from imece.membership.pieces import Pieces
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TrainConfig
from imece.train.origin import open_weights, read_model


def first_model(config: TrainConfig, shape: TransformerConfig) -> Transformer:
    """On the CPU: that of the folder which the config begins with, or one of random weights. UserError."""
    if config.model.weights:
        return read_model(open_weights(config.model.weights), torch.device("cpu"))
    return new_model(config, shape)


def new_model(config: TrainConfig, shape: TransformerConfig) -> Transformer:
    """Of random weights, on the CPU, where a seed gives the same ones whatever the device of the run is."""
    return Transformer(shape, generator=torch.Generator().manual_seed(config.seed))


def begin_again(
    state: TrainingState, optimizers: Sequence[Optimizer], config: TrainConfig, shape: TransformerConfig
) -> None:
    """The model that `state` is of, and `optimizers`, are as they were at first. All ranks call it."""
    start = Pieces()
    for name, each in shaped(first_model(config, shape)).items():
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().view(-1))
    for optimizer in optimizers:
        optimizer.state.clear()
    state.load(start)
