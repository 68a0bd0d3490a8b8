"""The matrices of a language model: its linear layers, but for the head. Adapters stand beside these."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from imece.models.foreign import ForeignModel
from imece.models.language_model import LanguageConfig, outline


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer."""

    rows: int  # channels that it makes
    columns: int  # channels that it reads
    lies: bool  # stored as [columns, rows], as GPT-2's are (transformers' Conv1D)

    def upright(self, weight: Tensor) -> Tensor:
        """[rows, columns] of the weight as it is stored; applied once more, as it is stored."""
        return weight.T.contiguous() if self.lies else weight


@functools.lru_cache(maxsize=4)
def matrices_of(config: LanguageConfig) -> Mapping[str, Matrix]:
    """The matrices by their modules' names in the model, in its order."""
    model = outline(config)
    lying: tuple[type[nn.Module], ...] = ()
    head: nn.Module | None = getattr(model, "head", None)
    if isinstance(model, ForeignModel):
        from transformers.pytorch_utils import Conv1D

        head, lying = model.inner.get_output_embeddings(), (Conv1D,)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, *lying)
    found = dict[str, Matrix]()
    for name, module in model.named_modules():
        if module is not head and isinstance(module, kinds):
            lies, (first, second) = isinstance(module, lying), module.get_parameter("weight").shape
            found[name] = Matrix(second, first, lies) if lies else Matrix(first, second, lies)
    return MappingProxyType(found)
