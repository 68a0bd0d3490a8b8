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


def new_model(shape: TransformerConfig, seed: int) -> Transformer:
    """On the CPU, where a seed gives the same weights whatever the device of the run is."""
    return Transformer(shape, generator=torch.Generator().manual_seed(seed))


def begin_again(
    state: TrainingState, optimizers: Sequence[Optimizer], shape: TransformerConfig, seed: int
) -> None:
    """The model that `state` is of, and `optimizers`, are as they were at first. All ranks call it."""
    start = Pieces()
    for name, each in shaped(new_model(shape, seed)).items():
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().view(-1))
    for optimizer in optimizers:
        optimizer.state.clear()
    state.load(start)
