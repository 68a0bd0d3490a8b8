"""Optimizers that step inside of backward, as torch.distributed.optim applies them to parameters.

On one rank they step as soon as a gradient is written. Here that gradient is not the mean yet: their own
hooks are taken off, and they step when the reduced one has come. One that somebody's own hook on a parameter
makes step is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.reducing import refusals, sharing, task


def take_over(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those with such optimizers, which from now on step by `step` alone."""
    found = [each for each in parameters if hasattr(each, "_in_backward_optimizers")]
    if found:
        # Not at the top: torch.distributed.optim imports FSDP and sympy, which takes as long as torch itself.
        from torch.distributed.optim import apply_optimizer_in_backward as torch_side

        for each in found:
            for handle in torch_side.param_to_optim_hook_handle_map.get(each, []):
                handle.remove()
    return found


def refuse(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names one with such an optimizer: of a parameter that is sharded no gradient comes."""
    for name, parameter in named:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in backward (_apply_optimizer_in_backward), "
                f"and its gradient goes to ranks' parts: give imece.parallelize an optimizer in its place, "
                f"or take strategy='replicate'"
            )


@functools.cache
def refuse_early_steps() -> None:
    """From now on RuntimeError, in a step inside of a backward, for a parameter that is not reduced yet."""
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo(recursive=True)
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if task.current() == task.NO_TASK:
        return
    ids = {id(each) for each in parameters_of(optimizer)}
    for reducer in sharing.living():
        # A hook on buckets may step what it has reduced. Alone, a rank's gradient is the mean.
        if reducer.has_unsummed and reducer.leaving.hook is None and reducer.group.size() > 1:
            for slot in reducer.slots:
                if id(slot.parameter) in ids:
                    raise refusals.early(optimizer, slot)


def step(parameters: Iterable[torch.Tensor]) -> None:
    """One step of each optimizer of each parameter that has a gradient, which then goes, as torch does it."""
    for parameter in parameters:
        if parameter.grad is not None:
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None
