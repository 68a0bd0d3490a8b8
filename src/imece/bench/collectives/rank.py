"""One rank of `imece bench collectives`: prepares and times what the crew orders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imece.bench import crew
from imece.bench.collectives.contenders import Contender, DeepSpeed, Imece, Mpich, TorchGroup
from imece.bench.collectives.limit import CHUNKS_BYTES, Limit
from imece.collectives.shared_memory import shared_empty

KIND = "IMECE_BENCH_RANK"  # the libraries of this rank: "torch", "mpich" or "deepspeed"


class Rank:
    """Methods are orders. Every answer is a dict for JSON."""

    def __init__(self) -> None:
        self._contenders = _contenders(os.environ.get(KIND, "mpich"))
        first = next(iter(self._contenders.values()))
        self._fence = first.barrier
        self.rank = first.rank
        self._limit = Limit(first.rank, first.world_size)
        self._work: dict[int, Callable[[], None]] = {}  # the limit's, by chunk size

    def prepare(self, library: str, op: str, size_bytes: int, calls: int) -> dict[str, Any]:
        """Check the result once, and estimate with `calls` calls how long one takes, after a warm-up."""
        contender = self._contenders[library]
        right = contender.prepare(op, size_bytes)
        return {"right": right, "once_s": _estimate(contender.call, contender.barrier, calls)}

    def measure(self, library: str, repeat: int) -> dict[str, Any]:
        """Average seconds of `repeat` calls after a barrier."""
        contender = self._contenders[library]
        contender.call()
        contender.barrier()
        return {"seconds": _time(contender.call, repeat)}

    def release(self, library: str) -> dict[str, Any]:
        """Free the buffers of `library`."""
        self._contenders[library].release()
        return {}

    def offer_limit(self, op: str, size_bytes: int) -> dict[str, Any]:
        """Allocate the tensor on which the limit is measured."""
        self._work.clear()
        fd, serial = self._limit.offer(op, size_bytes)
        return {"offer": [os.getpid(), fd, serial]}

    def prepare_limit(self, offers: list[tuple[int, int, int]], calls: int) -> dict[str, Any]:
        """Map all ranks' tensors; returns the seconds of one pass for each chunk size."""
        self._limit.attach(offers)
        self._work = {chunk: self._limit.bind(chunk) for chunk in CHUNKS_BYTES}
        return {"once_s": [_estimate(work, self._fence, calls) for work in self._work.values()]}

    def measure_limit(self, chunk: int, repeat: int) -> dict[str, Any]:
        """Average seconds of `repeat` passes with chunk size number `chunk`."""
        work = self._work[CHUNKS_BYTES[chunk]]
        work()
        self._fence()
        return {"seconds": _time(work, repeat)}

    def release_limit(self) -> dict[str, Any]:
        """Free the limit's tensors."""
        self._work.clear()
        self._limit.release()
        return {}

    def leave(self) -> None:
        """Called when no more orders will come."""
        for contender in self._contenders.values():
            contender.close()


def _time(call: Callable[[], Any], repeat: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat


def _estimate(call: Callable[[], Any], barrier: Callable[[], None], calls: int) -> float:
    """Seconds of one call, after equally many calls to warm up."""
    for _ in range(calls):
        call()
    barrier()
    return _time(call, calls)


def _contenders(kind: str) -> dict[str, Contender]:
    torch.set_num_threads(1)
    if kind == "mpich":
        return {"mpich": Mpich()}
    if kind == "deepspeed":
        return {"deepspeed": DeepSpeed()}
    dist.init_process_group("gloo")
    gloo = dist.group.WORLD
    assert gloo is not None
    shm = dist.new_group(backend="shm")
    return {
        "shm": Imece(shm, shared_empty),
        "shm ordinary": Imece(shm),
        "gloo": TorchGroup(gloo),
    }


if __name__ == "__main__":  # started by a crew
    crew.serve(Rank)
