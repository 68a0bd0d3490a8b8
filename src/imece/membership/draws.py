"""Random draws in a step: a function of the seed, the step and a place, as the data that is read is.

torch's generators depend on everything drawn before, which a rank that takes over does not know. So they are
seeded anew before each part of a step. A step that is made again, a continued run and a rank that joins then
draw the same: the masks of dropout, say. No state of a generator is carried.
"""

from __future__ import annotations

import hashlib

import torch


def begin_draws(seed: int, step: int, place: int, device: torch.device) -> None:
    """Seed torch's generators, of the CPU and of `device`, for what is computed at `place` in `step`.

    place: of a rank among the ranks, or of a sequence in the global batch.
    """
    mixed = hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=8).digest()
    number = int.from_bytes(mixed, "little")
    # Not torch.manual_seed: if CUDA is unused, it records the stack for later, which takes 0.2 ms.
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
