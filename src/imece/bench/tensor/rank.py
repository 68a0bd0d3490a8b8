"""One rank of `imece bench tensor`: the same model divided in every way, in one process."""

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
    """The orders of a rank."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._mesh = imece.init({"tensor": int(os.environ["WORLD_SIZE"])}, device="cpu")
        self._ways: dict[str, Way] = {}
        self._vocabulary = 0

    def build(self, way: str, vocabulary: int) -> dict[str, Any]:
        """Make it; those for another vocabulary are forgotten."""
        if vocabulary != self._vocabulary:
            self._ways.clear()
            self._vocabulary = vocabulary
        self._ways[way] = build(way, vocabulary, self._mesh)
        return {}

    def measure(self, way: str, tokens: int, steps: int) -> dict[str, Any]:
        """Seconds of one of `steps` training steps after a barrier, and the last loss."""
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
        """Bytes that forward and backward have at most besides parameters, their gradients and optimizer."""
        if not self._takes_part(way):
            return {"bytes": 0}
        made, given = self._ways[way], self._batch(tokens)
        made.run(*given)  # from here on there are gradients, to which others are added
        found = most_bytes(lambda: made.run(*given))
        made.optimizer.zero_grad()
        return {"bytes": found}

    def _takes_part(self, way: str) -> bool:
        return way != ALONE or self._mesh.rank == 0

    def _batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Of the smallest vocabulary, so the same for all; the same on all ranks."""
        drawn = batch(REFERENCE, tokens, seed=0) % self._vocabulary
        return drawn[:, :-1], drawn[:, 1:]


def most_bytes(run: Callable[[], object]) -> int:
    """What torch's allocator gives out meanwhile, and has not got back, at most."""
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


if __name__ == "__main__":  # a crew has started it
    crew.serve(Rank)
