"""The norm of gradients, the same whoever holds which of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Elements whose fp64 copies are there at a time: what a core's cache holds, or enough to keep a GPU busy.
_PIECE_ON_CPU, _PIECE_ON_GPU = 2**18, 2**24
_STEPS = 2.0**40  # to which an fp64 norm is rounded, of a power of two


def norm_of(tensors: Iterable[torch.Tensor], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """Of all elements of all tensors, fp64 scalar: that of the norms of what each holds is that of all.

    ValueError for a norm_type that is not above 0; inf is the largest magnitude.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: a norm of gradients is of a number above 0, or inf")
    norms = [_norm(each, norm_type) for each in tensors if each.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    found: torch.Tensor = torch.linalg.vector_norm(torch.stack(_on_one(norms, device)), norm_type)
    return found.to(device)  # of parts in the host's memory it is made there


def _on_one(norms: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """On the same device, `device` if there are several: a module may have its layers on more than one."""
    return norms if len({each.device for each in norms}) == 1 else [each.to(device) for each in norms]


def rounded(norm: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """A norm in fp64 in fp32, or wide, in fp64.

    To fewer bits than it has: its last ones depend on who holds which part.
    """
    if not wide:
        return norm.float()
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp((mantissa * _STEPS).round() / _STEPS, exponent)


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """In pieces: torch copies all that it takes a norm of in fp64 to fp64 first."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    size = _PIECE_ON_CPU if tensor.is_cpu else _PIECE_ON_GPU
    found: torch.Tensor
    if tensor.numel() <= size:
        found = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
        return found
    pieces = tensor.detach().reshape(-1).split(size)
    # One by one they would be allocated between the copies, and leave none the room of the one before it.
    norms = torch.empty(len(pieces), dtype=torch.float64, device=tensor.device)
    for piece, norm in zip(pieces, norms.unbind(), strict=True):
        torch.linalg.vector_norm(piece, norm_type, dtype=dtype, out=norm)
    found = torch.linalg.vector_norm(norms, norm_type)
    return found
