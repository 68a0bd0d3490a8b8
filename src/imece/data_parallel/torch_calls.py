"""torch's own functions on a sharded model's parameters, whose gradients lie in the ranks' parts.

    torch.nn.utils.clip_grad_norm_    the norm over all ranks, by torch's arithmetic
    torch.nn.utils.clip_grad_value_   this rank's parts
    torch.nn.utils.get_total_norm     of parts' gradients: the norm over all ranks
    step of another optimizer         of one that `parallelize` was not given: refused, unless it wraps one
                                      that was given and shares its groups (SAM, Lookahead): then that one
                                      acts

A sharded parameter's own `.grad` is None, so torch's functions would silently do nothing. In an optimizer's
groups they would find this rank's parts, and take the parts' norm for that of all. The same holds for a
rank's part of a model divided along tensor or pipeline: the norm must be over all parts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.other_models import wrapped
from imece.data_parallel.reducing.buckets import Slot
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.parts import Part
from imece.data_parallel.sharding.stepped import SteppedParts

_left = WeakTensorKeyDictionary()  # parameters in shared memory whose model is gone
_SEVERAL = "these are of several models, one of them sharded or divided: call it for each model"
_torchs: dict[Callable[..., Any], Callable[..., Any]] = {}  # by the function that runs in its place


def watch(model: ShardedDataParallel) -> None:
    """From now on torch's functions take this model's parameters too."""
    if model.sharding.common_parameters:
        left = weakref.finalize(model, _leave, [weakref.ref(slot.parameter) for slot in model.reducer.slots])
        left.atexit = False
    install()


def _sharded_models() -> list[ShardedDataParallel]:
    """Without those between leave() and regroup()."""
    models = (each for each in wrapped() if isinstance(each, ShardedDataParallel))
    return [each for each in models if each.sharding is not None]


def _divided_models() -> list[DistributedDataParallel]:
    """Replicated models whose other parts are on other ranks."""
    models = (each for each in wrapped() if isinstance(each, DistributedDataParallel))
    return [each for each in models if each.sharding is None and each.across is not None]


def _leave(parameters: Iterable[weakref.ref[torch.Tensor]]) -> None:
    for known in parameters:
        if (parameter := known()) is not None:
            _left[parameter] = True


@functools.cache
def install() -> None:
    """From now on torch's functions take the parameters of sharded and divided models too."""
    instead: Sequence[tuple[Any, Callable[..., Any]]] = (
        (clip_grad.clip_grad_norm_, clip_grad_norm_),
        (clip_grad.clip_grad_value_, clip_grad_value_),
        (clip_grad._get_total_norm, get_total_norm),
        (clip_grad._clip_grads_with_norm_, clip_grads_with_norm_),
    )
    for public, ours in instead:
        # The public function turns gradients off and calls what is in its closure. Replacing the public one
        # would miss whoever has imported it by name.
        inside = next(each for each in public.__closure__ if each.cell_contents is public.__wrapped__)
        _torchs[ours], inside.cell_contents = inside.cell_contents, ours
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch._disable_dynamo(recursive=True)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch's. For parameters of a sharded or divided model, or the contents of its optimizers' groups, all
    ranks call this.

    The norm is over what all ranks give. ValueError if norm_type is not above 0.
    """
    given = _list(parameters)
    model, only = _the_model(given)
    if model is not None:
        norm = _norm(model, only, norm_type, error_if_nonfinite)
        factor = float(max_norm / (norm + 1e-6))  # as torch's, also if the norm is not finite
        if not factor >= 1:
            model.scale_gradients(factor, only)
        return norm
    if all(each.grad is None for each in given):
        return torch.tensor(0.0)  # as torch's, for no gradients at all
    found: torch.Tensor = _torchs[clip_grad_norm_](given, max_norm, norm_type, error_if_nonfinite, foreach)
    return found


@torch._disable_dynamo(recursive=True)
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """torch's. For a sharded model's parameters each rank calls it for its parts."""
    given = _list(parameters)
    for model, slots, _ in _sharded(given):
        whole, indices = {id(slot.parameter) for slot in slots}, {slot.index for slot in slots}
        given = [each for each in given if id(each) not in whole]
        given += [part.parameter for part in model.sharding.parts if part.index in indices]
    if any(each.grad is not None for each in given):
        _torchs[clip_grad_value_](given, clip_value, foreach)


@torch._disable_dynamo(recursive=True)
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch's. For gradients of parts all ranks call this: the norm is over what all ranks give.

    ValueError if norm_type is not above 0.
    """
    given = _list(tensors)
    held: list[torch.Tensor] = [part.parameter for each in _sharded_models() for part in each.parts]
    held += [slot.parameter for each in _divided_models() for slot in _whole_slots_of(each)]
    parts = {id(each.grad): each for each in held if each.grad is not None}
    if all(id(each) in parts for each in given):
        of, only = _the_model([parts[id(each)] for each in given])
        if of is not None:
            return _norm(of, only, norm_type, error_if_nonfinite)
    elif any(id(each) in parts for each in given):
        raise ValueError(_SEVERAL)
    found: torch.Tensor = _torchs[get_total_norm](given, norm_type, error_if_nonfinite, foreach)
    return found


