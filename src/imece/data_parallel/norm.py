"""The norm of gradients, the same whoever holds which of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of all squares, fp64 scalar: rounded to fp32, it does not depend on who holds which of them."""
    norms = [
        torch.linalg.vector_norm(each, dtype=torch.complex128 if each.is_complex() else torch.float64)
        for each in tensors
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).square().sum().to(device)  # of parts in the host's memory it is made there
