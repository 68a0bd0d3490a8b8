"""One rank of `imece bench pipeline`: cuts the same layers again for each schedule, and steps them."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import imece
from imece.bench import crew
from imece.bench.reference_model import Block, Shape
from imece.collectives import ops

BLOCKS = 8
SHAPE = Shape(vocabulary=1, width=192, layers=BLOCKS, heads=6, length=128)
WAIT_S = 0.01
"""Seconds of an emulated block's forward; its backward takes twice that."""
EMULATED = "IMECE_BENCH_EMULATED"  # "1": blocks wait instead of computing


class Wait(nn.Module):
    """A block that takes time but no core."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # otherwise only its shape is wanted
            time.sleep(WAIT_S)
        scaled = x * self.factor
        if scaled.requires_grad:
            scaled.register_hook(_wait_in_backward)
        return scaled


def _wait_in_backward(gradient: Tensor) -> None:
    if type(gradient) is Tensor:
        time.sleep(2 * WAIT_S)


class Kept:
    """Counts the bytes that a graph keeps for backward, without parameters: each piece of memory once."""

    def __init__(self, parameters: set[int]) -> None:
        """parameters: addresses of their memory."""
        self._parameters = parameters
        self._uses: Counter[int] = Counter()
        self.now = self.most = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held[0])

    def _pack(self, tensor: Tensor) -> _Held:
        held, memory = _Held([tensor]), tensor.untyped_storage()
        address, nbytes = memory.data_ptr(), memory.nbytes()
        if address not in self._parameters:
            if not self._uses[address]:
                self.now += nbytes
                self.most = max(self.most, self.now)
            self._uses[address] += 1
            weakref.finalize(held, self._let_go, address, nbytes)
        return held

    def _let_go(self, address: int, nbytes: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self.now -= nbytes


class _Held(list[Tensor]):
    """What the graph keeps instead of a tensor: a list, which a weak reference can point to."""


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._emulated = os.environ[EMULATED] == "1"
        self._mesh = imece.init({"pipeline": int(os.environ["WORLD_SIZE"])}, device="cpu")

    def build(self, schedule: str, micro_batches: int) -> dict[str, Any]:
        """Cut the model and run it once, so that torch allocates its receive buffers."""
        torch.manual_seed(0)
        blocks = [Wait() if self._emulated else Block(SHAPE) for _ in range(BLOCKS)]
        self._pipeline = imece.Pipeline(
            blocks, self._mesh, micro_batches=micro_batches, schedule=schedule, loss=nn.functional.mse_loss
        )
        self._inputs = torch.randn(micro_batches, SHAPE.length, SHAPE.width)
        addresses = {each.untyped_storage().data_ptr() for each in self._pipeline.part.parameters()}
        kept = Kept(addresses)
        self._step()
        with kept.hooks():
            self._step()
        return {"kept_bytes": kept.most}

    def step(self) -> dict[str, Any]:
        """When this rank began and ended its work, by the host's clock in seconds, and how long it was
        busy."""
        ops.barrier(group=self._mesh.world_group)
        self._step()
        spans = self._pipeline.spans
        return {
            "start_s": min(each.start_s for each in spans),
            "end_s": max(each.end_s for each in spans),
            "busy_s": sum(each.end_s - each.start_s for each in spans),
        }

    def _step(self) -> None:
        self._pipeline.step(self._inputs, self._inputs)
        self._pipeline.part.zero_grad()


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
