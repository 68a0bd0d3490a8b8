"""What is compared: the same four operations by several libraries, as seen by one rank of each.

Sizes are nccl-tests': the bytes of the larger of input and output. All buffers are zeroed before they are
timed, so that repeated sums in place neither overflow nor slow down.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.observe.run_files import as_argument

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
LIBRARIES = ("shm", "shm ordinary", "gloo", "mpich", "deepspeed")
"""In the table's order; "shm" has its tensors in shared memory."""

_PATTERN = 251  # prime, so that no two slices of a tensor are alike; its sums are exact in fp32


def numel_of(size_bytes: int, world_size: int) -> int:
    """Elements (fp32) of the larger buffer: `size_bytes`, rounded down so that all ranks have equal parts."""
    return max(1, size_bytes // 4 // world_size) * world_size


class Contender(ABC):
    """One library on one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.whole = torch.empty(0)  # [numel]
        self.part = torch.empty(0)  # [numel / world_size], used by reduce_scatter and all_gather
        self.call: Callable[[], Any] = lambda: None

    def empty(self, numel: int) -> torch.Tensor:
        """Memory for fp32[numel], as a user of this library would get it."""
        return torch.empty(numel)

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks are here."""

    @abstractmethod
    def bind(self, op: str) -> Callable[[], Any]:
        """`op` on `whole` and `part`, ready to be called many times."""

    def prepare(self, op: str, size_bytes: int) -> bool:
        """Allocate for `op`, run it once, check the result, and zero the buffers. Returns whether it was
        right."""
        self.release()
        numel = numel_of(size_bytes, self.world_size)
        self.whole = self.empty(numel)
        self.part = self.empty(numel // self.world_size if op in ("reduce_scatter", "all_gather") else 0)
        self.call = self.bind(op)
        pattern = (torch.arange(numel, dtype=torch.int32) % _PATTERN).to(torch.float32)
        part = slice(self.rank * self.part.numel(), (self.rank + 1) * self.part.numel())
        if op == "all_gather":
            self.whole.zero_()
            self.part.copy_(pattern[part])
        else:
            torch.add(pattern, float(self.rank), out=self.whole)
        self.barrier()
        self.call()
        if op in ("all_reduce", "reduce_scatter"):
            pattern.mul_(self.world_size).add_(self.world_size * (self.world_size - 1) / 2)
        right = (
            torch.equal(self.part, pattern[part])
            if op == "reduce_scatter"
            else torch.equal(self.whole, pattern)
        )
        self.barrier()
        self.whole.zero_()
        self.part.zero_()
        self.barrier()
        return right

    def close(self) -> None:  # noqa: B027 - most libraries have nothing to tidy up
        """Leave nothing behind on the host."""

    def release(self) -> None:
        """Free the buffers before the next size is allocated."""
        self.call = lambda: None
        self.whole = self.part = torch.empty(0)


class TorchGroup(Contender):
    """A torch.distributed backend."""

    calls: ClassVar[dict[str, Callable[..., Any]]] = {
        "all_reduce": dist.all_reduce,
        "reduce_scatter": dist.reduce_scatter_tensor,
        "all_gather": dist.all_gather_into_tensor,
        "broadcast": dist.broadcast,
    }

    def __init__(self, group: dist.ProcessGroup, empty: Callable[[int], torch.Tensor] = torch.empty) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._empty = empty

    def empty(self, numel: int) -> torch.Tensor:
        return self._empty(numel)

    def barrier(self) -> None:
        dist.barrier(self._group)

    def bind(self, op: str) -> Callable[[], Any]:
        arguments: tuple[Any, ...] = {
            "all_reduce": (self.whole,),
            "reduce_scatter": (self.part, self.whole),
            "all_gather": (self.whole, self.part),
            "broadcast": (self.whole, 0),
        }[op]
        return partial(self.calls[op], *arguments, group=self._group)


class Imece(TorchGroup):
    """The same groups through imece's own calls."""

    calls: ClassVar[dict[str, Callable[..., Any]]] = {op: getattr(ops, op) for op in OPS}


class Mpich(Contender):
    """MPICH through mpi4py, on buffers of ordinary memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        super().__init__(self._world.Get_rank(), self._world.Get_size())

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()  # otherwise MPICH leaves its segment in /dev/shm

    def bind(self, op: str) -> Callable[[], Any]:
        world, mpi = self._world, self._mpi
        whole, part = self.whole.numpy(), self.part.numpy()
        return {
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, whole, mpi.SUM),
            "reduce_scatter": lambda: world.Reduce_scatter_block(whole, part, mpi.SUM),
            "all_gather": lambda: world.Allgather(part, whole),
            "broadcast": lambda: world.Bcast(whole, 0),
        }[op]


class DeepSpeed(Contender):
    """DeepSpeed's shared-memory all-reduce for CPU inference; it has no other operation."""

    def __init__(self) -> None:
        from deepspeed import comm

        comm.init_distributed("gloo", verbose=False)
        super().__init__(dist.get_rank(), dist.get_world_size())
        # DeepSpeed's Python function falls back to Gloo silently; the operator does not.
        if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
            raise RuntimeError("DeepSpeed did not build its shared-memory operator")
        self._reduce = torch.ops.deepspeed.inference_all_reduce_

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        remove_deepspeed_segments(self.rank)

    def bind(self, op: str) -> Callable[[], Any]:
        whole = self.whole
        return {"all_reduce": lambda: self._reduce(whole)}[op]


def remove_deepspeed_segments(rank: int) -> None:
    """Remove DeepSpeed's shared memory, which it never does; it is named by user, address, port and rank."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    for left in Path("/dev/shm").glob(f"*_{os.getuid()}_{address}_{port}_{rank}"):
        left.unlink(missing_ok=True)


def deepspeed_is_locked() -> str | None:
    """Why DeepSpeed would wait for its C++ code, which its first use compiles, without end; None if it
    would not."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    lock = next(root.rglob("deepspeed_*/lock"), None)
    if lock is None:
        return None
    return f"a process compiles its C++ code, or was killed at it and left its lock: rm {as_argument(lock)}"
