"""Notices that modules get parameters or modules, which a wrapped model may then have beside those it was
wrapped with."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_times = 0


@functools.cache
def watch() -> None:
    """From now on `times` goes up."""
    register_module_parameter_registration_hook(_on_parameter)
    register_module_module_registration_hook(_on_module)


def times() -> int:
    """How often any module of this process got a parameter or a module."""
    return _times


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    global _times
    _times += 1


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    global _times
    _times += 1
