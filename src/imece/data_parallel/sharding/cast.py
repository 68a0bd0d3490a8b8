"""The dtypes of a sharded model, of its buffers and of its frozen parameters, with the meaning they have
in FSDP.

Inputs are cast in each forward, buffers and frozen parameters once. Buffers are saved in their former dtype.
Those of batch norms are left alone: torch wants their statistics to have at least the bits of their
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map

from imece.data_parallel.batch_norm import SyncBatchNorm
from imece.data_parallel.same import is_made_of_others
from imece.listing import kind_of


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a sharded model is kept; None: its own.

    param: of the parameters that forward and backward use, and of the floating-point tensors that forward is
    given. Masters, which the optimizer steps, keep the model's own dtype, one shard per rank; frozen
    parameters have no masters. reduce: of gradients in buckets, and of their sum. buffer: of floating-point
    buffers, from parallelize on; state dicts have them in the model's own dtype.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None

    def __post_init__(self) -> None:
        """TypeError for anything but a dtype that gradients can have."""
        for what, dtype in vars(self).items():
            if dtype is None or (
                isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
            ):
                continue
            raise TypeError(
                f"MixedPrecision({what}={dtype!r}): a dtype of floating point, such as torch.bfloat16"
            )

    def gradients_bytes(self, named: Sequence[tuple[str, Tensor]]) -> int:
        """Bytes of all gradients in buckets."""
        dtype = self.reduce or self.param
        return sum(each.numel() * (dtype or each.dtype).itemsize for _, each in named)

    def check(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """ValueError that names a complex parameter: a cast by `param` or `reduce` would keep only its
        real part."""
        for what, dtype in (("param", self.param), ("reduce", self.reduce)):
            for name, each in named if dtype is not None and not dtype.is_complex else ():
                if each.is_complex():
                    raise ValueError(
                        f"parameter {name} is {each.dtype}, and MixedPrecision({what}={dtype}) would keep "
                        f"its real part alone: leave {what} out, or make two real parameters of it"
                    )


def refuse_batch_norms(
    model: nn.Module, param: torch.dtype, home: torch.device, ignored: Collection[str]
) -> None:
    """ValueError that names a batch norm which would fail in each forward with its parameters in `param`.

    On CPUs torch refuses parameters with fewer bits than the statistics.
    """
    for name, module in model.named_modules() if home.type == "cpu" else ():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        weight, statistics = module.weight, module.running_mean
        is_cast = weight is not None and f"{name}.weight".removeprefix(".") not in ignored
        if is_cast and statistics is not None and statistics.dtype != param:
            raise ValueError(
                f"{name or 'the model'} is {kind_of(module)}, and torch has none for CPUs whose "
                f"parameters are {param} and whose statistics are {statistics.dtype}: leave param out of "
                f"MixedPrecision and run forward inside of torch.autocast"
            )


def can_be_cast(parameter: Tensor) -> bool:
    """Whether its values are floating point. A tensor subclass may keep codes, whatever dtype it shows."""
    is_numbers = type(parameter) is nn.Parameter or is_made_of_others(parameter)
    return is_numbers and parameter.is_floating_point()


def widen_gradients(parameters: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    """From now on autograd adds these parameters' gradients up in `dtype`, which has more bits than they."""
    with torch._C.DisableTorchFunctionSubclass():  # some may be freed
        for each in parameters:
            grad, each.grad = each.grad, None
            each.grad_dtype = dtype
            each.grad = grad if grad is None else grad.to(dtype)


def let_any_come(parameters: Iterable[Tensor]) -> None:
    """From now on autograd writes a gradient as it is, or adds it to one with more bits.

    Then the gradient of a backward that goes into a bucket at once takes no memory with more bits before.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for each in parameters:
            each.grad_dtype = None


def cast_input(given: Any, dtype: torch.dtype) -> Any:
    """One argument of forward, with the floating-point tensors in it in `dtype`.

    The same object if there is nothing to cast: a module may write into a list or a mapping.
    """

    def differs(each: Any) -> bool:
        return isinstance(each, Tensor) and each.is_floating_point() and each.dtype != dtype

    if not any(differs(each) for each in tree_leaves(given)):
        return given
    return tree_map(lambda each: each.to(dtype) if differs(each) else each, given)


def cast_frozen(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Cast these, which are in no bucket, if they can be cast; they stay the same objects."""
    for each in parameters:
        if can_be_cast(each) and each.dtype != dtype:
            if is_made_of_others(each):  # its values are not in its data
                swap_tensors(each, nn.Parameter(each.to(dtype), requires_grad=False))
            else:
                each.data = each.to(dtype)


def cast_buffers(model: nn.Module, dtype: torch.dtype, ignored: Collection[str]) -> None:
    """Cast floating-point buffers except `ignored` ones; they stay the same objects."""
    before = {each: each.dtype for name, each in model.named_buffers() if name not in ignored}
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            continue
        own = {key: each for key, each in module._buffers.items() if each is not None and each in before}
        kept = {key: before[each] for key, each in own.items() if before[each].is_floating_point}
        for key in kept:
            own[key].data = own[key].to(dtype)
        if kept:
            module.register_state_dict_post_hook(partial(_restore, kept))


def _restore(
    kept: Mapping[str, torch.dtype], _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    for key, dtype in kept.items():
        if prefix + key in state:  # a buffer that is not persistent is not in it
            state[prefix + key] = state[prefix + key].to(dtype)
