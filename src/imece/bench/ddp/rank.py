"""One rank of `imece bench ddp`: trains the same model on two backends in one process."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from imece.bench import crew
from imece.bench.reference_model import Shape, batch, new_decoder, optimizer_of

BACKENDS = ("shm", "gloo")
WRAP = "IMECE_BENCH_WRAP"  # "ddp" or "fully_shard"

_SHAPE = Shape(vocabulary=2048, width=320, layers=8, heads=5, length=128)  # 11M parameters


class Rank:
    """Methods are orders."""

    def __init__(self, wrap: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        world = dist.group.WORLD
        assert world is not None
        groups = {"gloo": world, "shm": dist.new_group(backend="shm")}
        self._groups = groups
        self._models = {backend: _wrapped(wrap, groups[backend]) for backend in BACKENDS}
        self._optimizers = {backend: optimizer_of(model) for backend, model in self._models.items()}
        self._steps = dict.fromkeys(BACKENDS, 0)
        self._parameters = sum(parameter.numel() for parameter in new_decoder(_SHAPE).parameters())

    def describe(self) -> dict[str, Any]:
        """The model's size."""
        return {"parameters": self._parameters, "tokens": _SHAPE.length}

    def measure(self, backend: str, steps: int) -> dict[str, Any]:
        """Average seconds of `steps` training steps after a barrier, and the last loss."""
        model, optimizer = self._models[backend], self._optimizers[backend]
        dist.barrier(self._groups[backend])
        begin = time.perf_counter()
        for _ in range(steps):
            seed = self._steps[backend] * dist.get_world_size() + dist.get_rank()
            loss = model(batch(_SHAPE, _SHAPE.length, seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self._steps[backend] += 1
        seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "loss": float(loss.detach())}


def _wrapped(wrap: str, group: dist.ProcessGroup) -> nn.Module:
    model = new_decoder(_SHAPE)
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


if __name__ == "__main__":  # started by a crew
    crew.serve(lambda: Rank(os.environ[WRAP]))
