"""Questions about any torch optimizer: what it steps, whether its matrices may be cut, and which of its
numbers schedulers change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from imece.listing import kind_of

Number = float | tuple[float, ...]  # an int too

_ELEMENT_WISE = frozenset([
    "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "AdamW8bit", "Adam8bit", "PagedAdamW", "PagedAdamW8bit",
    "AdamWFp8", "AdamW4bit", "ASGD", "Lion", "Lion8bit", "NAdam", "RAdam", "RMSprop", "RMSprop8bit", "Rprop",
    "SGD", "SGD8bit",
])  # fmt: skip
_NEVER = {
    "LBFGS": "it searches along one direction of all parameters together",
    "PostLocalSGDOptimizer": "it averages over ranks what it steps, and each rank steps other parts",
    "SparseAdam": "it takes sparse gradients only",
    "ZeroRedundancyOptimizer": "it divides among ranks itself, as 'zero1' does with the optimizer in it",
}
_BY_PARAMETER = ("params", "param_names")  # lists in groups that are cut as the parameters are dealt out


def optimizers_of(given: Any, who: str) -> list[Optimizer]:
    """The one optimizer, or all of several. TypeError, in the name of `who`, for anything else."""
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(f"{who}: {kind_of(each)} is no optimizer: give one, or a list of them")
    return optimizers


def is_element_wise(optimizer: Optimizer) -> bool:
    """The same as `may_be_cut`. ValueError for optimizers that cannot be sharded."""
    refuse_of_all(optimizer, "be sharded", "strategy='replicate' or another optimizer")
    name = type(optimizer).__name__
    for at, group in enumerate(optimizer.param_groups if not _is_known(optimizer) else ()):
        many = len(group["params"])
        for key, value in group.items():
            # A list of two numbers could be the betas of one parameter or one beta for each of
            # two parameters.
            if key not in _BY_PARAMETER and isinstance(value, list) and len(value) == many > 1:
                raise ValueError(
                    f"{name} has in group {at} a list {key!r} of {many} for {many} parameters, and a rank "
                    f"steps some of these: if it is one for each, make each parameter a group of its own; if "
                    f"not, make it a tuple"
                )
    return may_be_cut(optimizer)


def refuse_of_all(optimizer: Optimizer, what: str, instead: str) -> None:
    """ValueError for an optimizer that has to step all parameters of a model together. what: that it cannot
    do, in words; instead: what the user may take."""
    name = type(optimizer).__name__
    for kind in (each.__name__ for each in type(optimizer).__mro__):
        if kind in _NEVER:
            raise ValueError(f"{name} cannot {what}: {_NEVER[kind]}; use {instead}")
    for group in optimizer.param_groups if not _is_known(optimizer) else ():
        if norm := group.get("max_grad_norm"):  # the name for it in LAMB, as timm and apex have it
            raise ValueError(
                f"{name} clips by the norm of all that it steps (max_grad_norm={norm}), and a rank steps "
                f"some of it: make it with max_grad_norm=None, or 0 if it knows no None, and clip before "
                f"each step, by torch.nn.utils.clip_grad_norm_(model.parameters(), {norm}); or use {instead}"
            )


def may_be_cut(optimizer: Optimizer) -> bool:
    """Whether matrices may be cut for it. False for an unknown optimizer: whole matrices are always right.

    An optimizer can say so itself with an attribute `element_wise`.
    """
    name = type(optimizer).__name__
    said = getattr(optimizer, "element_wise", None)
    return bool(said) if said is not None else _is_known(optimizer) and name in _ELEMENT_WISE


def _is_known(optimizer: Optimizer) -> bool:
    """Whether it comes from a library whose optimizers are known here."""
    return type(optimizer).__module__.startswith(("torch.", "torchao.", "bitsandbytes."))


def complete(optimizer: Optimizer) -> None:
    """Set up what `Optimizer.__init__` would, so that steps run hooks: an optimizer around another, such as a
    Lookahead, may take over its groups and never call that, or set up a part of it.
    """
    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # those of steps some have
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that it steps, in the order of its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def kinds_of(
    named: Sequence[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer], model: nn.Module
) -> list[int]:
    """The number of the optimizer of each parameter in `named`; -1 if none steps it. ValueError as for
    `stepped_by`."""
    number = stepped_by(optimizers, model)
    return [number.get(id(each), -1) for _, each in named]


def stepped_by(optimizers: Sequence[Optimizer], model: nn.Module) -> dict[int, int]:
    """The number of the optimizer of each parameter that one steps, by the parameter's id.

    ValueError for a parameter that two optimizers step, for one that is not the model's, and for an optimizer
    that steps parts already.
    """
    names = {id(each): name for name, each in model.named_parameters()}
    number: dict[int, int] = {}
    for at, optimizer in enumerate(optimizers):
        stepped = getattr(optimizer, "_imece_stepped", None)  # see SteppedParts
        if stepped is not None and stepped.is_divided:  # on a rank without a part its groups may be empty
            raise ValueError(
                f"this {type(optimizer).__name__} was given to parallelize before, and steps parts of that "
                f"model: make a new optimizer of the parameters of this one"
            )
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)} that is "
                    f"none of the model's: make it of the parameters of the model that is given with it. If "
                    f"another module has that one, as a loss may, put both into one module, or wrap that one "
                    f"too, with an optimizer of its own"
                )
            if number.setdefault(id(parameter), at) != at:
                raise ValueError(f"two optimizers step {names[id(parameter)]}: each parameter belongs to one")
    return number


def who_steps(named: Sequence[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer]) -> list[str]:
    """The optimizer and group of each parameter, for ranks to compare."""
    said = {
        id(each): f"{type(optimizer).__name__} {number}, group {at}"
        for number, optimizer in enumerate(optimizers)
        for at, group in enumerate(optimizer.param_groups)
        for each in group["params"]
    }
    return [f"{name}: {said.get(id(each), 'no optimizer')}" for name, each in named]


def rates_of(optimizers: Iterable[Optimizer]) -> list[float]:
    """The learning rate of each group, in order; without those on a GPU, which the host would wait for."""
    groups = (group for each in optimizers for group in each.param_groups)
    rates = (group["lr"] for group in groups if _is_number(group.get("lr")))
    return [float(rate) for rate in rates if not isinstance(rate, torch.Tensor) or rate.is_cpu]


def numbers_of(optimizer: Optimizer) -> list[float]:
    """The numbers that schedulers may change, of all groups: learning rates, momenta, betas."""
    return [
        float(each)
        for group in optimizer.param_groups
        for value in numbers_by_key(group).values()
        for each in (value if isinstance(value, tuple) else (value,))
    ]


def set_numbers(optimizer: Optimizer, numbers: Iterable[float]) -> None:
    """The inverse of `numbers_of`."""
    following = iter(numbers)
    for group in optimizer.param_groups:
        for key, value in numbers_by_key(group).items():
            many = tuple(next(following) for _ in value) if isinstance(value, tuple) else None
            set_number(group, key, next(following) if many is None else many)


def numbers_by_key(group: Mapping[str, Any]) -> dict[str, Number]:
    """The numbers of one group, including those in tensors and in tuples."""
    found: dict[str, Number] = {}
    for key, value in group.items():
        values = value if isinstance(value, tuple) else (value,)
        if all(map(_is_number, values)):
            numbers = tuple(each.item() if isinstance(each, torch.Tensor) else each for each in values)
            found[key] = numbers if isinstance(value, tuple) else numbers[0]
    return found


def set_number(group: dict[str, Any], key: str, new: Number) -> None:
    """Set one number of a group, whether or not it has one by that key."""
    group[key] = _in_place_of(group.get(key), new)


def _in_place_of(old: Any, new: Any) -> Any:
    """`new` in the type of `old`. A tensor stays the same object, and an int an int: it may
    count iterations."""
    if isinstance(new, tuple):
        olds = old if isinstance(old, tuple) and len(old) == len(new) else new
        return tuple(map(_in_place_of, olds, new))
    if isinstance(old, torch.Tensor):
        return old.fill_(new)
    return int(new) if isinstance(old, int) and float(new).is_integer() else new


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, float | int) and not isinstance(value, bool)
