"""A parameter whose memory is freed for now: it knows its shape, and any use of it says what to
do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from imece.data_parallel.sharding.divided import ask

_ATTRIBUTES = (
    "dtype", "device", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps",
    "is_nested", "is_quantized", "is_sparse", "is_xpu", "itemsize", "layout", "nbytes", "ndim",
    "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "size", "storage_offset", "stride",
)  # fmt: skip
KNOWN: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [torch.Tensor.grad.__delete__]  # type: ignore[union-attr]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type]
)
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
_OF_GRADIENT = frozenset(getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__"))
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class FreedParameter(nn.Parameter):
    """The class of a parameter while its unit is freed; `free` and `revive` swap it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if func in _OF_GRADIENT and found is None and args[1:] in ((), (None,)):
                ask(args[0])
            return found
        if func in _CONVERSIONS and _is_so_already(func, *args, **(kwargs or {})):
            return args[0]
        if func == _SET_DATA and args[0] is args[1]:  # from `module.to`, of what it is already
            return None
        if func is torch.autograd.backward and not any(isinstance(each, cls) for each in args[0]):
            return func(*args, **{**(kwargs or {}), "inputs": [*map(_edge, (kwargs or {})["inputs"])]})
        raise RuntimeError(_complaint([*args, *(kwargs or {}).values()]))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FreedParameter({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(_complaint([self]))


def _edge(given: Any) -> Any:
    """Where the gradient of a freed parameter arrives in the graph; anything else as it is."""
    if not isinstance(given, FreedParameter):
        return given
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(given)


def _is_so_already(convert: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the conversion would return the parameter itself."""
    if type(first) is not FreedParameter:
        return False
    alike = torch.empty([0] * first.dim(), dtype=first.dtype, device=first.device)
    return convert(alike, *args, **kwargs) is alike


def free(parameter: torch.Tensor, name: str, unit: str) -> None:
    """From now on any use of the parameter raises RuntimeError that names it."""
    parameter._imece_freed = name, unit, type(parameter)  # type: ignore[attr-defined]
    parameter.__class__ = FreedParameter


def revive(parameter: torch.Tensor) -> None:
    """Undo `free`."""
    *_, kind = parameter.__dict__.pop("_imece_freed")
    parameter.__class__ = kind


def _complaint(values: Sequence[Any]) -> str:
    for value in values:
        if isinstance(value, list | tuple):
            inside = [each for each in value if isinstance(each, FreedParameter)]
            value = inside[0] if inside else value
        if isinstance(value, FreedParameter):
            name, unit, _ = value.__dict__["_imece_freed"]
            return (
                f"parameter {name} of {unit} is freed: this rank keeps a part of it, and all of it is there "
                f"only while {unit} runs. Elsewhere use it inside of `with model.gathered():`; to write into "
                f"it, inside of `with model.gathered(write=True):`, or by model.load_state_dict"
            )
    return "a parameter is freed; use it inside of `with model.gathered():`"
