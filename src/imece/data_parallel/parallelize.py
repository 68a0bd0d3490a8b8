"""`imece.parallelize`: one call for every strategy from DDP to ZeRO-3 and hybrid sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.data_parallel.average import Average, Over
from imece.data_parallel.optimizer import SteppedParts, is_element_wise, kinds_of
from imece.data_parallel.reducer import Reducer, Way
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.shard import MixedPrecision, Sharding
from imece.data_parallel.strategy import ShardGroups, find_strategy
from imece.mesh import Mesh

Optimizers = TypeVar("Optimizers", Optimizer, Sequence[Optimizer])
Factory = Callable[[Iterable[nn.Parameter]], Optimizer]


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Factory,
    strategy: str = "zero1",
    mesh: Mesh | None = None,
    *,
    average: Over = "ranks",
    bucket_cap_mb: float = 25.0,
    precision: MixedPrecision | None = None,
    overlap: bool | None = None,
) -> tuple[DistributedDataParallel, Any]:
    """A model and its optimizer, trained as one by all ranks: `loss.backward(); optimizer.step()` as ever.

    model: on its device, with the same shapes on all ranks; rank 0's values count. It is changed in place: its
    parameters move into flat memory. optimizer: any of torch's, a list of them, or a function that makes one
    of parameters; what is returned in its place is the same object (or the new one), stepping this rank's
    part. strategy: replicate, zero1, zero2, zero3, hybrid or hybrid_zero2, or torch's names for them.

        strategy      other name            parameters   gradients   optimizer   a step moves
        replicate     DDP, NO_SHARD         whole        whole       whole       2M
        zero1         ZeRO-1                whole        whole       1/N         2M
        zero2         SHARD_GRAD_OP         whole        1/N         1/N         2M
        zero3         FULL_SHARD            1/N          1/N         1/N         3M
        hybrid        HYBRID_SHARD          1/G          1/G         1/G         3M in a host, 2M/G between
        hybrid_zero2  _HYBRID_SHARD_ZERO2   whole        1/G         1/G         2M in a host, 2M/G between

    (M bytes of the model, N ranks, G ranks of a host.) After backward the gradients of a sharded model are in
    the optimizer's groups, this rank's part of each; the parameters' own .grad is None, so clip with the
    model's `clip_grad_norm_`. In `no_sync` whole gradients are kept on each rank, and nothing moves.

    average, bucket_cap_mb, overlap: as for DistributedDataParallel.

    ValueError: an unknown strategy, one that cannot be on this mesh, an optimizer that cannot be sharded.
    """
    arranged = mesh if mesh is not None else meshes.current()
    chosen = find_strategy(strategy)
    made = optimizer if isinstance(optimizer, Optimizer | Sequence) else optimizer(model.parameters())
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    if not chosen.optimizer:
        replicated = DistributedDataParallel(
            model, process_group=arranged.world_group, average=average, bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
        )  # fmt: skip
        return replicated, made
    wrapped = ShardedDataParallel(
        model,
        optimizers,
        ShardGroups.of(chosen, arranged),
        strategy=chosen.name,
        average=average,
        bucket_cap_mb=bucket_cap_mb,
        precision=precision or MixedPrecision(),
        overlap=overlap,
    )
    return wrapped, made


class ShardedDataParallel(DistributedDataParallel):
    """DistributedDataParallel of which each rank keeps a part; made by `parallelize`."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        groups: ShardGroups,
        *,
        strategy: str,
        average: Over,
        bucket_cap_mb: float,
        precision: MixedPrecision,
        overlap: bool | None,
    ) -> None:
        """As `parallelize`; groups: who shares what."""
        self._optimizers, self._groups = list(optimizers), groups
        self._strategy, self._precision = find_strategy(strategy), precision
        super().__init__(
            module, process_group=groups.world, bucket_cap_mb=bucket_cap_mb, average=average, overlap=overlap
        )

    def _make_reducer(self, named: list[tuple[str, torch.Tensor]]) -> None:
        whole = [at for at, each in enumerate(self._optimizers) if not is_element_wise(each)]
        elements = sum(each.numel() for _, each in named)
        if elements < self._groups.shard.size():
            raise ValueError(
                f"a model of {elements} elements cannot be divided among {self._groups.shard.size()} ranks"
            )
        self.sharding = Sharding(
            named,
            kinds_of(named, self._optimizers),
            whole,
            self._strategy,
            self._groups,
            cap_bytes=self.bucket_bytes_cap,
            precision=self._precision,
        )
        self._stepped = [
            SteppedParts(optimizer, number, self.sharding, [each for _, each in named])
            for number, optimizer in enumerate(self._optimizers)
        ]
        self.reducer = Reducer(
            named,
            self.process_group,
            Average(self._over, self.process_group, self.device),
            cap_bytes=self.bucket_bytes_cap,
            first_bytes=None,
            way=Way(None, None, self._way.overlap),
            sharding=self.sharding,
        )

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient of all parameters, wherever its parts are; all ranks call it."""
        return self.sharding.gradient_norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradient by a number."""
        grads = [part.parameter.grad for part in self.sharding.parts if part.parameter.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also of this rank's parts."""
        super().zero_grad(set_to_none)
        for part in self.sharding.parts:
            part.parameter.grad = None

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("a sharded model cannot be pickled: each rank has a part of it. Save a checkpoint")
