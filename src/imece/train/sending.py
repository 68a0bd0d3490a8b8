"""Copies tensors from the host to the device without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, of the host, on `device`: the copy is queued on its stream, and the host does not wait.

    Returns the tensor itself if the device is the CPU.
    """
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from memory that is not pinned would wait for the stream. torch keeps `pinned` alive until it is
    # done.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)
