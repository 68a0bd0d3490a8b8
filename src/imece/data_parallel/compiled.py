"""`imece.compile_blocks`: torch.compile by block, so that gradients can still leave while backward goes on.

A model compiled as a whole has one backward that gives out all gradients at its end, when nothing is left to
hide their sum behind. Compiled by block, each block has a backward of its own: its gradients leave when that
ends, and units are gathered and freed between blocks. Since blocks share their code, it is compiled only
once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from imece.data_parallel.sharding.coming import settle
from imece.data_parallel.sharding.units import Wanted, find_units


def compile_blocks(
    model: nn.Module,
    *,
    units: Wanted = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> list[str]:
    """torch.compile each of the model's repeated blocks, in place; returns their names.

    Works before or after imece.parallelize and DistributedDataParallel, with any strategy. Parameters keep
    their names, and a copy or pickle of the model is not compiled.

    units: which modules, as for imece.parallelize: classes, or the number of elements a block has at least.
    By default the children of the outermost lists (nn.ModuleList, nn.Sequential) that share a class. backend,
    mode, dynamic: torch.compile's.

    ValueError for a model without such blocks.
    """
    blocks = [unit for unit in find_units(model, units) if unit.number]
    if not blocks:
        raise ValueError(
            f"compile_blocks: {type(model).__name__} has no list (nn.ModuleList, nn.Sequential) of blocks of "
            "one class: name their classes with units=[...], or call model.compile()"
        )
    for block in blocks:
        _compile(block.module, backend=backend, mode=mode, dynamic=dynamic)
    return [block.name for block in blocks]


def _compile(module: nn.Module, **options: Any) -> None:
    if not module.forward.__module__.startswith("torch."):
        module._compiled_call_impl = _Call(module, torch.compile(nn.Module._call_impl, **options))
    else:  # torch.compile passes over such code, unless other code calls it
        forward = torch.compile(_calling(type(module).forward), **options)
        module._compiled_call_impl = _Compiled(module, forward)


def _calling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **kwargs: Any) -> Any:
        return forward(*inputs, **kwargs)

    return run


class _Call:
    """A module's compiled call, a function of the module and its inputs.

    It refers to the module weakly, as torch's own does not: a dropped model, in a cycle with it, would keep
    its memory until the garbage collector comes.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._call(self._module(), *inputs, **kwargs)


class _Compiled:
    """A module's call with a compiled forward. Its hooks stay outside: they gather and free parameters."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = weakref.ref(module), forward

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        own = module.__dict__
        if "forward" in own:  # someone has replaced it since
            return module._call_impl(*inputs, **kwargs)
        own["forward"] = functools.partial(self._forward, module)
        try:
            return module._call_impl(*inputs, **kwargs)
        finally:
            del own["forward"]


class _Waits:
    """A module's compiled call, which looks at the classes of parameters, so it waits until all of them
    have come."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        settle(module.parameters())
        return self._call(*inputs, **kwargs)


def waits_before_compiled(model: nn.Module) -> bool:
    """Make compiled modules wait for their parameters. False if that is impossible."""
    if type(model).__name__ == "OptimizedModule":  # made by torch.compile(module)
        return False
    call = model._compiled_call_impl
    if call is not None:
        if not isinstance(call, _Waits):
            model._compiled_call_impl = _Waits(model, call)
        return True
    # This runs in each step, and `children` takes longer.
    return all(waits_before_compiled(each) for each in model._modules.values() if each is not None)
