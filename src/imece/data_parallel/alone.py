"""A step of whole parameters by a gradient that was not summed over the ranks: they drift apart."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from imece.data_parallel import script
from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.reducing.refusals import FROM_ONE_RANK
from imece.data_parallel.reducing.sharing import summed
from imece.data_parallel.replicate import DistributedDataParallel


def warn_of_steps_alone(optimizer: Optimizer, model: DistributedDataParallel) -> None:
    """Warn once, at the first such step. It is no error: ranks may be meant to go their own ways for a while,
    or the script may have summed the gradients itself."""
    known, has_others, said = weakref.ref(model), model.reducer.group.size() > 1, False

    @torch._disable_dynamo(recursive=True)
    def before_step(stepped: Optimizer, *_: Any) -> None:
        nonlocal said  # the hook stays: torch is going through the hooks when it is called
        model, kind = known(), type(stepped).__name__
        if said:
            return
        if model is None:
            said = True
            if has_others and summed().isdisjoint(map(id, parameters_of(stepped))):
                warnings.warn(
                    f"{kind} steps by gradients of this rank alone, and the ranks drift apart: the model "
                    f"that parallelize returned with it, which sums them, is gone: keep it and call it",
                    stacklevel=script.level(),
                )
        elif (name := model.reducer.unsummed(parameters_of(stepped))) is not None:
            said = True
            warnings.warn(
                f"{kind} steps {name} by a gradient of this rank alone, and the ranks drift apart unless the "
                f"script has summed it: it came {FROM_ONE_RANK}",
                stacklevel=script.level(),
            )

    optimizer.register_step_pre_hook(before_step)


def refuse_what_nobody_sums(optimizer: Optimizer, model: DistributedDataParallel) -> None:
    """From now on a step of a parameter that was added later, and is in no wrapped model, is a ValueError."""
    known, given = weakref.ref(model), {id(each) for each in parameters_of(optimizer)}

    @torch._disable_dynamo(recursive=True)
    def before_step(stepped: Optimizer, *_: Any) -> None:
        model = known()
        added = [each for each in parameters_of(stepped) if id(each) not in given and each.grad is not None]
        if not added or model is None:
            return
        names, in_models = {id(each): name for name, each in model.module.named_parameters()}, summed()
        for each in added:
            name = names.get(id(each), f"of shape {list(each.shape)}, none of the model's,")
            if id(each) not in in_models and name not in model.parameters_to_ignore:
                raise ValueError(
                    f"parameter {name} was given to {type(stepped).__name__} after parallelize, and nobody "
                    f"sums its gradient over the ranks, which would drift apart: put it into the model "
                    f"before parallelize, or wrap a model that has it"
                )
            given.add(id(each))

    optimizer.register_step_pre_hook(before_step)
