"""Gives a model on the meta device memory and values unit by unit, so that no rank ever holds all of it.

`init(module)`, or the module's `reset_parameters`, fills each module that has parameters or buffers of its
own. The random seed is the same on all ranks and belongs to the unit: so values do not depend on the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import swap_tensors

from imece.collectives import ops
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.units import Unit

Init = Callable[[nn.Module], object]


def is_meta(model: nn.Module) -> bool:
    """Whether any of its parameters or buffers is without memory."""
    return any(each.is_meta for each in (*model.parameters(), *model.buffers()))


class Filling:
    """Fills units one after the other: call it once with the number of each."""

    def __init__(
        self, units: Sequence[Unit], device: torch.device, group: dist.ProcessGroup, init: Init | None
    ) -> None:
        """ValueError, before anything is changed, for a module that nothing fills. A collective
        of `group`."""
        self._device, self._init = device, init
        self._left = set(range(len(units)))
        self._modules: list[list[tuple[str, nn.Module]]] = [[] for _ in units]  # children before parents
        of_module = {id(unit.module): unit.number for unit in units}
        for name, module, number in _with_units(units[0].module, "", 0, of_module, set()):
            self._modules[number].append((name, module))
            if init is None and _has_own_meta(module) and _reset_of(module) is None:
                without = [_full(name, key) for key, each in _own(module).items() if each.is_meta]
                raise ValueError(
                    f"{', '.join(without)}: on the meta device, and {_called(name, module)} has no "
                    "reset_parameters(), by which it would be filled: give that class one, or pass init=, a "
                    "function that fills one module"
                )
        seed = torch.randint(2**62, (1,), device=device)
        self._seed = int(ops.broadcast(seed, 0, group=group, label="seed of the parameters"))

    def rest(self) -> None:
        """Fill the units in which nothing is trained, which nobody asked for."""
        for number in sorted(self._left):
            self(number)

    def __call__(self, number: int) -> None:
        """Fill a unit. ValueError for a module with elements that nothing wrote."""
        self._left.discard(number)
        modules = self._modules[number]
        new = [(name, module) for name, module in modules if _has_own_meta(module)]
        with torch.no_grad(), torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._seed + number)
            for _, module in new:
                _allocate(module, self._device)
            for _, module in modules:
                reset = _reset_of(module)
                if self._init is not None:
                    self._init(module)
                elif reset is not None and _is_there(module):
                    reset()
        for name, module in new:
            for key, tensor in _own(module).items():
                if tensor.is_floating_point() and bool(tensor.isnan().any()):
                    filler = "init()" if self._init is not None else "reset_parameters()"
                    raise ValueError(
                        f"{_full(name, key)} was on the meta device, and {filler} did not fill it: pass an "
                        f"init= that does, for {_called(name, module)}: a function that fills one module"
                    )


def _with_units(
    module: nn.Module, name: str, number: int, of_module: Mapping[int, int], seen: set[int]
) -> Iterator[tuple[str, nn.Module, int]]:
    seen.add(id(module))
    number = of_module.get(id(module), number)
    for key, child in module.named_children():
        if id(child) not in seen:
            yield from _with_units(child, f"{name}.{key}" if name else key, number, of_module, seen)
    yield name, module, number


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    both = {**module._parameters, **module._buffers}
    return {key: each for key, each in both.items() if each is not None}


def _has_own_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in _own(module).values())


def _is_there(module: nn.Module) -> bool:
    """Whether everything in the module has memory now: if it contains units, some never has."""
    return not any(each.is_meta or isinstance(each, FreedParameter) for each in module.parameters())


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for tensors on the meta device, NaN until somebody writes it."""
    for key, tensor in _own(module).items():
        if not tensor.is_meta:
            continue
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.is_floating_point():
            memory.fill_(float("nan"))
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            new.__dict__.update(tensor.__dict__)
            swap_tensors(tensor, new)  # it stays the object that the optimizer and other modules know
        else:
            module._buffers[key] = memory


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _called(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"
