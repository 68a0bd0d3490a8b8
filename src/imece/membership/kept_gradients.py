"""Gradients that a step keeps for the next one are lost when ranks change; rank 0 warns of
that beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from imece.data_parallel.optimizer import parameters_of
from imece.saying import say


class KeptGradients:
    """Looks at each step's end whether it has kept its gradients for a later update."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._updates = 0
        self._said = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._count)

    def look(self, step: int, rank: int) -> bool:
        """The block of `step` is over. Warns once, with one line on rank 0. Returns whether it has made an
        update."""
        updates, self._updates = self._updates, 0
        if updates or self._said or rank != 0:
            return updates > 0
        # A sharded model's gradients are in the optimizers' groups, and after `no_sync` the parameters' own.
        held = chain(self._model.parameters(), *map(parameters_of, self._optimizers))
        if any(each.grad is not None for each in held):
            self._said = True
            say(
                f"step {step} has kept its gradients and made no update: they are lost when a rank dies or "
                "joins; to accumulate them, do all of it inside of one `with step:`"
            )
        return False

    def _count(self, *_: Any) -> None:
        self._updates += 1
