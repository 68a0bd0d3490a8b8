"""One rank of `imece bench step`: runs the same model in every way of training, in one process."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.bench import crew
from imece.bench.reference_model import MODELS, REFERENCE, batch
from imece.bench.resident import bytes_of, peak_bytes
from imece.bench.step.ways import ONE_PROCESS, Builder, Way
from imece.data_parallel import footprint
from imece.data_parallel.sharding.cast import MixedPrecision
from imece.system import heap

_BACKWARDS = 3  # per round, to measure a parameter's cost


class Rank:
    """Methods are orders."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        heap.keep_from_first_step()  # as imece.init() does; otherwise page faults would hit the ways unevenly
        self._builder = Builder()
        self._ways: dict[str, Way] = {}
        self._chains: dict[str, nn.Module] = {}
        self._steps: dict[str, int] = {}

    def build(self, way: str) -> dict[str, Any]:
        """Make the way; returns an error in one line if that fails."""
        try:
            self._ways[way] = self._builder.build(way)
        except Exception as error:  # noqa: BLE001 - told to the person, while the other ways go on
            return {"refused": " ".join(f"{type(error).__name__}: {error}".split())}
        self._steps[way] = 0
        return {"parameters": sum(p.numel() for p in self._ways[way].model.parameters())}

    def measure(self, way: str, tokens: int, steps: int) -> dict[str, Any]:
        """Average seconds of `steps` training steps after a barrier, and the last loss; without a loss from
        a rank that ONE_PROCESS leaves idle."""
        dist.barrier()
        if way == ONE_PROCESS and dist.get_rank():
            return {"seconds": 0.0}
        if way == ONE_PROCESS:
            torch.set_num_threads(dist.get_world_size())
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self._forward(way, tokens)
            self._finish(way, loss)
        seconds = (time.perf_counter() - begin) / steps
        torch.set_num_threads(1)  # as traces and all other ways have it
        return {"seconds": seconds, "loss": float(loss.detach())}

    def trace(self, way: str, tokens: int, steps: int) -> dict[str, Any]:
        """Traces of `steps` steps in one of imece's ways."""
        model: Any = self._ways[way].model
        model.record_trace(True)
        dist.barrier()
        traces = []
        for _ in range(steps):
            self._finish(way, self._forward(way, tokens))
            traces.append(asdict(model.last_trace))
        model.record_trace(False)
        return {"traces": traces}

    def memory(self, way: str, tokens: int) -> dict[str, Any]:
        """Bytes after 3 steps: peak resident so far; and, after a backward, memory in use that ranks share,
        and all resident memory, where a page that two ranks share counts half."""
        for _ in range(2):
            self._finish(way, self._forward(way, tokens))
        loss = self._forward(way, tokens)
        self._ways[way].backward(loss)
        shared, parts = bytes_of("status", "RssShmem"), bytes_of("smaps_rollup", "Pss")
        self._update(way)
        return {"peak_bytes": peak_bytes(), "shared_bytes": shared, "parts_bytes": parts}

    def footprint(
        self, way: str, model: str, bf16: bool, offload: str | None, tokens: int, steps: int
    ) -> dict[str, Any]:
        """Bytes by category, counted and predicted, of a separate model in one strategy after `steps`
        steps."""
        shape = MODELS[model]
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16) if bf16 else None
        made = self._builder.build_strategy(way, shape, precision, offload)
        wrapped, optimizers = made.model, [made.optimizer]
        assert isinstance(wrapped, imece.DistributedDataParallel)
        parameters = sum(each.numel() for each in wrapped.parameters())
        predicted = footprint.expected(wrapped, optimizers)
        assert predicted is not None
        for step in range(steps):
            wrapped(batch(shape, tokens, step * dist.get_world_size() + dist.get_rank())).backward()
            if step + 1 < steps:
                made.optimizer.step()
                made.optimizer.zero_grad()
        counted = footprint.counted(wrapped, optimizers)
        return {
            "parameters": parameters, "predicted": asdict(predicted), "counted": asdict(counted),
            "peak_bytes": peak_bytes(),
        }  # fmt: skip

    def chain(self, way: str, parameters: int) -> dict[str, Any]:
        """Make a model of this many parameters of 8 elements each, replacing the previous one."""
        self._chains[way] = self._builder.wrap(way, Chain(parameters))
        return {}

    def backward(self, way: str) -> dict[str, Any]:
        """Seconds of one backward of the chain after a barrier, by the clock and of its thread's processor
        time."""
        model, seconds, processor = self._chains[way], 0.0, 0.0
        for _ in range(_BACKWARDS):
            loss = model(torch.ones(Chain.NUMEL)).sum()
            dist.barrier()
            begin, processor_begin = time.perf_counter(), time.thread_time()
            loss.backward()
            processor += time.thread_time() - processor_begin
            seconds += time.perf_counter() - begin
            model.zero_grad()
        return {"seconds": seconds / _BACKWARDS, "processor": processor / _BACKWARDS}

    def _forward(self, way: str, tokens: int) -> torch.Tensor:
        first = self._steps[way] * dist.get_world_size()
        mine = range(dist.get_world_size()) if way == ONE_PROCESS else [dist.get_rank()]
        inputs = torch.cat([batch(REFERENCE, tokens, first + rank) for rank in mine])
        loss: torch.Tensor = self._ways[way].model(inputs)
        return loss

    def _finish(self, way: str, loss: torch.Tensor) -> None:
        self._ways[way].backward(loss)
        self._update(way)

    def _update(self, way: str) -> None:
        optimizer = self._ways[way].optimizer
        optimizer.step()
        optimizer.zero_grad()
        self._steps[way] += 1


class Chain(nn.Module):
    """Products with many small parameters, one after the other, so that backward does almost nothing for
    each."""

    NUMEL = 8

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(self.NUMEL) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result: [NUMEL]."""
        for factor in self.factors:
            x = x * factor
        return x


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
