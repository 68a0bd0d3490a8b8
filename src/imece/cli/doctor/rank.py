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
        return {"right": self._cases()[collective]()}

    def links(self, ranks: int) -> dict[str, Any]:
        """Latency and bandwidth between the first `ranks` of the default group, also as a line. The other
        ranks return at once."""
        group = dist.new_group(list(range(ranks)))
        if self._rank >= ranks:
            return {}
        found = links.measure(group)
        assert found.inside is not None
        return {"line": table_line(found), **asdict(found.inside)}

    def _cases(self) -> dict[str, Callable[[], bool]]:
        return {
            "broadcast": self._broadcast,
            "reduce": self._reduce,
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "send/recv": self._send_and_receive,
        }

    def _values(self, rank: int, numel: int = _NUMEL) -> torch.Tensor:
        """The values of `rank`: small whole numbers, so that every sum is exact."""
        return (torch.arange(numel) % 101 + 7 * rank).to(torch.float32)

    def _sum(self, numel: int = _NUMEL) -> torch.Tensor:
        return torch.stack([self._values(rank, numel) for rank in range(self._size)]).sum(0)

    def _broadcast(self) -> bool:
        tensor = self._values(self._rank)
        ops.broadcast(tensor, self._size - 1)
        return torch.equal(tensor, self._values(self._size - 1))

    def _reduce(self) -> bool:
        tensor = self._values(self._rank)
        ops.reduce(tensor, 0)
        return torch.equal(tensor, self._sum() if self._rank == 0 else self._values(self._rank))

    def _all_reduce(self) -> bool:
        tensor = self._values(self._rank)
        ops.all_reduce(tensor)
        return torch.equal(tensor, self._sum())

    def _reduce_scatter(self) -> bool:
        whole = _NUMEL * self._size
        output = torch.empty(_NUMEL)
        ops.reduce_scatter(output, self._values(self._rank, whole))
        return torch.equal(output, self._sum(whole)[self._rank * _NUMEL : (self._rank + 1) * _NUMEL])

    def _all_gather(self) -> bool:
        output = torch.empty(_NUMEL * self._size)
        ops.all_gather(output, self._values(self._rank))
        return torch.equal(output, torch.cat([self._values(rank) for rank in range(self._size)]))

    def _send_and_receive(self) -> bool:
        """Send round the ring, all ranks at the same time."""
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        received = torch.empty(_NUMEL)
        ops.exchange([ops.Send(self._values(self._rank), right), ops.Recv(received, left)])
        return torch.equal(received, self._values(left))


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
