"""A long random sequence of all operations, with early and late ranks, finds slots that are reused too soon.

The sequence is the same on all ranks (one seed), but their values and delays differ: ranks dawdle between
calls and inside them. Each result is checked. With fewer than four slots this test fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imece.collectives.shared_memory import board, reducing, shared_empty
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.waiting import Steps
from tests.ranks import run_ranks

CALLS = 300
SIZES = (1, 900, 4096, 4097, 9000, 50_000, 131_072, 200_001)
SLOT_BYTES = reducing.CHUNK_BYTES  # so that these sizes are several pieces; smaller would not take a chunk
KINDS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
Check = Callable[[], None]


def holds(rank: int, at: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32).remainder_(97).add_(1000 * rank + 7 * at)


class Sequence:
    """The random calls of one rank; `choice` is the same on all ranks, `own` is not."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.own = random.Random(1000 * seed + self.rank)
        pairs = [dist.new_group([0, self.size - 1], backend="shm")]
        self.groups: list[tuple[Any, list[int]]] = [
            (dist.group.WORLD, list(range(self.size))),
            (dist.new_group(backend="shm"), list(range(self.size))),
            (pairs[0], [0, self.size - 1]),
        ]
        self.waiting: list[tuple[Any, Check]] = []
        self.checked = 0

    def tensor(self, value: Tensor) -> Tensor:
        """In shared memory or not, as this rank likes: the ranks need not agree."""
        return shared_empty(tuple(value.shape)).copy_(value) if self.own.random() < 0.7 else value.clone()

    def call(self, at: int) -> None:
        group, ranks = self.choice.choice(self.groups)
        kind = self.choice.choice(KINDS)
        numel, root = self.choice.choice(SIZES), self.choice.choice(ranks)
        asynchronous = self.choice.random() < 0.5
        if self.own.random() < 0.15:
            time.sleep(self.own.random() * 0.004)
        if self.rank in ranks:
            work, check = self.start(kind, at, numel, group, ranks, root, asynchronous)
            if asynchronous:
                self.waiting.append((work, check))
            else:
                self.check(check)
        if self.choice.random() < 0.2:
            self.own.shuffle(self.waiting)
            self.wait()

    def wait(self) -> None:
        for work, check in self.waiting:
            work.wait()
            self.check(check)
        self.waiting.clear()

    def check(self, check: Check) -> None:
        check()
        self.checked += 1

    def start(
        self, kind: str, at: int, numel: int, group: Any, ranks: list[int], root: int, asynchronous: bool
    ) -> tuple[Any, Check]:
        count, index = len(ranks), ranks.index(self.rank)
        how: dict[str, Any] = {"group": group, "async_op": asynchronous}
        own = self.tensor(holds(self.rank, at, numel))
        total = torch.stack([holds(rank, at, numel) for rank in ranks]).sum(0)
        if kind == "all_reduce":
            return dist.all_reduce(own, **how), lambda: same(own, total, kind, at, numel)
        if kind == "reduce":
            wanted = total if self.rank == root else own.clone()
            return dist.reduce(own, root, **how), lambda: same(own, wanted, kind, at, numel)
        if kind == "broadcast":
            sent = holds(root, at, numel)
            return dist.broadcast(own, root, **how), lambda: same(own, sent, kind, at, numel)
        whole = self.tensor(torch.zeros(count * numel))
        if kind == "all_gather":
            wanted = torch.cat([holds(rank, at, numel) for rank in ranks])
            return all_gather(whole, own, **how), lambda: same(whole, wanted, kind, at, numel)
        whole.copy_(torch.cat([holds(self.rank, at + to, numel) for to in range(count)]))
        if kind == "reduce_scatter":
            wanted = torch.stack([holds(rank, at + index, numel) for rank in ranks]).sum(0)
            return reduce_scatter(own, whole, **how), lambda: same(own, wanted, kind, at, numel)
        target = self.tensor(torch.zeros(count * numel))
        wanted = torch.cat([holds(rank, at + index, numel) for rank in ranks])
        return dist.all_to_all_single(target, whole, **how), lambda: same(target, wanted, kind, at, numel)


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def same(found: Tensor, wanted: Tensor, *what: object) -> None:
    wrong = (found != wanted).nonzero().flatten()
    assert not len(wrong), (
        f"rank {dist.get_rank()}: {what}: {len(wrong)} elements differ, the first at {int(wrong[0])}: "
        f"{float(found[wrong[0]])} instead of {float(wanted[wrong[0]])}"
    )


def dawdle(own: random.Random) -> None:
    """Make this rank late at random where it has waited for the others: before it reads what they sent."""
    everybody = Engine.everybody

    def late(self: Engine, clock: int) -> Steps:
        yield from everybody(self, clock)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)

    Engine.everybody = late  # type: ignore[method-assign]


def run_sequence(seed: int) -> int:
    board.SLOT_BYTES = board.CROWDED_SLOT_BYTES = SLOT_BYTES
    dist.init_process_group("shm")
    dawdle(random.Random(dist.get_rank()))
    anchor = shared_empty(1)  # keeps the arena
    sequence = Sequence(seed)
    for at in range(CALLS):
        sequence.call(at)
    sequence.wait()
    del anchor
    dist.destroy_process_group()
    return sequence.checked


def test_random_sequences() -> None:
    checked = run_ranks(run_sequence, 3, args=(1,), backend=None, timeout_s=200)
    assert checked[0] == CALLS and checked[2] == CALLS and checked[1] > CALLS // 2
