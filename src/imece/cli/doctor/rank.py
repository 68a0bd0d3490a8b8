"""One rank of `imece doctor`: runs every collective once on a backend, and compares with a reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import imece  # noqa: F401 - registers the backend "shm"
from imece.bench import crew
from imece.collectives import links, ops
from imece.collectives.link_types import table_line
from imece.world import LOOPBACK

COLLECTIVES = ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "send/recv")
_TIMEOUT = timedelta(seconds=20)
_NUMEL = 1000  # in each rank's part: an odd number of cache lines


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)

    def open(self, backend: str) -> dict[str, Any]:
        """Make `backend` the default group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            backend, store=dist.PrefixStore(backend, self._store), rank=self._rank, world_size=self._size,
            timeout=_TIMEOUT,
        )  # fmt: skip
        dist.barrier()
        return {}

    def run(self, collective: str) -> dict[str, Any]:
        """Run one of COLLECTIVES; returns whether the result is right."""
        output, call, expected = self._cases()[collective]
        call()
        return {"right": torch.equal(output, expected)}

    def links(self, ranks: int) -> dict[str, Any]:
        """Latency and bandwidth between the first `ranks` of the default group, also as a line. The other
        ranks return at once."""
        group = dist.new_group(list(range(ranks)))
        if self._rank >= ranks:
            return {}
        found = links.measure(group)
        assert found.inside is not None
        return {"line": table_line(found), **asdict(found.inside)}

    def _cases(self) -> dict[str, tuple[torch.Tensor, Callable[[], object], torch.Tensor]]:
        """Collective -> (its output, its call, what is then expected in the output)."""
        rank, size, whole = self._rank, self._size, _NUMEL * self._size
        mine, part, every = self._values(rank), torch.empty(_NUMEL), torch.empty(whole)
        total, own = self._sum(), slice(rank * _NUMEL, (rank + 1) * _NUMEL)
        left, right = (rank - 1) % size, (rank + 1) % size
        return {
            "broadcast": (mine, lambda: ops.broadcast(mine, size - 1), self._values(size - 1)),
            "reduce": (mine, lambda: ops.reduce(mine, 0), self._values(rank) if rank else total),
            "all_reduce": (mine, lambda: ops.all_reduce(mine), total),
            "reduce_scatter": (
                part, lambda: ops.reduce_scatter(part, self._values(rank, whole)), self._sum(whole)[own]
            ),
            "all_gather": (
                every, lambda: ops.all_gather(every, mine),
                torch.cat([self._values(each) for each in range(size)]),
            ),
            "send/recv": (  # round the ring, all ranks at the same time
                part, lambda: ops.exchange([ops.Send(mine, right), ops.Recv(part, left)]), self._values(left)
            ),
        }  # fmt: skip

    def _values(self, rank: int, numel: int = _NUMEL) -> torch.Tensor:
        """The values of `rank`: small whole numbers, so that every sum is exact."""
        return (torch.arange(numel) % 101 + 7 * rank).to(torch.float32)

    def _sum(self, numel: int = _NUMEL) -> torch.Tensor:
        return torch.stack([self._values(rank, numel) for rank in range(self._size)]).sum(0)


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
