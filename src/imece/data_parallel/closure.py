"""An optimizer that decides by the loss of its closure must be told the same loss on all ranks.

LBFGS ends its iterations, and searches along a line, by what the closure returns. By losses of their own,
ranks would take steps of other lengths, and end after other numbers of backwards: they drift apart, or hang.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.same import by_rank, texts_that_differ
from imece.errors import MismatchError


def check_closures(optimizer: Optimizer, model: DistributedDataParallel) -> None:
    """From now on a closure of LBFGS that returns other losses on other ranks is a MismatchError on all."""
    if not isinstance(optimizer, LBFGS):
        return
    known, kind = weakref.ref(model), type(optimizer).__name__

    def checked(closure: Callable[[], Any]) -> Any:
        loss = closure()
        model = known()
        if model is None or model.process_group.size() == 1 or model._join_config.enable:
            return loss  # ranks that have ended answer no such call
        group, device = model.process_group, model.device
        if texts := texts_that_differ([f"{float(loss):.9g}"], group, device, f"loss of {kind}'s closure"):
            losses = by_rank({rank: text for rank, (text,) in texts.items()})
            raise MismatchError(
                f"the closure of {kind} returned {losses}, and {kind} decides by it, so the ranks would "
                f"drift apart. Return the mean over ranks: `mean = loss.detach().clone(); "
                f'imece.all_reduce(mean, "avg"); return mean`'
            )
        return loss

    @torch._disable_dynamo(recursive=True)
    def before_step(
        _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        optimizer, *rest = args  # what `step` was called with, itself first
        closure = rest[0] if rest else kwargs.get("closure")
        return ((optimizer, partial(checked, closure)), {}) if closure is not None else None  # torch says so

    optimizer.register_step_pre_hook(before_step)
