"""What a run has before its first step: the same, whenever it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from imece.checkpoint.load import Source
from imece.checkpoint.training_state import TrainingState
from imece.checkpoint.weights import MODEL, shaped
from imece.membership.pieces import Pieces
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TrainConfig
from imece.train.origin import open_weights


def new_model(config: TrainConfig, shape: TransformerConfig) -> Transformer:
    """Of random weights, on the CPU, where a seed gives the same ones whatever the device of the run is.

    Or, of a run that begins with a folder's, on the meta device: whoever divides it among ranks gives it
    memory, and `begin_with` values.
    """
    if config.model.weights:
        with torch.device("meta"):
            return Transformer(shape)
    return Transformer(shape, generator=torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def empty(module: nn.Module) -> None:
    """Fill a module's own parameters until their values are read."""
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def begin_with(config: TrainConfig) -> Source | None:
    """What the parameters of the config's folder are to be read from; None: they are random. UserError."""
    return open_weights(config.model.weights) if config.model.weights else None


def begin_again(
    state: TrainingState, optimizers: Sequence[Optimizer], config: TrainConfig, shape: TransformerConfig
) -> None:
    """The model that `state` is of, and `optimizers`, are as they were at first. All ranks call it."""
    start = begin_with(config) or _random(config, shape)
    for optimizer in optimizers:
        optimizer.state.clear()
    state.load(start)


def _random(config: TrainConfig, shape: TransformerConfig) -> Source:
    start = Pieces()
    for name, each in shaped(new_model(config, shape)).items():
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().view(-1))
    return start
