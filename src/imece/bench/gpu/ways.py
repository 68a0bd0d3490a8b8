"""The one rank of `imece bench gpu`: makes, times and drops one way of training after another on its device.

Only one exists at a time, so that peak memory is its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

import imece
from imece.models.cross_entropy import cross_entropy
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

BARE, OURS, TORCH, COMPILED = "bare", "imece", "torch-ddp", "imece-compiled"
ZERO3, FULLY_SHARD = "zero3", "fully-shard"
FLAT, FUSED, FOREACH = "flat-shards", "fused", "foreach"
WAYS = (BARE, OURS, TORCH)
STRATEGIES = ("zero1", "zero2", ZERO3, FULLY_SHARD)
OPTIMIZERS = (FLAT, FUSED, FOREACH)
_WARM_UP = 3  # steps that make buckets and optimizer states, and compile
_LR = 1e-4
_STEP = "step"  # its name in the profile
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_COPIES = ("cudaMemcpy", "cudaMemcpy2D")  # the copies that block the host


@dataclass
class Timed:
    """Figures for some steps of one way."""

    seconds: float  # per step
    loss: float  # of the second step: later losses differ by accumulated rounding
    peak_bytes: int | None  # allocated at most; None: not counted on a CPU
    syncs: float | None = None  # per step: how often the host waited for the GPU


@dataclass
class Trainee:
    """A model with its optimizer and batch."""

    model: nn.Module
    optimizer: Optimizer
    batch: torch.Tensor  # int64 [2, sequences, seq]: inputs and targets

    def backward(self) -> torch.Tensor:
        """Gradients of a batch; returns its loss."""
        loss = cross_entropy(self.model(self.batch[0]), self.batch[1])
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        """One whole step; returns the loss."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Rank:
    """Makes the ways. torch's own wrapper has a group of its own, on the backend that is meant for it."""

    def __init__(self, device: str, shape: TransformerConfig, sequences: int) -> None:
        self.mesh = imece.init(device=device)
        self.device, self._shape = self.mesh.device, shape
        self._group = dist.new_group([0], backend="nccl" if self.on_gpu else "gloo")
        tokens = torch.randint(
            shape.vocab_size, (2, sequences, shape.max_seq), generator=torch.Generator().manual_seed(1)
        )
        self._batch = tokens.to(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether this measures a GPU, not a trial on the CPU."""
        return self.device.type == "cuda"

    def train(self, way: str, steps: int, *, count_syncs: bool = False, trace: str = "") -> Timed:
        """Train in one of WAYS or STRATEGIES, or COMPILED, for some steps after a warm-up.

        count_syncs: run as many steps again in torch's profiler and count the host's waits. trace: the file
        for the profile (Chrome trace JSON); empty for none.
        """
        trainee = self._wrapped(way)
        losses = [trainee.step() for _ in range(_WARM_UP)]
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = self._seconds(trainee.step, steps)
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None
        found = Timed(seconds, float(losses[1]), peak)
        if count_syncs and self.on_gpu:
            found.syncs = self._profiled_syncs(trainee, steps, trace)
        del trainee
        self._clear()
        return found

    def _profiled_syncs(self, trainee: Trainee, steps: int, trace: str) -> float | None:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(steps):
                with record_function(_STEP):
                    trainee.step()
        if trace:
            Path(trace).parent.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(trace)
        return syncs_of(profiled.events() or ())

    def step_alone(self, way: str, steps: int) -> float:
        """Seconds of one step of AdamW, in one of OPTIMIZERS, without forward and backward."""
        model: nn.Module = self._model()
        optimizer: Optimizer = self._adamw(model, foreach=way == FOREACH)
        if way == FLAT:
            model, optimizer = imece.parallelize(model, optimizer, "zero1")
        Trainee(model, optimizer, self._batch[:, :1]).backward()  # its gradients stay for all steps
        for _ in range(_WARM_UP):
            optimizer.step()
        seconds = self._seconds(optimizer.step, steps)
        del model, optimizer
        self._clear()
        return seconds

    def _wrapped(self, way: str) -> Trainee:
        if way in STRATEGIES:
            return self._sharded(way)
        model: nn.Module = self._model()
        optimizer = self._adamw(model)
        if way == COMPILED:
            imece.compile_blocks(model)
        if way == TORCH:
            model = DistributedDataParallel(model, process_group=self._group, gradient_as_bucket_view=True)
        elif way != BARE:
            model = imece.DistributedDataParallel(model)
        return Trainee(model, optimizer, self._batch)

    def _sharded(self, way: str) -> Trainee:
        """With masters in fp32, all of them on the one rank: what is left is the cost of the strategy
        itself."""
        from torch.distributed.device_mesh import DeviceMesh  # here, because importing them takes a second
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model, bf16 = self._model(torch.float32), torch.bfloat16
        if way != FULLY_SHARD:
            precision = imece.MixedPrecision(param=bf16, reduce=bf16)
            return Trainee(
                *imece.parallelize(model, self._adamw(model), way, precision=precision), self._batch
            )
        ranks = DeviceMesh.from_group(self._group, self.device.type)
        # Inputs of blocks are not cast, so rotations stay in fp32, as in the other ways.
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, cast_forward_inputs=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=ranks, mp_policy=policy)
        return Trainee(model, self._adamw(model), self._batch)

    def _model(self, dtype: torch.dtype = torch.bfloat16) -> Transformer:
        torch.manual_seed(0)
        with torch.device(self.device):
            return Transformer(self._shape).to(dtype)

    def _adamw(self, model: nn.Module, *, foreach: bool = False) -> AdamW:
        return AdamW(model.parameters(), lr=_LR, foreach=foreach, fused=not foreach)

    def _seconds(self, run: Callable[[], object], times: int) -> float:
        self._settle()
        began = time.perf_counter()
        for _ in range(times):
            run()
        self._settle()
        return (time.perf_counter() - began) / times

    def _settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _clear(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def syncs_of(events: Iterable[FunctionEvent]) -> float | None:
    """How often the host waited for the GPU per step, by CUDA's own calls; None if the profile has none of
    them."""
    events = list(events)
    if not any(each.name.startswith(_LAUNCHES) for each in events):
        return None
    steps = [each.time_range for each in events if each.name == _STEP and each.device_type.name == "CPU"]
    waits = [each.time_range.start for each in events if _is_wait(each.name)]
    inside = sum(bool(step.start <= at <= step.end) for at in waits for step in steps)
    return inside / len(steps)


def _is_wait(name: str) -> bool:
    return name in _COPIES or (name.startswith(("cuda", "cu")) and name.endswith("Synchronize"))
