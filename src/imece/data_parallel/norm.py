"""The norm of gradients, the same whoever holds which of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements whose fp64 copies are there at a time: what a core's cache holds, or enough to keep a GPU busy.
_PIECE_ON_CPU, _PIECE_ON_GPU = 2**18, 2**24
_STEPS = 2.0**40  # to which an fp64 norm is rounded, of a power of two


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of all squares, fp64 scalar: rounded to fp32, it does not depend on who holds which of them."""
    norms = [_norm(each) for each in tensors]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).square().sum().to(device)  # of parts in the host's memory it is made there


def norm_from(squares: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """The root of the sum of all squares: fp32, or wide, fp64.

    To fewer bits than the sum has: its last ones depend on who holds which part.
    """
    norm = squares.sqrt()
    if not wide:
        return norm.float()
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp((mantissa * _STEPS).round() / _STEPS, exponent)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """In pieces: torch copies all that it takes a norm of in fp64 to fp64 first."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    size = _PIECE_ON_CPU if tensor.is_cpu else _PIECE_ON_GPU
    found: torch.Tensor
    if tensor.numel() <= size:
        found = torch.linalg.vector_norm(tensor, dtype=dtype)
        return found
    pieces = tensor.detach().reshape(-1).split(size)
    # One by one they would be allocated between the copies, and leave none the room of the one before it.
    norms = torch.empty(len(pieces), dtype=torch.float64, device=tensor.device)
    for piece, norm in zip(pieces, norms.unbind(), strict=True):
        torch.linalg.vector_norm(piece, dtype=dtype, out=norm)
    found = torch.linalg.vector_norm(norms)
    return found
