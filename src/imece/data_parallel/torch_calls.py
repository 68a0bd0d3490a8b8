"""What torch does with a model's parameters, where the model is sharded and gradients lie in ranks' parts.

    torch.nn.utils.clip_grad_norm_    the norm over all ranks, as `model.clip_grad_norm_`
    torch.nn.utils.clip_grad_value_   this rank's parts
    an optimizer that `parallelize` was not given    is refused in its step, unless it is inside of one that
                                                     was and shares its groups (SAM, Lookahead): that is asked

A parameter's own `.grad` is None there, so torch's functions would find nothing to do, and say nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from imece.data_parallel.stepped import SteppedParts

if TYPE_CHECKING:
    from imece.data_parallel.buckets import Slot
    from imece.data_parallel.sharded import ShardedDataParallel

_models: weakref.WeakSet[ShardedDataParallel] = weakref.WeakSet()
_left = WeakTensorKeyDictionary()  # parameters in memory that ranks have in common, whose model is gone
_clip_norm, _clip_value = utils.clip_grad_norm_, utils.clip_grad_value_
_shorten = clip_grad._clip_grads_with_norm_


def watch(model: ShardedDataParallel) -> None:
    """From now on, for as long as the model is there, or until the same module is made another one."""
    for before in [each for each in _models if each.module is model.module]:
        _models.remove(before)
    _models.add(model)
    if model.sharding.common_parameters:
        left = weakref.finalize(model, _leave, [weakref.ref(slot.parameter) for slot in model.reducer.slots])
        left.atexit = False
    _install()


def _leave(parameters: Iterable[weakref.ref[torch.Tensor]]) -> None:
    for known in parameters:
        if (parameter := known()) is not None:
            _left[parameter] = True


def refuse_shared(module: nn.Module, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names a parameter which another module's sharded model has.

    named: of this module. A model of the same module is to be replaced by its next one.
    """
    others = {id(slot.parameter) for each in _models if each.module is not module for slot in _slots_of(each)}
    for name, parameter in named:
        if id(parameter) in others:
            raise ValueError(
                f"parameter {name} is of another sharded model too: make one module that has both and give "
                f"that to imece.parallelize, or drop the other model before"
            )


@functools.cache
def _install() -> None:
    utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = clip_grad_norm_
    utils.clip_grad_value_ = clip_grad.clip_grad_value_ = clip_grad_value_
    utils.clip_grads_with_norm_ = _refuse_parts
    clip_grad._clip_grads_with_norm_ = _refuse_parts  # whoever has imported torch's own by name ends here
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@functools.wraps(_clip_norm)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch's. Of a sharded model's parameters all ranks call it; ValueError for a norm that is no 2-norm."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model, slots = _the_model(given)
    if model is None:
        return _clip_norm(given, max_norm, norm_type, error_if_nonfinite, foreach)
    if float(norm_type) != 2.0:
        raise ValueError(f"clip_grad_norm_(norm_type={norm_type}) of a sharded model: it has the 2-norm only")
    only = None if len(slots) == len(model.reducer.slots) else {slot.index for slot in slots}
    norm = model.gradient_norm(only)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradient is {norm}, on all ranks")
    model.shorten(norm, max_norm, only)
    return norm


@functools.wraps(_clip_value)
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """torch's. Of a sharded model's parameters each rank calls it for its parts."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model, slots = _the_model(given)
    if model is not None:
        indices = {slot.index for slot in slots}
        given = [part.parameter for part in model.sharding.parts if part.index in indices]
    if any(each.grad is not None for each in given):
        _clip_value(given, clip_value, foreach)


def _refuse_parts(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if _sharded(given):
        raise RuntimeError(
            "these are parameters of a sharded model, whose gradients lie in ranks' parts: clip them by "
            "model.clip_grad_norm_(max_norm), or as torch.nn.utils.clip_grad_norm_(...) by its full name"
        )
    _shorten(given, *args, **kwargs)


def _before_step(optimizer: Optimizer, *args: Any) -> None:
    if SteppedParts.of(optimizer) is not None:
        return
    given = [each for group in optimizer.param_groups for each in group["params"]]
    for stepped in _steppers_of(given):
        stepped.before(optimizer)
    for _, slots in _sharded(given):
        raise RuntimeError(
            f"{type(optimizer).__name__} has parameters of a sharded model, {slots[0].name} among "
            f"them, whose gradients lie in ranks' parts, and would step none: give it to imece.parallelize, "
            f"made before, or as a function that makes it"
        )
    for parameter in given if _left else ():
        if _left.pop(parameter, False):  # or each rank would step what all of them have
            parameter.data = parameter.data.clone()


def _after_step(optimizer: Optimizer, *args: Any) -> None:
    if SteppedParts.of(optimizer) is None:
        for stepped in _steppers_of([each for group in optimizer.param_groups for each in group["params"]]):
            stepped.after(optimizer)


def _the_model(given: list[torch.Tensor]) -> tuple[ShardedDataParallel | None, list[Slot]]:
    """The sharded model of these parameters, if they are of one, and their slots in it: it may have frozen
    ones too.

    ValueError: they are of several models, and one of them is sharded.
    """
    found = _sharded(given)
    if not found:
        return None, []
    model, slots = found[0]
    known = {id(slot.parameter) for slot in slots}
    if len(found) > 1 or any(each.grad is not None for each in given if id(each) not in known):
        raise ValueError(
            "these parameters are of several models, one of them sharded: call it for each model"
        )
    return model, slots


def _sharded(given: list[torch.Tensor]) -> list[tuple[ShardedDataParallel, list[Slot]]]:
    """Each sharded model that has some of these parameters, with their slots in it."""
    ids = {id(each) for each in given}
    found = [(model, [slot for slot in _slots_of(model) if id(slot.parameter) in ids]) for model in _models]
    return [(model, slots) for model, slots in found if slots]


def _steppers_of(given: list[torch.Tensor]) -> list[SteppedParts]:
    """Those that step some of these, which are parts of sharded models."""
    ids = {id(each) for each in given}
    return [each for model in _models for each in model.stepped if not ids.isdisjoint(each.ids_of_parts)]


def _slots_of(model: ShardedDataParallel) -> list[Slot]:
    sharding = vars(model).get("sharding")  # there is none between leave() and regroup()
    return sharding.slots if sharding is not None else []
