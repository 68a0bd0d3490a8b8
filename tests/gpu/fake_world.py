"""One rank of a world that does not exist: torch's fake process group returns what it gets.

Tensors lie where they would on a rank of the real world, but their values are wrong, so only bytes count.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import imece
from imece.data_parallel import shard
from imece.data_parallel.footprint import counted, expected
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding import stores
from imece.models import transformer
from imece.models.cross_entropy import cross_entropy
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer, units_of
from imece.plan.memory.frameworks import IMECE
from imece.plan.memory.memory import Memory, memory
from imece.plan.models.from_code import of_module
from imece.plan.models.model import Model
from imece.plan.setup import Parallel, Recipe, Setup, Strategy

STEPS = 2


@dataclass(frozen=True)
class Measured:
    """Bytes of rank 0."""

    predicted: dict[str, int]  # by the engine, before the first step
    counted: dict[str, int]  # in the storages that live, after a backward
    planned: int  # by the planner: the states of training
    planned_peak: int  # and what backward keeps
    gone: int  # of what was counted: units and buckets that are gone again after backward
    held: int = 0  # allocated on a GPU after a backward
    peak: int = 0  # and at most, in the last step; on a CPU in the storages that operations have seen


def enter(world_size: int, device: str) -> None:
    """Be rank 0 of so many, who can move tensors of `device`."""
    backend = "cpu:fake,cuda:fake" if device == "cuda" else "cpu:fake"
    dist.init_process_group(backend, rank=0, world_size=world_size, store=FakeStore())


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations have seen and that live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resizer())

    def __enter__(self) -> Any:
        self._resizing.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            for each in _pytree.tree_leaves((args, kwargs, found)):
                if isinstance(each := getattr(each, "_local_tensor", each), Tensor) and not each.is_meta:
                    self._see(each.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._set, key, None)
        self._set(key, storage.nbytes())

    def _set(self, key: int, nbytes: int | None) -> None:
        self.now += (nbytes or 0) - self._sizes.pop(key)
        self.peak = max(self.peak, self.now)
        if nbytes is not None:
            self._sizes[key] = nbytes

    def _resizer(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            found = resize(storage, nbytes)
            self._see(storage)
            return found

        return resized


class Peak:
    """Of bytes on this device, since the latest `begin`."""

    def __init__(self, device: str) -> None:
        self._live = Live() if device == "cpu" else None

    def __enter__(self) -> Peak:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*raised)

    def begin(self) -> None:
        """What was before does not count."""
        if self._live is not None:
            self._live.peak = self._live.now
        else:
            torch.cuda.reset_peak_memory_stats()

    @property
    def nbytes(self) -> int:
        """The most."""
        return self._live.peak if self._live is not None else torch.cuda.max_memory_allocated()


def fill(module: nn.Module) -> None:
    """As Transformer.reset_parameters, of one module."""
    for parameter in module.parameters(recurse=False):
        parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)


@contextlib.contextmanager
def memory_as_on_a_gpu() -> Iterator[None]:
    """What lies where is as there, on the CPU too."""
    with contextlib.ExitStack() as inside:
        for module, name in ((shard, "keeps_freed"), (stores, "casts_fast")):
            inside.enter_context(mock.patch.object(module, name, lambda _: True))
        yield


def measure(
    device: str, shape: TransformerConfig, world_size: int, strategy: Strategy, seq: int, bucket_mb: float,
    as_on_a_gpu: bool = True,
) -> Measured:  # fmt: skip
    """Some steps of a bf16 model with fp32 masters, made on the meta device and filled shard by shard."""
    with memory_as_on_a_gpu() if as_on_a_gpu else contextlib.nullcontext():
        return _measure(device, shape, world_size, strategy, seq, bucket_mb)


def _measure(
    device: str, shape: TransformerConfig, world_size: int, strategy: Strategy, seq: int, bucket_mb: float
) -> Measured:
    enter(world_size, device)
    cuda = device == "cuda"
    try:
        with torch.device("meta"):
            model = Transformer(shape)
            described = of_module(model, "model")
        bf16 = torch.bfloat16
        wrapped, optimizer = imece.parallelize(
            model, lambda parameters: torch.optim.AdamW(parameters, fused=True), strategy, dist.group.WORLD,
            precision=imece.MixedPrecision(bf16, bf16), bucket_cap_mb=bucket_mb, init=fill,
            units=units_of(shape),
        )  # fmt: skip
        predicted = expected(wrapped, [optimizer])
        assert predicted is not None
        words = torch.zeros(1, seq, dtype=torch.long, device=device)
        with Peak(device) as peak:
            for _ in range(STEPS):
                peak.begin()
                cross_entropy(wrapped(words), words).backward()
                found = counted(wrapped, [optimizer])
                held = torch.cuda.memory_allocated() if cuda else 0
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(wrapped, ShardedDataParallel)
        gathering, buckets = wrapped.sharding.gathering, wrapped.sharding.memory
        planned = plan(described, world_size, strategy, seq, bucket_mb)
        return Measured(
            asdict(predicted), asdict(found), planned.states, planned.total - planned.overhead,
            (gathering.most_bytes if gathering is not None else 0) + buckets.most_bytes - buckets.nbytes,
            held, peak.nbytes,
        )  # fmt: skip
    finally:
        dist.destroy_process_group()


def plan(model: Model, world_size: int, strategy: Strategy, seq: int, bucket_mb: float) -> Memory:
    """What the planner says of the same."""
    apart = not model.tied_head and model.table_parameters >= transformer.LARGE_TABLE
    recipe = Recipe(seq, bucket_bytes=int(bucket_mb * 2**20), table_units=apart)
    return memory(Setup(model, Parallel(strategy, world_size, world_size), recipe), framework=IMECE)


def peak_of_fully_shard(device: str, shape: TransformerConfig, world_size: int, seq: int) -> int:
    """The most that was allocated in the last step of the same with torch's own."""
    from torch.distributed.device_mesh import init_device_mesh  # here: they take a second to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    enter(world_size, device)
    try:
        ranks = init_device_mesh(device, (world_size,))
        with torch.device("meta"):
            model = Transformer(shape)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=ranks, mp_policy=policy)
        model.to_empty(device=device)
        model.apply(lambda module: torch.no_grad()(fill)(module))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        words = torch.zeros(1, seq, dtype=torch.long, device=device)
        with Peak(device) as peak:
            for _ in range(STEPS):
                peak.begin()
                cross_entropy(model(words), words).backward()
                optimizer.step()
                optimizer.zero_grad()
        return peak.nbytes
    finally:
        dist.destroy_process_group()
