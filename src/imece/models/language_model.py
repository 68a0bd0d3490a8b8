"""The two kinds of language models that are trained: ours, and those of transformers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import swap_tensors

from imece.models.foreign import ForeignConfig, ForeignModel
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

LanguageConfig = TransformerConfig | ForeignConfig
LanguageModel = Transformer | ForeignModel


def outline(config: LanguageConfig) -> LanguageModel:
    """The model, its parameters on the meta device."""
    if isinstance(config, ForeignConfig):
        return ForeignModel(config)
    with torch.device("meta"):
        return Transformer(config)


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device | str) -> None:
    """Zeros on `device` for parameters on the meta device, which stay the same objects; all else moves
    there."""
    for parameter in list(model.parameters()):
        if parameter.is_meta:
            memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            swap_tensors(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
    model.to(device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to `device`, where parameters are still to get memory."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
