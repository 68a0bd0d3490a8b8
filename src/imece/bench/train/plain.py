"""One rank of the loop that `imece train` is compared with: plain torch, as a careful person writes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from imece.bench import crew
from imece.bench.train.contenders import SAME_LOSS
from imece.data.batches import Batches
from imece.data.tokens import open_tokens
from imece.models.cross_entropy import cross_entropy
from imece.models.transformer import Transformer
from imece.train.batch import plan_batch
from imece.train.model.optimizer import make_optimizers
from imece.train.model.schedule import learning_rate
from imece.train.run.folder import RunFolder


class PlainLoop:
    """torch's DistributedDataParallel on Gloo, torch's optimizers and clipping; it shows and writes nothing.

    Model, optimizer and data are those of the run folder, so that both train the same.
    """

    def __init__(self, folder: Path, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """folder: a run folder with its config and existing token files.

        loss: of logits [B, T, V] and targets [B, T].
        """
        self._loss = loss
        self._config = config = RunFolder(folder).config()
        tokens = open_tokens(config.data.folder)
        shape = config.model.shape(tokens.vocab_size)
        model = Transformer(shape, generator=torch.Generator().manual_seed(config.seed))
        self._optimizers = make_optimizers(model, config.optimizer)
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._plan = plan_batch(config.batch, shape.max_seq, dist.get_world_size())
        self._batches = Batches(tokens.train, shape.max_seq, self._plan.sequences, config.seed)
        self._dtype = torch.bfloat16 if config.compute.dtype == "bf16" else torch.float32
        self._done = 0

    def step(self) -> Tensor:
        """One optimizer step; returns this rank's mean loss."""
        model, plan, section = self._model, self._plan, self._config.optimizer
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self._done, self._config.steps, section)
        arrays = self._batches.for_rank(self._done, dist.get_rank(), plan.ranks)
        inputs, targets = (torch.from_numpy(array).split(plan.micro) for array in arrays)
        total = torch.zeros(())
        for number in range(plan.accumulation):
            last = number == plan.accumulation - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
                    loss = self._loss(model(inputs[number]), targets[number]) / plan.accumulation
                loss.backward()
            total += loss.detach()
        if section.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._done += 1
        return total


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss that everybody writes; under autocast it computes in float32."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._loops: dict[str, PlainLoop] = {}

    def open(self, way: str, folder: str) -> dict[str, Any]:
        """Begin the training of a run folder's config."""
        self._loops[way] = PlainLoop(Path(folder), cross_entropy if way in SAME_LOSS.values() else plain_loss)
        return {}

    def measure(self, way: str, steps: int) -> dict[str, Any]:
        """Average seconds of `steps` steps after a barrier, and this rank's part of the last step's loss."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self._loops[way].step()
        seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "loss": float(loss)}


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
