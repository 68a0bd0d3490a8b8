"""Gives all ranks what the optimizers of one rank keep, where every rank steps whole parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from imece.collectives.texts import gather_json
from imece.data_parallel.optimizer import numbers_of, parameters_of, set_numbers
from imece.data_parallel.same import is_made_of_others, sync_from

_TENSOR, _PLAIN, _OTHER = "tensor", "plain", "other"
_LABEL = "what optimizers keep"


def give_state(
    optimizers: Sequence[Optimizer], root: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Give all ranks the numbers of these optimizers' groups on rank `root`, and the tensors, numbers and
    texts that they keep by parameter. All ranks of `group` call this.

    device: where tensors travel. A warning on rank `root` for what an optimizer keeps besides: there each
    rank stays with its own.
    """
    mine = [_described(each) for each in optimizers] if group.rank() == root else []
    tensors: list[Tensor] = []
    said = gather_json(mine, group, device, _LABEL)[root]
    for optimizer, (numbers, of_each) in zip(optimizers, said, strict=True):
        set_numbers(optimizer, numbers)
        for parameter, entries in zip(parameters_of(optimizer), of_each, strict=True):
            tensors += _made_alike(optimizer, parameter, entries)
    sync_from(root, tensors, group, _LABEL, device)


def _described(optimizer: Optimizer) -> list[Any]:
    """[numbers, for each parameter a list of (key, kind, what the kind needs)], for JSON."""
    states: list[dict[Any, Any]] = [optimizer.state.get(each, {}) for each in parameters_of(optimizer)]
    of_each = [[[key, *_kind(value)] for key, value in state.items()] for state in states]
    others = {str(key) for entries in of_each for key, kind, *_ in entries if kind == _OTHER}
    if others:
        warnings.warn(
            f"{type(optimizer).__name__} keeps {', '.join(sorted(others))}, which is no tensor, number or "
            f"text: ranks that had ended before the others have their own, and may drift apart",
            stacklevel=2,
        )
    return [numbers_of(optimizer), of_each]


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor) and value.layout is torch.strided and not is_made_of_others(value):
        return _TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape), value.is_cpu
    if value is None or isinstance(value, bool | int | float | str):
        return _PLAIN, value
    return (_OTHER,)


def _made_alike(optimizer: Optimizer, parameter: Tensor, entries: list[Any]) -> Iterator[Tensor]:
    """Make a parameter's state one of these entries; yields its tensors, in which any values may be."""
    if not entries:
        optimizer.state.pop(parameter, None)
        return
    state: dict[Any, Any] = optimizer.state[parameter]
    for key in state.keys() - {key for key, *_ in entries}:
        del state[key]
    for key, kind, *what in entries:
        if kind == _TENSOR:
            there = state.get(key)
            if not isinstance(there, Tensor) or _kind(there) != (kind, *what):
                there = state[key] = _empty(parameter, *what)
            yield there
        elif kind == _PLAIN:
            state[key] = what[0]


def _empty(parameter: Tensor, dtype: str, shape: list[int], on_cpu: bool) -> Tensor:
    """Laid out as an optimizer would: like the parameter, if it has its shape."""
    device = torch.device("cpu") if on_cpu else parameter.device
    if tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=getattr(torch, dtype), device=device, requires_grad=False)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
