"""The one rank of `imece bench gpu`: ways to train a model on its device, each made, timed and dropped again.

Only one is there at a time, so that the most that it allocates is its own.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import imece
from imece.bench.gpu.targets import BARE, COMPILED, FLAT, FOREACH, TORCH
from imece.models.cross_entropy import cross_entropy
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

_WARM_UP = 3  # steps that build buckets and optimizer states, and compile
_LR = 1e-4


@dataclass
class Timed:
    """Of some steps of one way."""

    seconds: float  # of one step
    loss: float  # of the last one
    peak_bytes: int | None  # allocated at most; None: nobody counts it on a CPU
    syncs: float | None = None  # of a step: how often the host waited for the GPU


@dataclass
class Trainee:
    """A model, and what one step of it is."""

    model: nn.Module
    optimizer: Optimizer
    batch: torch.Tensor  # int64 [2, sequences, seq]: inputs and targets
    loss: torch.Tensor = field(init=False)

    def backward(self) -> None:
        """Gradients of a batch."""
        loss = cross_entropy(self.model(self.batch[0]), self.batch[1])
        loss.backward()
        self.loss = loss.detach()

    def step(self) -> None:
        """All of it."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


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
        """Whether this is about a GPU, and not a trial on the CPU."""
        return self.device.type == "cuda"

    def train(self, way: str, steps: int, *, count_syncs: bool = False) -> Timed:
        """One of WAYS or COMPILED, for some steps after a warm-up."""
        trainee = self._wrapped(way)
        for _ in range(_WARM_UP):
            trainee.step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = self._seconds(trainee.step, steps)
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None
        found = Timed(seconds, float(trainee.loss), peak)
        if count_syncs and self.on_gpu:
            with _syncs() as told:
                for _ in range(steps):
                    trainee.step()
            found.syncs = len(told) / steps
        del trainee
        self._clear()
        return found

    def step_alone(self, way: str, steps: int) -> float:
        """Seconds of one step of AdamW, of the OPTIMIZERS, without forward and backward."""
        model: nn.Module = self._model()
        optimizer: Optimizer = self._adamw(model, foreach=way == FOREACH)
        if way == FLAT:
            model, optimizer = imece.parallelize(model, optimizer, "zero1")
        Trainee(model, optimizer, self._batch[:, :1]).backward()  # its gradients stay
        for _ in range(_WARM_UP):
            optimizer.step()
        seconds = self._seconds(optimizer.step, steps)
        del model, optimizer
        self._clear()
        return seconds

    def _wrapped(self, way: str) -> Trainee:
        model: nn.Module = self._model()
        optimizer = self._adamw(model)
        if way == COMPILED:
            imece.compile_blocks(model)
        if way == TORCH:
            model = DistributedDataParallel(model, process_group=self._group, gradient_as_bucket_view=True)
        elif way != BARE:
            model = imece.DistributedDataParallel(model)
        return Trainee(model, optimizer, self._batch)

    def _model(self) -> Transformer:
        torch.manual_seed(0)
        with torch.device(self.device):
            return Transformer(self._shape).bfloat16()

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


@contextlib.contextmanager
def _syncs() -> Iterator[list[warnings.WarningMessage]]:
    """torch's warnings of operations inside for which the host waits for the GPU."""
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Not torch's one notice that it may not find all of them.
    found += [each for each in told if "called a synchronizing" in str(each.message)]
