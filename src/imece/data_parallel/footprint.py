"""The bytes that training takes on one rank, by category: expected from the layout, and counted from
live memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from imece.buckets import filling, gathered
from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.strategy import Strategy
from imece.footprint import Footprint, Offload, Sizes, footprint
from imece.layout import Layout

# Tensors of the parameter's size that an optimizer keeps for each parameter; unknown for all others.
_KEPT = {"AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "Muon": 1}


@dataclass(frozen=True)
class LaidOut:
    """A model that is laid out for a strategy, and what its elements take."""

    laid: Layout
    strategy: Strategy
    state_bytes: Mapping[int, float]
    """By bucket: of the optimizer's state, for an element."""
    parameter_bytes: int
    """Of an element of the parameters."""
    reduce_bytes: int
    """Of an element of the buckets of gradients."""
    master_bytes: int = 4
    """Of an element of what the optimizer steps."""
    filling: Collection[int] = ()
    """Buckets that have memory at the same time, if gradients are sharded."""
    gathered: int = 0
    """Bytes of parameters that are gathered at the same time."""
    frozen: Layout | None = None
    """Of frozen parameters that are sharded."""
    offload: Offload | None = None
    """What lies in the host's memory."""
    takes: Callable[[int], int] = int
    """See `offload.Offload`."""
    casts: bool = False
    """Units are gathered from masters with more bits."""

    def footprint(self, rank: int) -> Footprint:
        """The bytes of a rank, by arithmetic on the layout. rank: within its shard group."""
        laid, offload = self.laid, self.offload
        sizes = Sizes(
            whole=sum(bucket.numel for bucket in laid.buckets),
            shard=sum(bucket.shard_numel for bucket in laid.buckets),
            filling=sum(laid.buckets[index].numel for index in self.filling),
        )
        found = footprint(
            sizes, self.strategy, parameter_bytes=self.parameter_bytes, reduce_bytes=self.reduce_bytes,
            master_bytes=self.master_bytes, state_bytes=self._state(rank),
            own_bytes=0 if self.casts else None, offload=offload,
        )  # fmt: skip
        frozen = self.frozen.buckets if self.frozen is not None else ()
        still = [bucket.shard_numel * bucket.itemsize for bucket in frozen]
        found = replace(found, communication=found.communication + self.gathered)
        if offload != "parameters":
            found = replace(found, parameters=found.parameters + sum(still))
        if offload is None:
            return found
        hosted = [self.master_bytes, self.master_bytes]  # of a shard: what is stepped, and its gradients
        if offload == "parameters" and self.parameter_bytes != self.master_bytes:
            hosted.append(self.parameter_bytes)
        sizes_bytes = [bucket.shard_numel * each for bucket in laid.buckets for each in hosted]
        host = found.host + sum(self.takes(nbytes) - nbytes for nbytes in sizes_bytes)
        if offload == "parameters":
            host += sum(map(self.takes, still))
        return replace(found, host=host)

    def _state(self, rank: int) -> int:
        """Bytes of the optimizer's state."""
        total = 0
        for bucket in self.laid.buckets:
            start, stop = bucket.shard(rank) if self.strategy.optimizer else (0, bucket.numel)
            owned = sum(part.item_stop - part.item_start for part in bucket.parts(start, stop))
            total += round(owned * self.state_bytes.get(bucket.index, 0))
        return total


def expected(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> Footprint | None:
    """What this rank will take once it trains. None if an optimizer is unknown."""
    kept: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        tensors = optimizer_tensors(optimizer)
        if tensors is None:
            return None
        kept[number] = tensors
    if not isinstance(model, ShardedDataParallel):
        state = sum(
            each.nbytes * kept[number] for number, one in enumerate(optimizers) for each in parameters_of(one)
        )
        gradients = sum(bucket.flat.nbytes for bucket in model.reducer.buckets)
        return Footprint(_bytes(model.module.parameters()), gradients, state, 0)
    sharding = model.sharding
    store = sharding.stores[0]
    frozen = _bytes(_whole_frozen(model))
    state_bytes = {each.plan.index: kept.get(each.kind, 0) * each.master.itemsize for each in sharding.stores}
    numbered = [(each.unit, each.kind, each.plan) for each in sharding.stores]
    laid_out = LaidOut(
        sharding.layout,
        sharding.strategy,
        state_bytes,
        parameter_bytes=store.parameters.itemsize,
        reduce_bytes=(sharding.precision.reduce or store.parameters.dtype).itemsize,
        master_bytes=store.master.itemsize,
        filling=filling(numbered, gathers=sharding.gathers, most_under_way=sharding.most_under_way)
        if sharding.strategy.gradients
        else (),
        gathered=gathered(
            [(each.unit, each.parameters.nbytes) for each in sharding.every_store],
            sharding.gathering.in_flight,
        )
        if sharding.gathering is not None
        else 0,
        frozen=sharding.frozen_layout,
        offload=sharding.offload.name if sharding.offload is not None else None,
        takes=sharding.offload.takes if sharding.offload is not None else int,
        casts=store.has_more_bits and store.own is store.master,
    )
    found = laid_out.footprint(sharding.rank)
    return replace(found, parameters=found.parameters + frozen)


def counted(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> Footprint:
    """What this rank holds now, counted from live storages."""
    state = [each for one in optimizers for kept in one.state.values() for each in kept.values()]
    optimizer = _bytes(each for each in state if isinstance(each, torch.Tensor))
    if not isinstance(model, ShardedDataParallel):
        buckets = [bucket.flat for bucket in model.reducer.buckets]
        return Footprint(
            _bytes(model.module.parameters()), sum(each.nbytes for each in buckets), optimizer, 0
        )
    sharding, offload = model.sharding, model.sharding.offload
    own = gradients = sums = communication = 0
    parameters = frozen = _bytes(_whole_frozen(model))
    in_buckets = {bucket.flat.untyped_storage()._cdata for bucket in sharding.all if bucket.attached}
    for store in sharding.every_store:
        optimizer += store.master.nbytes if store.master is not store.own or store.has_more_bits else 0
        own += store.own.nbytes if store.own.dtype == store.parameters.dtype else 0
        if sharding.common_parameters:
            parameters += store.parameters.nbytes // sharding.size
        elif sharding.gathering is None:
            parameters += store.parameters.nbytes
        if store.gradient is not None and store.gradient.untyped_storage()._cdata not in in_buckets:
            sums += store.gradient.nbytes
    if sharding.gathering is not None:
        communication += sharding.gathering.most_bytes
        parameters += own
    if sharding.strategy.gradients:
        communication += sharding.memory.most_bytes
    else:
        gradients += sharding.memory.most_bytes
    if offload is None:
        return Footprint(parameters, gradients + sums, optimizer, communication)
    if offload.parameters:
        parameters, optimizer = frozen, optimizer + own
    hosted = {
        id(each): each.nbytes
        for store in sharding.every_store
        for each in (
            store.master if offload.parameters or not store.is_frozen else None,
            store.gradient,
            store.own if offload.parameters else None,
        )
        if each is not None
    }
    more = sum(offload.takes(nbytes) - nbytes for nbytes in hosted.values())
    return Footprint(parameters, gradients, 0, communication, optimizer + sums + more)


def optimizer_tensors(optimizer: Optimizer) -> int | None:
    """Tensors of the parameter's size that this optimizer keeps for each parameter; None if unknown."""
    name = type(optimizer).__name__
    if name == "SGD":
        return 1 if any(group["momentum"] for group in optimizer.param_groups) else 0
    if name == "RMSprop":
        return 1 + sum(bool(optimizer.param_groups[0][key]) for key in ("momentum", "centered"))
    kept = _KEPT.get(name)
    if kept is not None and any(group.get("amsgrad") for group in optimizer.param_groups):
        return kept + 1  # the largest second moment so far
    return kept


def _whole_frozen(model: ShardedDataParallel) -> list[torch.Tensor]:
    """Frozen parameters that are whole on each rank."""
    names = {*model.frozen_names}
    return [each for name, each in model.frozen if name not in names]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors; those that share a storage count once."""
    return sum({each.untyped_storage()._cdata: each.nbytes for each in tensors}.values())
