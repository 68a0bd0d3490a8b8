"""torch's GradScaler for optimizers that step a part on each rank: if one rank finds an Inf, all
ranks know."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from imece.data_parallel.across import AcrossModel
from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.sharding.stepped import SteppedParts


def forget_stage(scaler: torch.amp.GradScaler) -> None:
    """Forget a step that was under way and will be made again: otherwise torch takes it for
    unscaled already."""
    scaler._per_optimizer_states.clear()


class GradScaler(torch.amp.GradScaler):
    """As torch's, for every strategy: all ranks step or none does, and all have the same scale.

    A rank of a model that is sharded, or divided along tensor or pipeline, sees only parts of the gradient or
    none: `unscale_`, or `step` without it, asks the others, so all ranks call it. Of other models each rank
    has the whole gradient and asks nobody.

    RuntimeError inside of `join` if the model is sharded. Complex gradients are scaled too, which torch's
    refuses.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        """device: the kind of device the loss is on; None is "cuda" if there is one, else "cpu". The other
        arguments are torch's."""
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        device = found_inf.device  # the loss's: the group may not reach offloaded gradients
        if device.type != "cpu" and _on_cpu(optimizer):
            # torch's own copies do not block: the CPU would read them before they have arrived.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(_in_pairs(optimizer), inv_scale, found_inf, allow_fp16)
        stepped, across = SteppedParts.of(optimizer), AcrossModel.of(optimizer)
        if stepped is None and across is None:
            return found
        flag = torch.stack([found_inf.to(device), *(each.to(device) for each in found.values())]).amax()
        if stepped is not None:
            stepped.ask_all(flag)
        if across is not None:
            across.ask_all(flag)
        return {device: flag}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's."""
        stepped = SteppedParts.of(optimizer)
        with contextlib.ExitStack() as inside:
            if stepped is not None:
                inside.enter_context(stepped.by_asking())
            if _on_cpu(optimizer):
                inside.callback(optimizer.register_step_pre_hook(_bring_to_cpu).remove)
            return super().step(optimizer, *args, **kwargs)


def _in_pairs(optimizer: Optimizer) -> Any:
    """What torch's scaler takes for an optimizer: with pairs of real gradients in place of complex ones."""
    if not any(each.grad is not None and each.grad.is_complex() for each in parameters_of(optimizer)):
        return optimizer
    return SimpleNamespace(param_groups=[{"params": [*map(_in_pair, parameters_of(optimizer))]}])


def _in_pair(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None or not parameter.grad.is_complex():
        return parameter
    pair = torch.view_as_real(parameter.detach())
    pair.grad = torch.view_as_real(parameter.grad)
    return pair


def _bring_to_cpu(optimizer: Optimizer, *_: Any) -> None:
    """Copy what a fused step reads to the CPU: torch's own copies do not block, and the CPU would read them
    too early."""
    for name in ("grad_scale", "found_inf"):
        told = getattr(optimizer, name, None)
        if told is not None:
            setattr(optimizer, name, told.cpu())


def _on_cpu(optimizer: Optimizer) -> bool:
    return any(each.grad is not None and each.grad.is_cpu for each in parameters_of(optimizer))
