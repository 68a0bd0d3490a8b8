"""What an abandoned step has done already, if every rank holds everything: it must not be done twice.

A step may change more than its last update does: its forward moves buffers (running means), and it may make
several updates (a GAN's two networks). When it is made again, buffers are set back, and updates that were
made are skipped. So within one step, a rank that has made more updates is further than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imece.data_parallel.optimizer import parameters_of


class Block:
    """The step under way."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """model: whose buffers are part of the state. An update that computes gradients itself, in a closure,
        is made again."""
        # Numbered by optimizer: one may skip an update, as when a scaler finds gradients that are not finite.
        self._number = {optimizer: at for at, optimizer in enumerate(optimizers)}
        self._aside: dict[Optimizer, list[tuple[Tensor, Tensor | None]]] = {}
        # Where buffers are, so that the model is walked only once: a forward may put another tensor there.
        self._holders = [
            (module._buffers, name)
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
        self.begin()

    def begin(self, updates: Sequence[int] | None = None) -> None:
        """A step begins, or begins again after so many updates of each optimizer."""
        self.updates = [0] * len(self._number) if updates is None else list(updates)
        """The updates of this rank since the step began, by optimizer."""
        self._calls = [0] * len(self._number)
        self._buffers = [holder[name] for holder, name in self._holders]
        with torch.no_grad():
            self._noted = [None if each is None else each.clone() for each in self._buffers]

    def take_back(self) -> None:
        """Set buffers back to their values at the beginning of the step."""
        with torch.no_grad():
            for (holder, name), buffer, noted in zip(self._holders, self._buffers, self._noted, strict=True):
                holder[name] = buffer
                if buffer is not None and noted is not None:
                    buffer.copy_(noted)
        self._aside.clear()  # they belong to the old ranks

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Set gradients aside: without any, an optimizer does nothing."""
        at = self._number[optimizer]
        if self._calls[at] < self.updates[at]:
            self._aside[optimizer] = [(each, each.grad) for each in parameters_of(optimizer)]
            for parameter, _grad in self._aside[optimizer]:
                parameter.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter, grad in self._aside.pop(optimizer, []):
            parameter.grad = grad
        at = self._number[optimizer]
        self._calls[at] += 1
        self.updates[at] = max(self.updates[at], self._calls[at])
