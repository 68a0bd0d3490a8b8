"""Between a backward and the step, a script that asks a parameter for its `.grad` is told where that is.

A sharded parameter's own `.grad` is None: this rank's part of the gradient is in the optimizer's groups. So a
loop that clips, scales or drops gradients `if parameter.grad is not None` would do nothing, without a word.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from imece.data_parallel import script

_GRAD: Any = torch.Tensor.grad
_on: weakref.WeakSet[Divided] = weakref.WeakSet()


class Divided:
    """The parameters of one sharded model, by name."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], strategy: str, *, freed: bool) -> None:
        """freed: they are FreedParameters after a backward, which ask here by themselves."""
        self._named, self._strategy, self._freed = named, strategy, freed
        self._has_warned = False

    def begin(self) -> None:
        """A backward is over, and parts have its gradients."""
        if self._has_warned:
            return
        _on.add(self)
        for _, each in self._named if not self._freed else ():
            if type(each) is nn.Parameter:
                each.__class__ = DividedParameter

    def end(self) -> None:
        """Gradients were used or dropped, or parameters are used: they are ordinary ones."""
        if self not in _on:
            return
        _on.discard(self)
        for _, each in self._named:
            if type(each) is DividedParameter:
                _ordinary(each)

    def tell(self, parameter: torch.Tensor) -> None:
        """Warn, once, if the parameter is one of these."""
        name = next((name for name, each in self._named if each is parameter), None)
        if name is None or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"parameter {name} has no .grad under strategy={self._strategy!r}: this rank's part of it is in "
            f"optimizer.param_groups. Let the code that reads, changes or drops gradients go over these "
            f"parts, or take strategy='replicate' (docs/sharding.md, Gradients after backward)",
            stacklevel=script.level(),
        )


def ask(parameter: torch.Tensor) -> None:
    """The caller's caller has found no gradient there, or has dropped it: tell it if it is a script."""
    if torch.compiler.is_compiling():  # a step that is compiled as a whole; its frames are dynamo's
        return
    if script.is_script(sys._getframe(2)):
        for each in list(_on):
            each.tell(parameter)


class DividedParameter(nn.Parameter):
    """The class of a parameter that is whole, while its gradient is divided."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; a warning if there is none since it is in the ranks' parts."""
        grad: torch.Tensor | None = _GRAD.__get__(self)
        if grad is None:
            ask(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            ask(self)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        ask(self)
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_ordinary(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)


def _ordinary(parameter: torch.Tensor) -> torch.Tensor:
    parameter.__class__ = nn.Parameter
    return parameter
