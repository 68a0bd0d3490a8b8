"""A step of whole parameters by a gradient that was not summed over the ranks: they drift apart."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.reducing.refusals import FROM_ONE_RANK
from imece.data_parallel.reducing.sharing import living

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


def warn_of_steps_alone(optimizer: Optimizer, model: DistributedDataParallel) -> None:
    """Warn once, at the first such step. It is no error: ranks may be meant to go their own ways for a while,
    or the script may have summed the gradients itself."""
    known, has_others = weakref.ref(model), model.reducer.group.size() > 1

    @torch._disable_dynamo(recursive=True)
    def before_step(stepped: Optimizer, *_: Any) -> None:
        model, kind = known(), type(stepped).__name__
        if model is None:
            handle.remove()
            if has_others and not _is_of_a_wrapped_model(stepped):
                warnings.warn(
                    f"{kind} steps by gradients of this rank alone, and the ranks drift apart: the model "
                    f"that parallelize returned with it, which sums them, is gone: keep it and call it",
                    stacklevel=2,
                )
        elif (name := model.reducer.unsummed(parameters_of(stepped))) is not None:
            handle.remove()
            warnings.warn(
                f"{kind} steps {name} by a gradient of this rank alone, and the ranks drift apart: it came "
                f"{FROM_ONE_RANK}",
                stacklevel=2,
            )

    handle = optimizer.register_step_pre_hook(before_step)


def _is_of_a_wrapped_model(optimizer: Optimizer) -> bool:
    stepped = {id(each) for each in parameters_of(optimizer)}
    return any(id(slot.parameter) in stepped for reducer in living() for slot in reducer.slots)
