"""Optimizers that step inside of backward, as torch.distributed.optim applies them to parameters.

On one rank they step as soon as a gradient is written. Here that gradient is not the mean yet. So their hooks
are taken off, and they step when the reduced gradient has come. An optimizer that a user's own hook on a
parameter steps is refused.
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
    """The parameters with such optimizers; from now on only `step` steps these."""
    found = [each for each in parameters if hasattr(each, "_in_backward_optimizers")]
    if found:
        # Not imported at the top: torch.distributed.optim imports FSDP and sympy, which takes as long as
        # torch itself.
        from torch.distributed.optim import apply_optimizer_in_backward as torch_side

        for each in found:
            for handle in torch_side.param_to_optim_hook_handle_map.get(each, []):
                handle.remove()
    return found


def refuse(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names a parameter with such an optimizer: a sharded parameter gets no gradient."""
    for name, parameter in named:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in backward (_apply_optimizer_in_backward), "
                f"and its gradient goes to ranks' parts: give imece.parallelize an optimizer in its place, "
                f"or take strategy='replicate'"
            )


@functools.cache
def refuse_early_steps() -> None:
    """From now on a step inside of a backward raises RuntimeError for a parameter that is not reduced yet."""
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo(recursive=True)
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not task.is_running():
        return
    ids = {id(each) for each in parameters_of(optimizer)}
    for reducer in sharing.living():
        # A hook on buckets may step what it has reduced. With one rank the gradient is the mean.
        if reducer.has_unsummed and reducer.leaving.hook is None and reducer.group.size() > 1:
            for slot in reducer.slots:
                if id(slot.parameter) in ids:
                    raise refusals.early(optimizer, slot)


def step(parameters: Iterable[torch.Tensor]) -> None:
    """Step each optimizer of each parameter that has a gradient, then set the gradient to None, as
    torch does."""
    for parameter in parameters:
        if parameter.grad is not None:
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None
