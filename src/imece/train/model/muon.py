"""Muon that iterates all matrices of one shape together on a GPU.

torch's Muon takes one matrix after the other, with some thirty kernels each, so a model of many small
matrices waits for its host to launch them. Together they need only as many for each shape. Nothing else
differs: groups, state and names are torch's. On a CPU, where this gains nothing, the arithmetic is torch's
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

_AT_ONCE_BYTES = 256 * 2**20  # of update directions in bf16; larger matrices keep a GPU busy one by one


class Muon(torch.optim.Muon):
    """Jordan et al. 2024, as torch's Muon."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            is_complex = self._init_group(group, parameters, gradients, momenta)
            how = {
                key: group[key]
                for key in ("weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps")
            }
            if any(not each.is_cuda for each in parameters):
                _muon.muon(
                    parameters, gradients, momenta, lr=group["lr"], adjust_lr_fn=group["adjust_lr_fn"],
                    has_complex=is_complex, **how,
                )  # fmt: skip
                continue
            for chosen in alike(parameters):
                of_shape = [[every[at] for at in chosen] for every in (parameters, gradients, momenta)]
                rate = _muon._adjust_lr(group["lr"], group["adjust_lr_fn"], of_shape[0][0].shape)
                update(*of_shape, lr=group["lr"], rate=rate, **how)
        return loss


def alike(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of parameters with one shape and dtype, as many as are iterated at once."""
    places: defaultdict[object, list[int]] = defaultdict(list)
    for at, each in enumerate(parameters):
        places[each.shape, each.dtype, each.device].append(at)
    for found in places.values():
        most = max(1, _AT_ONCE_BYTES // (2 * parameters[found[0]].numel() or 1))
        for begin in range(0, len(found), most):
            yield found[begin : begin + most]


def update(
    parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], *,
    lr: float, rate: float, weight_decay: float, momentum: float, nesterov: bool,
    ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float,
) -> None:  # fmt: skip
    """Update matrices [rows, columns] of one shape in place. rate: `lr` adjusted to this shape."""
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    ahead = torch._foreach_lerp(gradients, momenta, momentum) if nesterov else momenta
    directions = orthogonalised(torch.stack(list(ahead)), ns_coefficients, ns_steps, eps, torch.bfloat16)
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype)), alpha=-rate)


def orthogonalised(
    grad: Tensor,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Approximately U V^T for grad = U S V^T, [rows, columns] or several such matrices, by Muon's iteration
    (Newton-Schulz, quintic) in `dtype`; same shape.

    torch's products are in bf16. A processor that only emulates bf16 takes nine times as long for them as in
    fp32, and five times for the whole step of a small model.
    """
    a, b, c = ns_coefficients
    is_tall = grad.shape[-2] > grad.shape[-1]
    wide = (grad.mT if is_tall else grad).to(dtype)
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=eps)
    add_product = torch.baddbmm if wide.ndim == 3 else torch.addmm
    for _ in range(ns_steps):
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide
