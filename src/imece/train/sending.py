"""From the host to the device that computes, while that still has work to do."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, of the host, on `device`: behind what its stream has to do, for which the host does not wait.

    The tensor itself if that is the CPU.
    """
    if device.type != "cuda":
        return tensor.to(device)
    # Of memory that is not pinned a copy waits for the stream. torch keeps this until it is over.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)
