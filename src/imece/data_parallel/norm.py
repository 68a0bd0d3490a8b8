"""The norm of gradients, which does not depend on which rank holds which of them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

import torch

from imece.listing import kind_of

# Elements that have an fp64 copy at a time: as many as fit a core's cache, or enough to keep a GPU busy.
_PIECE_ON_CPU, _PIECE_ON_GPU = 2**18, 2**24
_STEPS = 2.0**40  # an fp64 norm is rounded to this many steps per power of two


def check_limit(max_norm: object) -> None:
    """TypeError for what is no number, such as parameters in its place; ValueError below 0, and for NaN."""
    if not isinstance(max_norm, Real | torch.Tensor):
        raise TypeError(
            f"model.clip_grad_norm_({kind_of(max_norm)}): the largest norm, as 1.0, and no parameters"
        )
    if not float(max_norm) >= 0:
        raise ValueError(f"model.clip_grad_norm_({max_norm}): the largest norm, from 0")


def norm_of(tensors: Iterable[torch.Tensor], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements of all tensors, an fp64 scalar. The norm of several ranks' norms is the norm
    of all.

    norm_type: above 0, otherwise ValueError; inf is the largest magnitude.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: a norm of gradients is of a number above 0, or inf")
    norms = [_norm(each, norm_type) for each in tensors if each.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    if len({each.device for each in norms}) > 1:  # a module's layers may be on several
        norms = [each.to(device) for each in norms]
    found: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return found.to(device)  # the norm of parts in the host's memory is computed there


def rounded(norm: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """An fp64 norm as fp32 or, if wide, as fp64.

    It is rounded to fewer bits than it has: the last ones depend on which rank holds which part.
    """
    if not wide:
        return norm.float()
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp((mantissa * _STEPS).round() / _STEPS, exponent)


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """In pieces: for an fp64 norm torch copies the whole tensor to fp64 first."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    size = _PIECE_ON_CPU if tensor.is_cpu else _PIECE_ON_GPU
    found: torch.Tensor
    if tensor.numel() <= size:
        found = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
        return found
    pieces = tensor.detach().reshape(-1).split(size)
    # A list of single results would be allocated between the copies, and no copy could reuse the memory of
    # the last.
    norms = torch.empty(len(pieces), dtype=torch.float64, device=tensor.device)
    for piece, norm in zip(pieces, norms.unbind(), strict=True):
        torch.linalg.vector_norm(piece, norm_type, dtype=dtype, out=norm)
    found = torch.linalg.vector_norm(norms, norm_type)
    return found
