"""A step of whole parameters by a gradient that was not summed over the ranks: they drift apart."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.reducing.refusals import FROM_ONE_RANK

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


def warn_of_steps_alone(optimizer: Optimizer, model: DistributedDataParallel) -> None:
    """Warn once, at the first such step. It is no error: ranks may be meant to go their own ways for a while,
    or the script may have summed the gradients itself."""
    known = weakref.ref(model)

    @torch._disable_dynamo(recursive=True)
    def before_step(stepped: Optimizer, *_: Any) -> None:
        model = known()
        name = model.reducer.unsummed(parameters_of(stepped)) if model is not None else None
        if name is not None:
            handle.remove()
            warnings.warn(
                f"{type(stepped).__name__} steps {name} by a gradient of this rank alone, and the ranks "
                f"drift apart: it came {FROM_ONE_RANK}",
                stacklevel=2,
            )

    handle = optimizer.register_step_pre_hook(before_step)
