"""What a run starts from: model and optimizer states before the first step, always the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from imece.checkpoint.load import Source
from imece.checkpoint.state.names import MODEL
from imece.checkpoint.state.training_state import TrainingState
from imece.checkpoint.state.weights import buffers_of, shaped
from imece.membership.pieces import Pieces
from imece.models.language_model import LanguageConfig, LanguageModel, outline
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TrainConfig
from imece.train.model.adapters import adapted, first_pieces
from imece.train.model.origin import open_base, open_weights
from imece.train.model.precision import Precision, choose_precision
from imece.train.run.folder import RunFolder

_CPU = torch.device("cpu")


def new_model(
    config: TrainConfig,
    shape: LanguageConfig,
    device: torch.device = _CPU,
    precision: Precision | None = None,
) -> LanguageModel:
    """The model on the CPU with random weights, which a seed makes the same for any device.

    If the run begins from a folder, the model is on the meta device: whoever divides it among ranks gives it
    memory, and `begin_with` (or, beside adapters, `begin_beside`) its values. But a quantised base is whole,
    on `device`; precision: of its products. UserError if the base cannot be read.
    """
    if not config.model.weights:
        assert isinstance(shape, TransformerConfig)
        return Transformer(shape, generator=torch.Generator().manual_seed(config.seed))
    model = outline(shape)
    if not config.lora.rank:
        return model
    base = open_base(config, RunFolder(config.folder))
    return adapted(config, base, model, device, precision or choose_precision("fp32", device))


@torch.no_grad()
def zero(module: nn.Module) -> None:
    """Fill a module's own parameters with zeros, until their values are read."""
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def begin_with(config: TrainConfig) -> Source | None:
    """The source of the parameters if the config names a folder; None if they are random or already have
    values. UserError."""
    return open_weights(config.model.weights) if config.model.weights and not config.lora.rank else None


def begin_again(
    state: TrainingState, optimizers: Sequence[Optimizer], config: TrainConfig, model: LanguageModel
) -> None:
    """Reset `model`, which `state` belongs to, and `optimizers` to the beginning of the run. All ranks call
    this."""
    adapters = config.lora.rank > 0
    start = begin_with(config) or (_first if adapters else _random)(config, model)
    for optimizer in optimizers:
        optimizer.state.clear()
    state.load(start, frozen=not adapters)


def _first(config: TrainConfig, model: LanguageModel) -> Source:
    """Adapters at their first values, and the buffers of the base, which no step has changed."""
    start = first_pieces(config, model)
    for name, each in buffers_of(model):
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().cpu().view(-1))
    return start


def _random(config: TrainConfig, model: LanguageModel) -> Source:
    start = Pieces()
    for name, each in shaped(new_model(config, model.config)).items():
        start.add(MODEL + name, tuple(each.shape), 0, each.detach().view(-1))
    return start
