"""Batch norm whose statistics are those of all ranks' samples, on CPU and GPU and over any backend.

    model = convert_sync_batchnorm(model)                   # before the model is wrapped

Words: a channel's *moments* are its count, mean, and M2, the sum of squares about that mean. *origin* is a
point near the mean of this rank's samples, *centred* the input minus it, and *offset* the mean of all ranks
minus it. Whatever is large in the input leaves with the origin, so a channel about 10,000 with a deviation
of 1 loses no digits in fp32.

A training step costs one all_gather of 1 + 2C doubles a rank forward and, if the input wants a gradient, one
all_reduce of 2C numbers backward. The gradients of weight and bias are sums over this rank's samples alone:
reducing them is left to whoever reduces all the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from imece.collectives import ops

Tensor = torch.Tensor
_KNOWN_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks of a group.

    input: [N, C, *], floating point, C = num_features; N may differ between ranks and be 0. Each rank of the
    group makes the call, and also the backward if any rank does. The output has the input's dtype and memory
    format; statistics are at least fp32. process_group: None for all ranks. In eval mode, in a group of one
    rank, or without an open process group, this is torch's BatchNorm and talks to nobody.

    ValueError if the input has wrong dims, channels or dtype, and on every rank if all of them together have
    only one value per channel. There is no second derivative.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._join(_own_group(process_group), "")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over the samples of all ranks, and update the
        running statistics.

        input: [N, C, *], floating point; the result has its shape, dtype and memory format. All ranks of
        the group make the call. ValueError for wrong dims, channels or dtypes, and for only one value
        per channel.
        """
        group = self._peers()
        if group is None:
            return super().forward(input)
        # torch.compile cannot look into collectives, and fails hard if it tries.
        run = self._outside_graphs if torch.compiler.is_compiling() else self._synchronised
        return run(input, group)

    def _synchronised(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        self._check_input_dim(input)
        run: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalised.apply
        output, *moments = run(input, self.weight, self.bias, self.eps, group, self._label)
        if self.track_running_stats:
            self._track(_Moments(*moments))
        return output

    # As a decorator of what runs eagerly, this would import torch._dynamo (over a second) with the
    # first batch.
    _outside_graphs = torch._disable_dynamo(_synchronised)

    def _track(self, moments: _Moments) -> None:
        """Update the running statistics; an empty batch is counted but changes no value, as in torch."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        share: Any = self.momentum
        if share is None:
            share = 0.0 if self.num_batches_tracked is None else 1.0 / self.num_batches_tracked.double()
        share = share * (moments.values > 0).double()  # a float times a bool tensor would be fp32
        unbiased = moments.var * (moments.values / (moments.values - 1).clamp(min=1))
        for running, batch in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
            running.copy_(running + share * (batch - running))

    def _peers(self) -> dist.ProcessGroup | None:
        """The group to meet in now; None if there is nobody to meet."""
        if not (self.training and dist.is_initialized()):
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        return group if group is not None and group.size() > 1 else None

    def _join(self, group: dist.ProcessGroup | None, name: str) -> None:
        """name: the module's name within its model, for errors."""
        self.process_group = group
        self._name = name

    def _check_input_dim(self, input: Tensor) -> None:
        wanted, got = "", ""
        if input.dim() < 2:
            wanted, got = "an input of at least 2 dims [N, C, *]", f"{input.dim()}"
        elif input.size(1) != self.num_features:
            wanted, got = f"{self.num_features} channels in dim 1", f"{input.size(1)}"
        elif not input.is_floating_point():
            wanted, got = "a floating-point input", f"{input.dtype}"
        if wanted:
            raise ValueError(
                f"{_rank()}{self._label} expected {wanted}, got {got} (input of shape {list(input.shape)})"
            )

    @property
    def _label(self) -> str:
        return f"SyncBatchNorm {self._name}".rstrip()

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """The copy uses the same group: a group cannot be copied."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        memo[id(self.process_group)] = self.process_group
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def meet_in(module: torch.nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether a synchronised batch norm in `module`, imece's or torch's, makes its calls on `group`."""
    return any(_group_of(each) is group for _, each in _synchronised(module))


def refuse_uneven(module: torch.nn.Module) -> None:
    """ValueError for a synchronised batch norm in training mode: some ranks will run fewer forwards."""
    for name, each in _synchronised(module):
        group = _group_of(each)
        if each.training and group is not None and group.size() > 1:
            raise ValueError(
                f"join() with a synchronised batch norm, {name or 'the module'}: in each forward it waits "
                f"for all ranks, also for those that have run out of inputs: give all equally many, or call "
                f"its eval()"
            )


def _synchronised(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, each in module.named_modules():
        if isinstance(each, SyncBatchNorm | torch.nn.SyncBatchNorm):
            yield name, each


def _group_of(norm: Any) -> dist.ProcessGroup | None:
    return norm.process_group if norm.process_group is not None else dist.group.WORLD


def convert_sync_batchnorm(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Turn each BatchNorm1d, 2d and 3d in `module`, and torch's SyncBatchNorm, into imece's;
    returns `module`.

    This happens in place: the module objects stay, and with them their parameters, buffers, hooks, names,
    mode, and all references to them. A SyncBatchNorm of imece keeps its group; torch's keeps its own if
    process_group is None. ValueError, with nothing changed, for a batch norm that is lazy, parametrized, or
    has a forward of its own, which would be lost.
    """
    found: list[tuple[str, torch.nn.Module, dist.ProcessGroup | None]] = []
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
            _check_convertible(name, child)
            group = process_group if process_group is not None else getattr(child, "process_group", None)
            found.append((name, child, _own_group(group)))
    for name, child, group in found:
        child.__class__ = SyncBatchNorm
        assert isinstance(child, SyncBatchNorm)
        child._join(group, name)
    return module


class _Moments(NamedTuple):
    """Moments over all ranks together, fp64."""

    mean: Tensor  # [C]
    var: Tensor  # [C], biased
    values: Tensor  # []: number of values per channel


class _Normalised(torch.autograd.Function):
    """(input, weight, bias, eps, group, label) -> (output, *_Moments)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        label: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        origin, centred, own = _own_moments(input)
        gathered = own.new_empty(group.size(), own.numel())
        ops.all_gather(gathered, own, group=group, label=label)
        moments = _combined(gathered)
        if input.numel() <= input.size(1):  # else all ranks together have enough: ask no GPU
            _check_count(moments.values, input, group, label)

        offset = (moments.mean - origin).to(origin.dtype)
        inverse = (moments.var + eps).rsqrt().to(origin.dtype)  # 1 / standard deviation
        scale = inverse if weight is None else inverse * weight.to(origin.dtype)
        shift = -offset * scale if bias is None else bias.to(origin.dtype) - offset * scale
        output = torch.addcmul(_spread(shift, input), centred, _spread(scale, input), out=centred)

        ctx.save_for_backward(input, weight, origin, offset, inverse, moments.values)
        ctx.group, ctx.label = group, label
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*moments)
        return output.to(input.dtype), *moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, origin, offset, inverse, count = ctx.saved_tensors
        dims = _all_but_channels(input)
        centred = input - _spread(origin, input)
        # Sums over samples of dL/dy, and of dL/dy * (x - mean).
        sum_grad = grad.sum(dims, dtype=origin.dtype)
        sum_grad_x = (grad * centred).sum(dims) - offset * sum_grad
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = (sum_grad_x * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_grad.to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_grad, sum_grad_x])
            ops.all_reduce(sums, group=ctx.group, label=ctx.label)
            mean_grad, mean_grad_x = (sums / count.clamp(min=1).to(sums.dtype)).chunk(2)
            by_grad = inverse if weight is None else inverse * weight.to(origin.dtype)
            by_x = -by_grad * inverse * inverse * mean_grad_x
            shift = -by_grad * mean_grad - by_x * offset
            torch.addcmul(_spread(shift, input), centred, _spread(by_x, input), out=centred)
            grad_input = centred.addcmul_(grad, _spread(by_grad, input)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _own_moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's origin [C], its centred input, and its message [1 + 2C]: count, means, M2s."""
    dims = _all_but_channels(input)
    count = input[:, :1].numel()
    origin = input.sum(dims, dtype=torch.promote_types(input.dtype, torch.float32)) / max(count, 1)
    centred = input - _spread(origin, input)
    # The sum that gave the origin was rounded; the remainder is small, so this sum is exact enough.
    offset = centred.sum(dims).double() / max(count, 1)
    squares = (centred * centred).sum(dims).double() - count * offset * offset
    counts = origin.new_full((1,), count, dtype=torch.float64)
    return origin, centred, torch.cat([counts, origin + offset, squares.clamp_(min=0)])


def _combined(gathered: Tensor) -> _Moments:
    """gathered: [world_size, 1 + 2C]. Chan's formula for all parts at once; an empty part weighs nothing."""
    counts = gathered[:, :1]
    means, squares = gathered[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    at_least_one = count.clamp(min=1)
    mean = (counts / at_least_one * means).sum(0)
    var = (squares + counts * (means - mean) ** 2).sum(0) / at_least_one
    return _Moments(mean, var, count)


def _check_count(count: Tensor, input: Tensor, group: dist.ProcessGroup, label: str) -> None:
    if count.item() == 1:
        raise ValueError(
            f"{_rank()}{label}: expected more than 1 value per channel when training, got 1 over all "
            f"{group.size()} ranks (this rank's input has shape {list(input.shape)}): use a larger batch"
        )


def _check_convertible(name: str, module: torch.nn.Module) -> None:
    kind = type(module)
    why = ""
    if isinstance(module, LazyModuleMixin):
        why = "does not know its channels yet: run one batch through the model first"
    elif is_parametrized(module):
        why = "is parametrized: remove the parametrization first"
    elif "forward" in vars(module) or kind.forward not in _KNOWN_FORWARDS:
        why = "has a forward of its own, which would be lost: use imece's SyncBatchNorm in it"
    if why:
        raise ValueError(f"convert_sync_batchnorm: {name or 'the module'}, a {kind.__name__}, {why}")


def _own_group(group: Any) -> dist.ProcessGroup | None:
    """The group itself; ValueError for what dist.new_group returns to a rank outside of the group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{_rank()}SyncBatchNorm expected a process group that holds this rank, got {group!r}: "
            "give it one that does, or None for all ranks"
        )
    return group


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _spread(channels: Tensor, input: Tensor) -> Tensor:
    """[C] -> [1, C, 1, ...], to broadcast over the input."""
    return channels.view(1, -1, *[1] * (input.dim() - 2))


def _rank() -> str:
    return f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
