"""Parameters that modules get after their model was wrapped: no other rank would see their gradients."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from imece.data_parallel.reducing import refusals
from imece.data_parallel.reducing.sharing import summed

_times = 0  # any module of this process got a parameter or a module


@functools.cache
def _watch() -> None:
    register_module_parameter_registration_hook(_count)
    register_module_module_registration_hook(_count)


def _count(*_: object) -> None:
    global _times
    _times += 1


class Newcomers:
    """Those of one wrapped model."""

    def __init__(self, module: nn.Module, known: Iterable[torch.Tensor]) -> None:
        """known: the parameters that the model was wrapped with, which somebody else keeps."""
        _watch()
        self._module, self._known = module, set(map(id, known))
        self._seen = _times  # no look before: functional_call puts tensors into a module for one forward
        self._found: list[tuple[str, nn.Parameter]] = []

    def look(self) -> None:
        """Look through the model if any module has got something since the last time."""
        if self._seen != _times:
            self._seen = _times
            self._found = [each for each in self._module.named_parameters() if id(each[1]) not in self._known]

    def refuse(self, ignored: Collection[str]) -> None:
        """RuntimeError that names one that has a gradient, unless it is `ignored` or of another model too."""
        in_models = summed() if self._found else ()
        for name, each in self._found:
            if each.grad is not None and id(each) not in in_models and name not in ignored:
                raise refusals.newcomer(name)
