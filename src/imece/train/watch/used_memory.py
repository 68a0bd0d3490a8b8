"""Measures how much memory a rank uses on its device."""

from __future__ import annotations

import time

import psutil
import torch

from imece.mesh import Mesh

_LOOK_S = 1.0  # between two looks at memory that is not torch's: they call the driver, which may be slow


class UsedMemory:
    """Memory of this process."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._process = mesh, psutil.Process()
        self._beside, self._next_s = 0, 0.0

    def most_bytes(self) -> int:
        """On a CPU: used now. On a GPU: torch's peak plus what else was in use lately (context and
        libraries); without the latter if ranks share the GPU, because it could be theirs."""
        device = self._mesh.device
        if device.type != "cuda":
            return int(self._process.memory_info().rss)
        found = torch.cuda.memory_stats_as_nested_dict(device)  # the flat version takes ten times as long
        most = int(found["allocated_bytes"]["all"]["peak"])
        if self._mesh.backend != "nccl":
            return most
        if (now := time.monotonic()) >= self._next_s:
            free, total = torch.cuda.mem_get_info(device)
            self._beside = total - free - int(found["reserved_bytes"]["all"]["current"])
            self._next_s = now + _LOOK_S
        return most + self._beside
