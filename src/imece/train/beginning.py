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
from imece.train.adapters import adapted, first_pieces
from imece.train.config import TrainConfig
from imece.train.origin import open_base, open_weights
from imece.train.precision import Precision, choose_precision
from imece.train.run_folder import RunFolder

_CPU = torch.device("cpu")


def new_model(
    config: TrainConfig,
    shape: TransformerConfig,
    device: torch.device = _CPU,
    precision: Precision | None = None,
) -> Transformer:
    """Of random weights, on the CPU, where a seed gives the same ones whatever the device of the run is.

    Or, of a run that begins with a folder's, on the meta device: whoever divides it among ranks gives it
    memory, and `begin_with` values, or `begin_beside` beside adapters. But a quantised base is whole, on
    `device`; precision: in which it is multiplied with. UserError if the base cannot be read.
    """
    if not config.model.weights:
        return Transformer(shape, generator=torch.Generator().manual_seed(config.seed))
    with torch.device("meta"):
        model = Transformer(shape)
    if not config.lora.rank:
        return model
    base = open_base(config, RunFolder(config.folder))
    return adapted(config, base, model, device, precision or choose_precision("fp32", device))


@torch.no_grad()
def empty(module: nn.Module) -> None:
    """Fill a module's own parameters until their values are read."""
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def begin_with(config: TrainConfig) -> Source | None:
    """What the parameters of the config's folder are to be read from; None: they are random, or have their
    values already. UserError."""
    return open_weights(config.model.weights) if config.model.weights and not config.lora.rank else None


def begin_again(
    state: TrainingState, optimizers: Sequence[Optimizer], config: TrainConfig, model: Transformer
) -> None:
    """`model`, which `state` is of, and `optimizers` are as they were at first. All ranks call it."""
    adapters = config.lora.rank > 0
    start = begin_with(config) or (first_pieces if adapters else _random)(config, model)
    for optimizer in optimizers:
        optimizer.state.clear()
    state.load(start, frozen=not adapters)


def _random(config: TrainConfig, model: Transformer) -> Source:
    start = Pieces()
    for name, each in shaped(new_model(config, model.config)).items():
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().view(-1))
    return start
