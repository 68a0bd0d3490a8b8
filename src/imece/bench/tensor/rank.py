"""One rank of `imece bench tensor`: divides the same model in every way, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import imece
from imece.bench import crew
from imece.bench.reference_model import REFERENCE, batch
from imece.bench.tensor.ways import ALONE, Way, build
from imece.collectives import ops


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._mesh = imece.init({"tensor": int(os.environ["WORLD_SIZE"])}, device="cpu")
        self._ways: dict[str, Way] = {}
        self._vocabulary = 0

    def build(self, way: str, vocabulary: int) -> dict[str, Any]:
        """Make the way; ways for another vocabulary are dropped."""
        if vocabulary != self._vocabulary:
            self._ways.clear()
            self._vocabulary = vocabulary
        self._ways[way] = build(way, vocabulary, self._mesh)
        return {}

    def measure(self, way: str, tokens: int, steps: int) -> dict[str, Any]:
        """Average seconds of `steps` training steps after a barrier, and the last loss."""
        if not self._takes_part(way):
            return {"seconds": 0.0}
        made, given = self._ways[way], self._batch(tokens)
        if way != ALONE:
            ops.barrier(group=self._mesh.world_group)
        begin = time.perf_counter()
        for _ in range(steps):
            loss = made.step(*given)
        return {"seconds": (time.perf_counter() - begin) / steps, "loss": float(loss)}

    def memory(self, way: str, tokens: int) -> dict[str, Any]:
        """Peak bytes of forward and backward beyond parameters, gradients and optimizer."""
        if not self._takes_part(way):
            return {"bytes": 0}
        made, given = self._ways[way], self._batch(tokens)
        made.run(*given)  # makes gradients, to which later ones are added
        found = most_bytes(lambda: made.run(*given))
        made.optimizer.zero_grad()
        return {"bytes": found}

    def _takes_part(self, way: str) -> bool:
        return way != ALONE or self._mesh.rank == 0

    def _batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """A batch from the smallest vocabulary, so that it is the same for all ways and on all ranks."""
        drawn = batch(REFERENCE, tokens, seed=0) % self._vocabulary
        return drawn[:, :-1], drawn[:, 1:]


def most_bytes(run: Callable[[], object]) -> int:
    """Peak bytes that torch's allocator gives out during `run`, beyond those before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    results: Any = profiler.profiler
    moves = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for each in sorted(moves, key=lambda each: each.start_ns()):
        now += each.nbytes()
        most = max(most, now)
    return most


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
