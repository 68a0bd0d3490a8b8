"""A model trained with adapters, as a model without them: W + alpha / rank * B A replaces each W."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from imece.checkpoint.load import Saved, Source
from imece.checkpoint.state.base import digest_of
from imece.checkpoint.state.names import LEFT_OUT, MODEL
from imece.errors import UserError
from imece.models.language_model import LanguageConfig
from imece.models.matrices import matrices_of
from imece.train.config import LoraSection
from imece.train.model.adapters import ADAPTER_A, ADAPTER_B, is_quantised, live_name, quantised


@dataclass(frozen=True)
class Merged:
    """A checkpoint of adapters together with its base, which it identifies by digests; it is a `Source`.

    Everything is float32, each sum rounded once. A quantised base has the values that its codes stand for,
    with which the adapters were trained.
    """

    saved: Saved
    base: Source
    where: str
    """The base, as the user named it."""
    lora: LoraSection
    shape_of_base: LanguageConfig

    @property
    def folder(self) -> Path:
        """For messages."""
        return self.saved.folder

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. UserError if it cannot be read, or if the base has changed since."""
        if name in self._kept:  # a buffer
            return self.saved.tensor(name)
        own = name.removeprefix(MODEL)
        weight = self.base.tensor(name).float()
        read = weight
        if is_quantised(own, self.lora, self.shape_of_base):
            read, weight = quantised(weight, own, self.shape_of_base)
        live = live_name(own, self.lora, self.shape_of_base)
        if digest_of(read) != self._digest(live):
            raise UserError(
                f"{self.folder}: its adapters were trained beside another {own} than that of {self.where}, "
                "which has changed since: put the old model back"
            )
        module = live.removesuffix(".base_layer.weight")
        if module == live:
            return weight
        a, b = (self.saved.tensor(f"{MODEL}{module}{end}").double() for end in (ADAPTER_A, ADAPTER_B))
        # A product of two float32 is exact in float64.
        product = matrices_of(self.shape_of_base)[module].upright(b @ a)
        return product.mul_(self.lora.alpha_or_usual / self.lora.rank).add_(weight).float()

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flat tensor, on the CPU. UserError as from `tensor`."""
        return self.tensor(name).view(-1)[start:stop]

    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill all of `target` with the tensor's elements from `start` on. UserError as from `tensor`."""
        found = self.slice(name, start, start + target.numel())
        target.detach().copy_(found.view(target.shape))

    def _digest(self, live: str) -> str:
        """The digest of a parameter of the base when the adapters were trained; "" if it did not exist."""
        name = LEFT_OUT + live
        return bytes(self.saved.tensor(name).tolist()).hex() if name in self._kept else ""

    @cached_property
    def _kept(self) -> Collection[str]:
        return frozenset(self.saved.names())
