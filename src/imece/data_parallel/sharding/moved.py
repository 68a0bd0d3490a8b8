"""Checks that a step changes the parts it should. An optimizer that keeps references to the whole parameters
finds no gradients there, as only parts have them, and silently changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from imece.data_parallel import script
from imece.data_parallel.optimizer import numbers_by_key

_DEPTH = 3  # levels of containers in an optimizer's attributes
_TORCHS = ("param_groups", "state", "defaults")


class _Seen(NamedTuple):
    """A part before a step, at the elements with its largest and its smallest gradient."""

    part: torch.Tensor
    version: int
    places: torch.Tensor  # [2], indices among all elements
    gradient: torch.Tensor  # [2]
    value: torch.Tensor  # [2]

    @classmethod
    def of(cls, part: torch.Tensor, gradient: torch.Tensor) -> _Seen:
        flat = _numbers(gradient)
        places = torch.stack([flat.argmax(), flat.argmin()])
        return cls(part, part._version, places, flat[places], _numbers(part)[places])

    @property
    def is_to_move(self) -> bool:
        """Whether a step with this gradient would change the part."""
        return bool(self.gradient.isfinite().all() and self.gradient.any())

    @property
    def has_moved(self) -> bool:
        """Whether the part was written into. Writes through `.data`, or by a pointer, change no version."""
        with torch._C.DisableTorchFunctionSubclass():  # the part may be coming
            if self.part._version != self.version:
                return True
            return not torch.equal(_numbers(self.part)[self.places], self.value)


class Moved:
    """Watches the parts of one optimizer in each step, until a step has changed some of them."""

    def __init__(self) -> None:
        self._is_known = False
        self._seen: list[_Seen] = []

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins."""
        self._seen = [] if self._is_known else [_Seen.of(*each) for each in _to_move(optimizer)]

    def end(self, optimizer: Optimizer, whole: Collection[torch.Tensor]) -> None:
        """The step is over. whole: the parameters whose parts it steps.

        RuntimeError, with the attribute, if nothing changed and the optimizer keeps some of these. A warning
        if nothing changed for another reason: it may mean to skip a step.
        """
        seen, self._seen = self._seen, []
        if any(each.has_moved for each in seen):
            self._is_known = True
        if self._is_known or not any(each.is_to_move for each in seen):
            return
        self._is_known = True
        name, ids = type(optimizer).__name__, {id(each) for each in whole}
        said = f"{name} has stepped, and nothing that it steps has changed, though it has gradients"
        cure = "what it steps are this rank's parts: have it look into optimizer.param_groups in each step"
        for attribute, value in vars(optimizer).items():
            if attribute not in _TORCHS and _has(value, ids, _DEPTH):
                raise RuntimeError(
                    f"{said}: its attribute {attribute} knows parameters by themselves, and {cure}, or use "
                    f"strategy='replicate'"
                )
        warnings.warn(f"{said}: if it keeps parameters somewhere, {cure}", stacklevel=script.level())


def _to_move(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that the next step should change, each with its gradient."""
    for group in optimizer.param_groups:
        if numbers_by_key(group).get("lr") != 0:  # a scheduler may begin with 0
            for each in group["params"]:
                if each.grad is not None and each.numel() and not each.grad.is_sparse:
                    yield each, each.grad


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, and real."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)


def _has(value: Any, ids: Collection[int], depth: int) -> bool:
    """Whether `value` is or contains an object with one of these ids, or has one of them as a key."""
    if isinstance(value, torch.Tensor) or not depth:
        return id(value) in ids
    if isinstance(value, Mapping):
        keys_too = (*value.keys(), *value.values())
        return any((type(each) is int and each in ids) or _has(each, ids, depth - 1) for each in keys_too)
    return isinstance(value, list | tuple | set) and any(_has(each, ids, depth - 1) for each in value)
