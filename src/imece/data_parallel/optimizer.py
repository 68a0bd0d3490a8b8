"""Any torch optimizer on the parts that a rank owns.

The user's own optimizer goes on: its groups, hooks and schedulers stay, only what lies in its groups changes,
from parameters to this rank's parts of them. So its state is 1/N. An optimizer whose update of an element
looks at that element alone may have matrices cut anywhere; one that looks at whole matrices gets whole ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from imece.data_parallel.block_wise import followed
from imece.data_parallel.parts import Part
from imece.data_parallel.shard import Sharding

_ELEMENT_WISE = frozenset(
    [
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "AdamW8bit",
        "Adam8bit",
        "PagedAdamW",
        "PagedAdamW8bit",
        "AdamWFp8",
        "AdamW4bit",
        "ASGD",
        "Lion",
        "Lion8bit",
        "NAdam",
        "RAdam",
        "RMSprop",
        "RMSprop8bit",
        "Rprop",
        "SGD",
        "SGD8bit",
    ]
)
_NEVER = {
    "LBFGS": "it searches along one direction of all parameters together",
    "SparseAdam": "it takes sparse gradients only",
}


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether matrices may be cut for it. Of an optimizer that nobody knows: no, which is always right.

    An optimizer says it itself with an attribute `element_wise`. ValueError for those that cannot be sharded.
    """
    name = type(optimizer).__name__
    if name in _NEVER:
        raise ValueError(
            f"{name} cannot be sharded: {_NEVER[name]}; use strategy='replicate' or another optimizer"
        )
    said = getattr(optimizer, "element_wise", None)
    known = type(optimizer).__module__.startswith(("torch.", "torchao.", "bitsandbytes."))
    return bool(said) if said is not None else known and name in _ELEMENT_WISE


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that it steps, in the order of its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def kinds_of(
    named: Sequence[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer], model: nn.Module
) -> list[int]:
    """Of each of the model's parameters in `named` the number of its optimizer, -1 for those that none steps.

    ValueError for a parameter that two of them step, or one that is none of the model's.
    """
    names = {id(each): name for name, each in model.named_parameters()}
    number: dict[int, int] = {}
    for at, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)} that is "
                    f"none of the model's: make it of the parameters of the model that is given with it"
                )
            if number.setdefault(id(parameter), at) != at:
                raise ValueError(f"two optimizers step {names[id(parameter)]}: each parameter belongs to one")
    return [number.get(id(each), -1) for _, each in named]


def who_steps(named: Sequence[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer]) -> list[str]:
    """Of each parameter its optimizer and group, for ranks to compare."""
    said = {
        id(each): f"{type(optimizer).__name__} {number}, group {at}"
        for number, optimizer in enumerate(optimizers)
        for at, group in enumerate(optimizer.param_groups)
        for each in group["params"]
    }
    return [f"{name}: {said.get(id(each), 'no optimizer')}" for name, each in named]


def numbers_of(optimizer: Optimizer) -> list[float]:
    """What schedulers may change: learning rates, momenta, betas, of all groups."""
    return [
        float(each) for group in optimizer.param_groups for _, values in _numbers(group) for each in values
    ]


def set_numbers(optimizer: Optimizer, numbers: Iterable[float]) -> None:
    """The inverse of `numbers_of`."""
    following = iter(numbers)
    for group in optimizer.param_groups:
        for key, values in list(_numbers(group)):
            new = tuple(next(following) for _ in values)
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(new[0])
            elif new != values:  # or numbers of iterations would no longer be whole
                group[key] = new if isinstance(group[key], tuple) else new[0]


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for key, value in group.items():
        values = value if isinstance(value, tuple) else (value,)
        if all(
            isinstance(each, float | int | torch.Tensor) and not isinstance(each, bool) for each in values
        ):
            yield key, values


class SteppedParts:
    """One of the user's optimizers, which from now on steps this rank's parts."""

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        sharding: Sharding,
        parameters: Sequence[torch.Tensor],
        before_zero: Callable[[bool], None],
    ) -> None:
        """parameters: those of the sharding, in its order. Hooks of the optimizer's steps bring the rest."""
        self.optimizer, self._number = optimizer, number
        self._before_zero = before_zero
        self._all = list(parameters)
        self._whole: list[dict[str, list[Any]]] = []  # by group: what lay in it before it was divided
        self.divide(sharding)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        self._zero = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def divide(self, sharding: Sharding) -> None:
        """Parts in the place of parameters, and of what was kept of these."""
        optimizer, self._sharding = self.optimizer, sharding
        index = {id(each): at for at, each in enumerate(self._all)}
        self._parameters = [each for each in parameters_of(optimizer) if id(each) in index]
        parts: Mapping[int, list[Part]] = _by_index(sharding.parts)
        follow = followed(optimizer)
        for group in optimizer.param_groups:
            self._whole.append({key: list(group[key]) for key in ("params", "param_names") if key in group})
            mine: list[tuple[torch.Tensor, str]] = []
            for parameter, name in zip(group["params"], group.get("param_names", repeat("")), strict=False):
                if id(parameter) not in index:
                    mine.append((parameter, name))  # wants no gradient: nobody steps it
                    continue
                state = optimizer.state.pop(parameter, None)
                for part in parts.get(index[id(parameter)], []):
                    follow(parameter, part.parameter)
                    mine.append((part.parameter, name))
                    if state is not None:
                        optimizer.state[part.parameter] = _part_of_state(state, part)
            group["params"] = [parameter for parameter, _ in mine]
            if "param_names" in group:
                group["param_names"] = [name for _, name in mine]

    def restore(self) -> None:
        """Parameters in the place of parts, as before `divide`; what was kept of the parts is dropped.

        The hooks stay, so that they keep their place among the user's.
        """
        for part in self._sharding.parts:
            self.optimizer.state.pop(part.parameter, None)
        del self._sharding
        # By place: load_state_dict makes other groups in the same order.
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=False):
            group.update(whole)
        self._whole = []

    def _before(self, *_: Any) -> None:
        self._sharding.before_step((self._number,))

    def _after(self, *_: Any) -> None:
        with torch.no_grad():
            self._sharding.after_step((self._number,))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._before_zero(set_to_none)
        self._zero(set_to_none)
        for parameter in self._parameters:  # what came in no_sync and was not summed
            parameter.grad = None


def _by_index(parts: Iterable[Part]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        found[part.index].append(part)
    return found


def _part_of_state(state: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """What an optimizer kept of a whole parameter, cut as the parameter is."""
    whole = math.prod(part.shape)
    home = part.parameter.device

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == whole and value.ndim:
            mine = value.reshape(-1)[part.start : part.stop].clone().view(part.parameter.shape)
            return mine.to(home)
        # A count of steps may lie on a GPU, but not beside a part that is stepped on the CPU.
        return value.cpu() if isinstance(value, torch.Tensor) and home.type == "cpu" else value

    return {key: cut(value) for key, value in state.items()}
