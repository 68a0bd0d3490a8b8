"""The torch.distributed backend "shm": CPU ranks of one host, over memory that all of them map."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from imece.collectives.shared_memory.arena import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup

__all__ = ["SharedMemoryGroup", "register", "shared_empty"]


def register() -> None:
    """Make "shm" known to torch.distributed. Called on `import imece`; a second call does nothing."""
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    return SharedMemoryGroup(store, rank, size, timeout)
