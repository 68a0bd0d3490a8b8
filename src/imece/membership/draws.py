"""What is drawn at random in a step: a function of the seed, the step and a place, as what is read is.

torch's generators remember all that was drawn before, which a rank that takes over does not know. So they
begin anew before each part of a step, and a step that is made again, a run that is gone on with and a rank
that joins draw what would have been drawn: the masks of dropout, say. No state of a generator is carried.
"""

from __future__ import annotations

import hashlib

import torch


def begin_draws(seed: int, step: int, place: int, device: torch.device) -> None:
    """torch's generators, of the CPU and of `device`, begin anew for what is computed at `place` in `step`.

    place: of a rank among the ranks, or of a sequence in the global batch.
    """
    mixed = hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=8).digest()
    number = int.from_bytes(mixed, "little")
    # Not torch.manual_seed: where CUDA is unused it notes down the stack for later, for 0.2 ms.
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
