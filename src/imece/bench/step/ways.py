"""Ways to train one model on all ranks, each behind the same three calls: forward, backward, optimizer."""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import imece
from imece.bench.collectives.contenders import deepspeed_is_locked, remove_deepspeed_segments
from imece.bench.reference_model import REFERENCE, Shape, new_decoder, optimizer_of
from imece.data_parallel.sharding.cast import MixedPrecision
from imece.data_parallel.sharding.offload import Direct, Offload

ALONE, OURS, OVERLAPPED = "no-sync", "imece", "imece-overlap"
WAITING = "wait-only"
"""As ALONE, but the ranks wait for each other after each backward: what no synchronisation can go below."""
APART = (ALONE, WAITING)
"""Ways in which each rank trains a model of its own."""
ONE_PROCESS = "data-parallel"
"""torch's DataParallel: one process with the batches of all ranks, and as many threads."""
OTHERS = ("torch-shm", "torch-gloo", "torch-gloo-view", "accelerate", "fabric", ONE_PROCESS)
WAYS = (*APART, OURS, OVERLAPPED, *OTHERS)
STRATEGIES = ("replicate", "zero1", "zero2", "zero3", "zero3-gather")
SHARDED_OTHERS = ("torch-zero1", "fully-shard", "deepspeed-zero3")
STRATEGY_WAYS = (*APART, *STRATEGIES, *SHARDED_OTHERS)
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "deepspeed-zero3": "deepspeed"}


@dataclass
class Way:
    """One model and its optimizer."""

    model: nn.Module
    optimizer: Any
    """A torch optimizer, or the wrapper of Accelerate, Fabric or DeepSpeed around one."""
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward


def missing(way: str) -> str | None:
    """Why `way` cannot be measured here; None if it can."""
    package = PACKAGES.get(way)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install {package})"
    if way == ONE_PROCESS and torch.accelerator.is_available():
        return "torch's DataParallel would take the GPUs"
    return deepspeed_is_locked() if package == "deepspeed" else None


class Builder:
    """Makes the ways of one rank; all ranks must make the same ones in the same order."""

    def __init__(self) -> None:
        self._shm: dist.ProcessGroup | None = None

    def build(self, way: str) -> Way:
        """A separate reference model with its optimizer, for training in one of WAYS."""
        model = new_decoder(REFERENCE)
        if way == "accelerate":
            return _accelerate(model)
        if way == "fabric":
            return _fabric(model)
        if way in STRATEGIES:
            return self.build_strategy(way, REFERENCE)
        if way == "torch-zero1":
            return _zero_redundancy(model)
        if way == "fully-shard":
            return _fully_shard(model)
        if way == "deepspeed-zero3":
            return _deepspeed(model)
        wrapped = self.wrap(way, model)
        backward = self._backward_and_wait if way == WAITING else torch.Tensor.backward
        return Way(wrapped, optimizer_of(wrapped), backward)

    def build_strategy(
        self, way: str, shape: Shape, precision: MixedPrecision | None = None, offload: str | None = None
    ) -> Way:
        """A model of this shape in one of STRATEGIES. precision: None for the model's own dtypes.

        offload: to memory of the same kind, but counted as the host's.
        """
        model = new_decoder(shape)
        name, _, gather = way.partition("-")
        group = self._shared_memory()
        hosted = Offload(offload == "parameters", Direct(), _empty) if offload is not None else None
        made = imece.parallelize(
            model, optimizer_of(model), name, group, gather=bool(gather), precision=precision, offload=hosted
        )
        return Way(*made)

    def wrap(self, way: str, model: nn.Module) -> nn.Module:
        """`model` in the wrapper of `way`, for ways that are only a wrapper."""
        if way in APART:
            return model
        if way in (OURS, OVERLAPPED):
            overlap = True if way == OVERLAPPED else None
            return imece.DistributedDataParallel(model, process_group=self._shared_memory(), overlap=overlap)
        if way == ONE_PROCESS:
            return nn.DataParallel(model)
        group = self._shared_memory() if way == "torch-shm" else None
        return DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=way == "torch-gloo-view"
        )

    def _backward_and_wait(self, loss: torch.Tensor) -> None:
        loss.backward()
        dist.barrier(self._shared_memory())

    def _shared_memory(self) -> dist.ProcessGroup:
        """The group on shm, made on first use, so that ways without it do not pay for it."""
        if self._shm is None:
            self._shm = dist.new_group(backend="shm")
        return self._shm


def _empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def _zero_redundancy(model: nn.Module) -> Way:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    plain = optimizer_of(wrapped)
    options = {name: plain.defaults[name] for name in ("lr", "fused")}
    return Way(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), type(plain), **options))


def _fully_shard(model: nn.Module) -> Way:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return Way(model, optimizer_of(model))


class _EngineSteps:
    """DeepSpeed's engine as an optimizer; its step also zeroes gradients."""

    def __init__(self, engine: Any) -> None:
        self.step: Callable[[], object] = engine.step

    def zero_grad(self) -> None:
        """Nothing to do: `step` has zeroed them."""


def _deepspeed(model: nn.Module) -> Way:
    """ZeRO-3 with DeepSpeed's defaults, on torch's fused AdamW: its own must be compiled."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed import initialize

    atexit.register(remove_deepspeed_segments, dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # default 1.0, but no other way clips
    }  # fmt: skip
    engine, *_ = initialize(
        model=model, optimizer=optimizer_of(model), config=config, dist_init_required=False
    )
    return Way(engine, _EngineSteps(engine), engine.backward)


def _accelerate(model: nn.Module) -> Way:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    return Way(prepared, optimizer, accelerator.backward)


def _fabric(model: nn.Module) -> Way:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    fabric = Fabric(
        accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), plugins=[TorchElasticEnvironment()]
    )
    fabric.launch()
    assert fabric.world_size == dist.get_world_size()
    prepared, optimizer = fabric.setup(model, optimizer_of(model))
    return Way(prepared, optimizer, fabric.backward)
