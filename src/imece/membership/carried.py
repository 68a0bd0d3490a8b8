"""The state of a step of `imece.steps` besides tensors, for ranks that are behind and ranks that join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from imece.data_parallel.grad_scaler import forget_stage
from imece.data_parallel.optimizer import numbers_of, set_numbers
from imece.membership.modes import Modes


class Stateful(Protocol):
    """Anything with a state of JSON, whose keys may also be numbers: a learning-rate scheduler, say."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Carried:
    """The optimizers' numbers, the states of other objects, and the model's modes as they were noted."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], also: Sequence[Stateful]) -> None:
        self.modes = Modes(model)
        self._optimizers, self._also = optimizers, also

    def state(self) -> dict[str, Any]:
        """All of it, for `take`."""
        return {
            "numbers": [numbers_of(each) for each in self._optimizers],
            "also": [each.state_dict() for each in self._also],
            "modes": self.modes.noted,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Take over the state of the rank that is furthest, as of the beginning of its step."""
        for optimizer, numbers in zip(self._optimizers, state["numbers"], strict=True):
            set_numbers(optimizer, numbers)
        for thing, found in zip(self._also, state["also"], strict=True):
            thing.load_state_dict(found)
            if isinstance(thing, torch.amp.GradScaler):
                forget_stage(thing)
        self.modes.restore(state["modes"])
