"""Checks the arguments of `imece.steps` before anything is done: a rank may die much later."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from imece.data_parallel.optimizer import optimizers_of
from imece.data_parallel.replicate import DistributedDataParallel
from imece.listing import kind_of, shown


def check_range(total: int, start: int) -> None:
    """TypeError unless both are whole numbers, ValueError for a negative one."""
    for name, value in (("total", total), ("start", start)):
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"imece.steps: {name}={shown(value)}: give a whole number") from None
        if value < 0:
            raise ValueError(f"imece.steps: {name}={value}: steps are counted from 0 on")


def check_model(model: Any, can_change: bool) -> None:
    """TypeError if it is no model, or was not wrapped though ranks can change."""
    if not isinstance(model, nn.Module):
        several = "; several are one nn.Module, wrapped once" if isinstance(model, list | tuple) else ""
        raise TypeError(
            f"imece.steps: {kind_of(model)} is no model: imece.steps(total, model, optimizer){several}"
        )
    if can_change and not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"imece.steps: {kind_of(model)} is not wrapped: model, optimizer = imece.parallelize(model, "
            "optimizer)"
        )


def check_optimizers(optimizer: Any) -> list[Optimizer]:
    """The one optimizer, or all of a list. TypeError for anything else, ValueError for an empty list."""
    optimizers = optimizers_of(optimizer, "imece.steps")
    if not optimizers:
        raise ValueError("imece.steps: there is no optimizer: give all that step the model")
    return optimizers


def check_also(also: Sequence[Any]) -> None:
    """TypeError unless it is a list of objects that have a state to carry."""
    if not isinstance(also, list | tuple):
        raise TypeError(f"imece.steps: also is {kind_of(also)}: give a list, also=[scheduler]")
    for at, each in enumerate(also):
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"imece.steps: also[{at}], {kind_of(each)}, has no state_dict and load_state_dict"
            )
