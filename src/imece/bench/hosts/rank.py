"""One rank of `imece bench hosts`: times calls and training steps as ordered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.bench import crew
from imece.bench.hosts import step as hosts_step
from imece.collectives import checks, ops
from imece.collectives.fingerprint import Announced

WAYS = ("gloo", "ring", "hierarchical fp32", "hierarchical bf16", "hierarchical int8")
_PATTERN = 251


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._mesh = imece.init(device="cpu")
        self._tensor = torch.empty(0)  # fp32[numel]
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self._steps: dict[str, int] = {}  # by way, so that all ways see the same batches

    def prepare(self, size_bytes: int) -> dict[str, Any]:
        """Allocate, and run each way once; returns which ways give the right sum."""
        self._tensor = imece.shared_empty(size_bytes // 4)
        pattern = (torch.arange(size_bytes // 4) % _PATTERN).to(torch.float32)
        ranks = self._mesh.world_size
        expected = pattern * ranks + ranks * (ranks - 1) / 2
        right = {}
        for way in WAYS:
            self._tensor.copy_(pattern).add_(self._mesh.rank)
            self._all_reduce(way)()
            of_itself = 0.02 if way.endswith("bf16") else 0.0  # both have 8 bits of precision
            of_largest = 0.02 * float(expected.max()) if way.endswith("int8") else 0.0
            right[way] = torch.allclose(self._tensor, expected, rtol=of_itself, atol=of_largest)
        self._tensor.zero_()
        return {"right": right}

    def measure(self, way: str) -> dict[str, Any]:
        """Seconds of one all-reduce after a barrier."""
        return self._timed(self._all_reduce(way))

    def broadcast(self, parts: int) -> dict[str, Any]:
        """Seconds of a pipelined ring broadcast from rank 0 after a barrier."""
        self._tensor.fill_(float(self._mesh.rank == 0))
        answer = self._timed(lambda: ops.broadcast(self._tensor, 0, schedule="pipelined_ring", parts=parts))
        return answer | {"right": bool((self._tensor == 1).all())}

    def train(self, way: str, tokens: int, steps: int) -> dict[str, Any]:
        """Average seconds and bytes sent over `steps` training steps, and the last loss.

        One more step runs before, so that work that a step leaves for the next forward is under way when
        timing begins, as it is when timing ends.
        """
        if way not in self._models:
            self._models[way] = hosts_step.build(way)
        model, optimizer = self._models[way]
        first, made = self._steps.get(way, 0), 1 + steps
        self._steps[way] = first + made
        ranks = self._mesh.world_size
        seeds = [at * ranks + self._mesh.rank for at in range(first, first + made)]
        dist.barrier()
        sent = hosts_step.sent_bytes()
        hosts_step.train(model, optimizer, tokens, seeds[:1])
        begin = time.perf_counter()
        loss = hosts_step.train(model, optimizer, tokens, seeds[1:])
        seconds = (time.perf_counter() - begin) / steps
        hosts_step.settle(model)
        dist.barrier()
        return {"seconds": seconds, "loss": loss, "sent_bytes": (hosts_step.sent_bytes() - sent) / made}

    def check(self) -> dict[str, Any]:
        """Seconds of the check before each call."""
        checker = checks.checker(self._mesh.world_group)
        assert checker is not None, "prepare makes calls, and the first one makes the checker"
        tensor = self._tensor
        announced = Announced("all_reduce", tensor.dtype, tensor.shape, "sum")
        return self._timed(lambda: checker.begin(announced).wait())

    def link(self) -> dict[str, Any]:
        """Seconds that the tensor takes from rank 0 to rank 1, as rank 1 sees it."""
        dist.barrier()
        begin = time.perf_counter()
        if self._mesh.rank == 0:
            dist.send(self._tensor, 1)
        elif self._mesh.rank == 1:
            dist.recv(self._tensor, 0)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds if self._mesh.rank == 1 else 0.0}

    def _all_reduce(self, way: str) -> Callable[[], Any]:
        tensor = self._tensor
        return {
            "gloo": lambda: dist.all_reduce(tensor),
            "ring": lambda: ops.all_reduce(tensor, schedule="ring"),
            "hierarchical fp32": lambda: ops.all_reduce(tensor, schedule="hierarchical"),
            "hierarchical bf16": lambda: ops.all_reduce(tensor, schedule="hierarchical", wire="bf16"),
            "hierarchical int8": lambda: ops.all_reduce(tensor, schedule="hierarchical", wire="int8"),
        }[way]

    def _timed(self, call: Callable[[], Any]) -> dict[str, Any]:
        dist.barrier()
        begin = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - begin}


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