@torch._disable_dynamo(recursive=True)
def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    """torch's. RuntimeError for whole parameters of a sharded model: the norm may be of their own `.grad`."""
    given = _list(parameters)
    if any(slots for _, slots, _ in _sharded(given)):
        raise RuntimeError(
            "these are parameters of a sharded model, whose gradients lie in ranks' parts: clip them by "
            "model.clip_grad_norm_(max_norm), or by torch.nn.utils.clip_grad_norm_"
        )
    _torchs[clip_grads_with_norm_](given, *args, **kwargs)


def _list(given: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _norm(
    model: DistributedDataParallel, only: set[int] | None, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """The norm over all ranks. ValueError, RuntimeError: as torch's functions."""
    norm = model.gradient_norm(only, float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradient is {norm}, on all ranks")
    return norm


@torch._disable_dynamo(recursive=True)
def _before_step(optimizer: Optimizer, *args: Any) -> None:
    if SteppedParts.of(optimizer) is not None:
        return
    given = parameters_of(optimizer)
    for stepped in _steppers_of(given):
        stepped.before(optimizer)
    for slot in (each for _, slots, _ in _sharded(given) for each in slots):
        raise RuntimeError(
            f"{type(optimizer).__name__} has parameters of a sharded model, {slot.name} among "
            f"them, whose gradients lie in ranks' parts, and would step none: give it to imece.parallelize, "
            f"made before, or as a function that makes it"
        )
    for parameter in given if _left else ():
        if _left.pop(parameter, False):  # or each rank would step the parameter that all of them share
            parameter.data = parameter.data.clone()


@torch._disable_dynamo(recursive=True)
def _after_step(optimizer: Optimizer, *args: Any) -> None:
    if SteppedParts.of(optimizer) is None:
        for stepped in _steppers_of(parameters_of(optimizer)):
            stepped.after(optimizer)


def _the_model(given: list[torch.Tensor]) -> tuple[DistributedDataParallel | None, set[int] | None]:
    """The sharded or divided model of these parameters or parts, if any, and their numbers in it.

    None in place of numbers: all of them. Frozen parameters may be among them. ValueError if they are of
    several models, one of them sharded, or of no model that can be told.
    """
    found = _sharded(given)
    if not found:
        return _the_divided(given) or (_of_others(given), set())
    model, slots, parts = found[0]
    known = {id(slot.parameter) for slot in slots} | {id(part.parameter) for part in parts}
    others = {id(each) for each in given if each.grad is not None} - known
    if len(found) > 1 or others:
        raise _several(model, others)
    if len(slots) == len(model.sharding.slots):
        return model, None
    return model, {slot.index for slot in slots} | {part.index for part in parts}


def _several(model: DistributedDataParallel, others: set[int]) -> ValueError:
    """others: ids of what was given along with parameters of this model."""
    for name, each in model.module.named_parameters():
        if id(each) in others and _ignores(model, name):
            return ValueError(
                f"parameter {name} is among those that the model ignores, so its gradient is this rank's own "
                f"and no part of the model's norm: clip it in a call of its own"
            )
    return ValueError(_SEVERAL)


def _ignores(model: DistributedDataParallel, name: str) -> bool:
    """Whether each rank has its own gradient of this parameter."""
    return name in model.parameters_to_ignore


def _the_divided(given: list[torch.Tensor]) -> tuple[DistributedDataParallel, set[int]] | None:
    """The replicated model that has these parameters, and their numbers. ValueError if there are several."""
    ids = {id(each) for each in given if each.grad is not None}
    for model in _divided_models():
        numbers = {id(slot.parameter): slot.index for slot in _whole_slots_of(model)}
        if ids & numbers.keys():
            if ids - numbers.keys():
                raise _several(model, ids - numbers.keys())
            return model, {numbers[each] for each in ids}
    return None


def _of_others(given: list[torch.Tensor]) -> ShardedDataParallel | None:
    """The sharded model that is meant if this rank has no parts of it, but other ranks may.

    given: nothing, or what is frozen in it. ValueError if there are several.
    """
    ids = {id(each) for each in given}
    models = [
        model
        for model in _sharded_models()
        if model.sharding.size > 1
        if ids <= {id(each) for name, each in model.module.named_parameters() if not _ignores(model, name)}
    ]
    if len(models) > 1:
        raise ValueError(
            "this rank has no part of what is to be clipped, and there are several sharded models: call "
            "model.clip_grad_norm_ of the one that is meant, or give its parameters"
        )
    return models[0] if models else None


def _sharded(given: Sequence[torch.Tensor]) -> list[tuple[ShardedDataParallel, list[Slot], list[Part]]]:
    """Each sharded model with some of these, and which of its slots and parts they are."""
    ids = {id(each) for each in given}
    found = [
        (
            model,
            [slot for slot in model.sharding.slots if id(slot.parameter) in ids],
            [part for part in model.sharding.parts if id(part.parameter) in ids],
        )
        for model in _sharded_models()
    ]
    return [each for each in found if each[1] or each[2]]


def _steppers_of(given: Sequence[torch.Tensor]) -> list[SteppedParts]:
    """The SteppedParts that step some of these parts."""
    ids = {id(each) for each in given}
    steppers = (stepped for model in _sharded_models() for stepped in model.stepped)
    return [each for each in steppers if not ids.isdisjoint(each.ids_of_parts)]


def _whole_slots_of(model: DistributedDataParallel) -> list[Slot]:
    reducer = vars(model).get("reducer")  # there is none between leave() and regroup()
    return reducer.slots if reducer is not None else []
