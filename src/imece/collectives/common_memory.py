"""Memory that all ranks of one host share: what one rank writes, the others read where it lies."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.texts import gather_texts


def common_zeros(nbytes: int, group: dist.ProcessGroup, purpose: str) -> torch.Tensor:
    """uint8 [nbytes], zeros, the same memory on every rank of `group`; all of them call this.

    The memory is freed when the last rank that holds a view of it has let go or ended, however it ended. Only
    collectives order one rank's writes before another's reads.

    TypeError if the group's backend is not "shm"; UserError if the host has too little memory.
    """
    if not isinstance(group, SharedMemoryGroup):
        raise TypeError(f"{purpose}: only ranks on the backend 'shm' have memory in common")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    own = segment.create(nbytes, purpose, populate=True) if group.rank() == 0 else None
    where = [] if own is None else [json.dumps([os.getpid(), own.fd, own.serial])]
    (said,) = gather_texts(where, group, torch.device("cpu"), purpose)[0]
    found = own if own is not None else segment.attach(*json.loads(said), populate=True)
    ops.barrier(group=group)  # now all have it open
    found.close()
    return found.memory
