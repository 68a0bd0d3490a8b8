"""ZeRO-1/2/3 and hybrid sharding over the reducer's buckets: who keeps what, and what moves.

    gradients whole until the step (zero1)   a bucket of each is kept; the sum over the ranks lands in the own
                                             shard of it, in place; the rest is scratch then
    gradients sharded (zero2, zero3)         a bucket borrows memory when its first gradient comes, is summed
                                             as soon as it is full, and gives the memory back; shards are kept
    parameters whole (zero1, zero2)          each rank steps its shard, and an all-gather in place brings the
                                             others'; over a network while the next forward begins (coming.py)
    parameters sharded (zero3)               in memory that the ranks of a host have in common, one copy for
                                             all of them: each steps its shard where it lies, and nothing
                                             moves. Elsewhere gathering.py does it by unit

Since a sum over ranks runs in the order of ranks, whoever computes it, all of these give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from imece import layout
from imece.collectives import native, ops
from imece.collectives.calls import Call, in_shared_memory
from imece.collectives.common import common_zeros
from imece.collectives.pending import Pending, wait_for
from imece.collectives.shared_memory import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.buckets import Bucket, Gradients, Slot
from imece.data_parallel.coming import Coming
from imece.data_parallel.gathering import Gathering
from imece.data_parallel.offload import Direct, Lane, Offload
from imece.data_parallel.parts import ALIGN_BYTES, Part, items_of, make_parts, move_into
from imece.data_parallel.strategy import ShardGroups, Strategy
from imece.data_parallel.units import Flat
from imece.data_parallel.way import most_under_way

_NO_CAP = 2**62  # bytes


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtypes a sharded model is kept; None: in its own.

    param: of the parameters that forward and backward use; their masters, which the optimizer steps, stay in
    the model's own dtype, one shard a rank. reduce: of gradients in buckets, and of their sum. buffer: of
    buffers of floating point, from parallelize on; state dicts have them in the model's own dtype.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None


@dataclass(eq=False)
class _Store:
    """The memory of one bucket on this rank."""

    plan: layout.Bucket
    unit: int
    kind: int
    parameters: torch.Tensor  # [numel]
    own: torch.Tensor  # [shard_numel], a view of `parameters` unless those are gathered
    master: torch.Tensor  # `own` itself unless that has fewer bits or lies in another memory; see offload.py
    gradient: torch.Tensor | None  # [shard_numel], where `master` lies; None: nothing came yet
    parts: list[Part]
    older: torch.Tensor | None = None  # what the sum under way is to be added to
    coming: Coming | None = None  # what the latest step gathers, while it may be under way

    def settle(self) -> None:
        if self.coming is not None:
            self.coming.settle()
            self.coming = None


class Sharding(Gradients):
    """The memory of one model under one strategy, and the collectives on it. One reducer uses it."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        kinds: Sequence[int],
        whole: Collection[int],
        blocks: Mapping[int, int],
        strategy: Strategy,
        groups: ShardGroups,
        *,
        cap_bytes: int,
        precision: MixedPrecision,
        wire: str | None = None,
        schedule: str | None = None,
        units: Sequence[int] | None = None,
        gathering: Gathering | None = None,
        fill: Callable[[int], None] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        offload: Offload | None = None,
        overlap: Callable[[], bool] = lambda: True,
        owners: Mapping[int, Sequence[nn.Module]] | None = None,
    ) -> None:
        """named: parameters that want a gradient; kinds: of each the number of its optimizer.

        whole: optimizers that step whole matrices; blocks: of others, how many elements must not be cut.
        wire: "bf16" for gradients that travel in bf16 and are summed in fp32, in hybrid strategies between
        hosts only, as in a hierarchical all-reduce. schedule: of reduce-scatters and all-gathers, as for ops.
        units: of each parameter the number of its unit, which it shares a bucket with. gathering: of
        parameters that are not in common memory. fill: gives a unit's parameters memory and values, if they
        have none. All ranks of `groups.world` construct together. dtypes: of the parameters' masters, where
        parameters are in fewer bits already. offload: where what the optimizer steps lies, if not with the
        parameters. overlap: asked in each step, whether it may end before what comes over a network has come.
        owners: of parameters, by their id, the modules that have them.
        """
        self.strategy, self.groups, self.whole = strategy, groups, frozenset(whole)
        self.kinds = list(kinds)  # by parameter
        self.dtypes = list(dtypes or (each.dtype for _, each in named))  # by parameter; of masters
        self._parameters = [each for _, each in named]
        self.precision, self._wire, self._schedule = precision, wire, schedule
        self._in_common = isinstance(groups.shard, SharedMemoryGroup)
        self._in_reach = self._in_common or schedule == "hierarchical"  # of some ranks of the shard group
        self.gathering, self.offload = gathering, offload
        self.lane: Lane = offload.lane if offload is not None else Direct()
        self._overlap, self._owners = overlap, owners or {}
        self.gathers, self.borrows = gathering is not None, strategy.gradients
        self.most_under_way = most_under_way(
            on_cpu=named[0][1].device.type == "cpu",
            shared=self._in_common and groups.replicas is None,
            schedule=schedule,
        )
        self.common_parameters = self._in_common and strategy.parameters and gathering is None
        self.rank, self.size = groups.shard.rank(), groups.shard.size()
        pairs = list(zip(units or [0] * len(named), kinds, strict=True))
        self._pairs = sorted(set(pairs))  # by group of the layout: (unit, kind)
        self.layout = layout.build(
            items_of(named, self.dtypes, [self._pairs.index(pair) for pair in pairs]),
            cap_bytes=cap_bytes if gathering is None else _NO_CAP,
            shards=self.size,
            align_bytes=ALIGN_BYTES,
            modules_whole=True,
            whole=[group for group, (_, kind) in enumerate(self._pairs) if kind in self.whole],
            blocks={group: blocks.get(kind, 1) for group, (_, kind) in enumerate(self._pairs)},
        )
        self.stores = self._all_stores(fill)
        self.parts = [part for store in self.stores for part in store.parts]
        self.all = [self._bucket(plan) for plan in self.layout.buckets]
        by_index = {slot.index: slot for bucket in self.all for slot in bucket.slots}
        self.slots = [by_index[index] for index in range(len(named))]
        self._spare: list[torch.Tensor] = []  # memory of buckets that have given it back
        self._borrowed: dict[int, torch.Tensor] = {}  # what of it a bucket has
        if not strategy.gradients:
            for bucket in self.all:
                self.attach(bucket)

    # Memory.

    def _all_stores(self, fill: Callable[[int], None] | None) -> list[_Store]:
        """One unit after the other, so that no more than one is whole on a rank that fills it."""
        stores: dict[int, _Store] = {}
        filled = set()
        # The root last: it has what units share, which each of them may fill.
        for plan in sorted(self.layout.buckets, key=lambda plan: self._pairs[plan.group][0] == 0):
            unit, _ = self._pairs[plan.group]
            if fill is not None and unit not in filled:
                fill(unit)
                filled.add(unit)
            stores[plan.index] = self._store(plan)
        return [stores[index] for index in range(len(stores))]

    def _store(self, plan: layout.Bucket) -> _Store:
        parameters = [self._parameters[place.item] for place in plan.places]
        own_dtype, device = self.dtypes[plan.places[0].item], parameters[0].device
        dtype = self.precision.param or own_dtype
        start, stop = plan.shard(self.rank)
        flat = self._parameter_memory(plan.numel, dtype, device)
        own = master = flat[start:stop]
        if dtype != own_dtype:
            before = torch.zeros(plan.numel, dtype=own_dtype, device=device)
            for place, parameter in zip(plan.places, parameters, strict=True):
                before[place.start : place.stop].copy_(parameter.detach().reshape(-1))
            master = before[start:stop].clone()
        move_into(flat, plan, self._parameters, copy=not self.common_parameters or self.rank == 0)
        unit, kind = self._pairs[plan.group]
        if self.common_parameters:
            ops.barrier(group=self.groups.shard)
        own, master = self._kept(own, master)
        if self.gathering is not None:
            names = [
                (self.layout.items[place.item].name, self._parameters[place.item]) for place in plan.places
            ]
            lane = self.lane if self.offload is not None and self.offload.parameters else None
            self.gathering.units[unit].add(Flat(flat, own, names, lane))
        parts = make_parts(plan, self.layout.items, self.rank, master, kind in self.whole)
        return _Store(plan, unit, kind, flat, own, master, None, parts)

    def _kept(self, own: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both where they stay: in memory of their own if units are gathered, and in the host's."""
        offload, same = self.offload, master is own
        if self.gathering is not None:
            own = offload.hosted(own) if offload is not None and offload.parameters else own.clone()
            master = own if same else master
        if offload is not None and not (offload.parameters and same):
            master = offload.hosted(master)
        return own, master

    def _parameter_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or not self._in_reach or self.gathering is not None:
            return torch.zeros(numel, dtype=dtype, device=device)
        if self.common_parameters:
            nbytes = numel * dtype.itemsize
            return common_zeros(nbytes, self.groups.shard, "a bucket of parameters").view(dtype)
        return shared_empty(numel, dtype).zero_()

    def _bucket(self, plan: layout.Bucket) -> Bucket:
        names = [self.layout.items[place.item].name for place in plan.places]
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        nothing = self.stores[plan.index].parameters.new_empty(0)
        bucket = Bucket(plan.index, nothing, plan.used_numel, label, attached=False)
        for place in plan.places:
            item = self.layout.items[place.item]
            bucket.slots.append(Slot(place.item, item.name, self._parameters[place.item], bucket, nothing))
        return bucket

    def attach(self, bucket: Bucket) -> None:
        """Give a bucket memory for its gradients."""
        store = self.stores[bucket.index]
        plan, device = store.plan, store.parameters.device
        dtype = self.precision.reduce or store.parameters.dtype
        nbytes = plan.numel * dtype.itemsize
        fitting = [
            at for at, each in enumerate(self._spare) if each.numel() >= nbytes and each.device == device
        ]
        if fitting:
            memory = self._spare.pop(min(fitting, key=lambda at: self._spare[at].nbytes))
            self.lane.reuse(memory)
        else:
            alike = [each.plan.numel for each in self.stores if each.kind == store.kind]
            most = max(alike) * dtype.itemsize
            most = most if self.strategy.gradients and self.gathering is None else nbytes
            shared = self._in_reach and device.type == "cpu"
            memory = shared_empty(most, torch.uint8) if shared else torch.empty(
                most, dtype=torch.uint8, device=device
            )  # fmt: skip
            memory.zero_()
        self._borrowed[bucket.index] = memory
        bucket.flat = memory[:nbytes].view(dtype)
        for place, slot in zip(plan.places, bucket.slots, strict=True):
            slot.view = bucket.flat[place.start : place.stop].view(slot.parameter.shape)
        bucket.attached = True

    def _detach(self, bucket: Bucket) -> None:
        bucket.flat = bucket.flat.new_empty(0)
        for slot in bucket.slots:
            slot.view = bucket.flat
        bucket.attached = False
        self._spare.append(self._borrowed.pop(bucket.index))

    @property
    def bucket_bytes(self) -> int:
        """Of memory for buckets of gradients, whether one has it now or not."""
        return sum(each.nbytes for each in (*self._spare, *self._borrowed.values()))

    def let_go(self) -> None:
        """Of all memory but what parameters lie in, whatever is under way. Nothing comes after it."""
        self.lane.wait()
        for store in self.stores:
            if store.coming is not None:
                store.coming.give_up()
            store.parts.clear()
        for kept in (self.stores, self.parts, self._spare):
            kept.clear()
        self._borrowed.clear()
        del self.groups
        if self.gathering is not None:
            self.gathering.let_go()

    # A backward.

    def when_over(self, tell: Callable[[Sequence[Bucket]], None]) -> None:
        """As of Gradients: units of parameters that are gathered."""
        if self.gathering is not None:
            self.gathering.when_over = lambda units: tell(
                [bucket for bucket in self.all if self.stores[bucket.index].unit in units]
            )

    def start(self) -> None:
        """A synchronised backward begins. What was summed and not zeroed since then is to be added to."""
        if self.gathering is not None:
            self.gathering.begin()
        for store in self.stores:
            live = [part for part in store.parts if part.parameter.grad is not None]
            store.older = None
            if live:
                store.older = torch.zeros_like(store.master)
                for part in live:
                    assert part.parameter.grad is not None
                    part.of(store.older).copy_(part.parameter.grad)

    def leaves(self, bucket: Bucket, by_hook: bool) -> None:
        """A bucket is full: its unit may not be needed any more."""
        if self.gathering is not None:
            if by_hook:
                self.gathering.settle()
            self.gathering.bucket_left(self.stores[bucket.index].unit)

    def reduce(self, bucket: Bucket, async_op: bool) -> Pending | None:
        """Sum a full bucket over all ranks, into this rank's shard of it."""
        start, stop = self.stores[bucket.index].plan.shard(self.rank)
        own, flat, groups = bucket.flat[start:stop], bucket.flat, self.groups
        replicas = groups.replicas
        if replicas is None:
            work = ops.reduce_scatter(
                own, flat, group=groups.shard, schedule=self._schedule, wire=self._wire,
                async_op=async_op, label=bucket.label,
            )  # fmt: skip
        else:

            def both() -> None:
                if in_shared_memory(groups.shard, flat):
                    ops.reduce_scatter(own, flat, group=groups.shard, label=bucket.label)
                else:  # checked as `call`: a second check would be numbered while the next bucket's is
                    wait_for(native.reduce_scatter(own, flat, "sum", groups.shard), "the sum in the host")
                ops.all_reduce(own, group=replicas, wire=self._wire, label=bucket.label)

            call = Call("reduce_scatter", groups.shard, flat, "sum", label=bucket.label)
            work = call.scheduled(both, own, async_op, replicas)
        return work if isinstance(work, Pending) else None

    def reduced(self, bucket: Bucket) -> None:
        """The sum of a bucket is there."""
        store = self.stores[bucket.index]
        start, stop = store.plan.shard(self.rank)
        own = bucket.flat[start:stop]
        if not self.strategy.gradients and own.dtype == store.master.dtype and self.offload is None:
            store.gradient = own
        else:
            if store.gradient is None:
                store.gradient = self._like_master(store)
            self.lane.copy(store.gradient, own)
        if self.strategy.gradients:
            self._detach(bucket)

    def _like_master(self, store: _Store) -> torch.Tensor:
        if self.offload is None:
            return torch.empty_like(store.master)
        return self.offload.empty(store.master.numel(), store.master.dtype)

    def finish(self, absent: Sequence[Slot], used_anywhere: Sequence[int]) -> None:
        """As of Gradients: parts have them, but for those of parameters that no rank used."""
        self.lane.wait()  # whoever clips or steps reads them, and no stream holds back the host
        unused = {slot.index for slot in absent if not used_anywhere[slot.index]}
        for store in self.stores:
            assert store.gradient is not None
            if store.older is not None:
                store.gradient.add_(store.older)
                store.older = None
            for part in store.parts:
                if part.index not in unused:
                    part.parameter.grad = part.of(store.gradient)

    # A step.

    def settle(self, kinds: Collection[int] | None = None) -> None:
        """Nothing is under way that the latest steps began: gathers, of these kinds, and copies."""
        for store in self.stores:
            if kinds is None or store.kind in kinds:
                store.settle()
        self.lane.wait()

    def before_step(self, kinds: Collection[int]) -> None:
        """The optimizers of these numbers step next. Nobody may write what others still read."""
        self.settle(kinds)
        self.check_views()
        if self.gathering is not None:
            self.gathering.before_step()
        if self.common_parameters:
            ops.barrier(group=self.groups.shard)

    def after_step(self, kinds: Collection[int]) -> None:
        """The optimizers of these numbers have stepped this rank's shard: bring the others'."""
        stepped = [store for store in self.stores if store.kind in kinds]
        for store in reversed(stepped):  # as forward uses them
            if store.own is not store.master:
                self.lane.copy(store.own, store.master)
            if not self.common_parameters and self.gathering is None:
                self._gather(store)
        if self.offload is not None or not self._overlap():
            for store in reversed(stepped):
                store.settle()
        self.lane.join()
        self.lane.wait()  # or the next one to write masters, a checkpoint say, would write what still goes up
        if self.common_parameters:
            ops.barrier(group=self.groups.shard)

    def _gather(self, store: _Store) -> None:
        label = f"parameters of {self.all[store.plan.index].label}"
        in_background = self.offload is not None or self._schedule is not None or store.parameters.is_cuda
        with self.lane.within():
            work = ops.all_gather(
                store.parameters, store.own, group=self.groups.shard, schedule=self._schedule,
                label=label, async_op=in_background,
            )  # fmt: skip
        if isinstance(work, Pending):
            parameters = [self._parameters[place.item] for place in store.plan.places]
            modules = {module for each in parameters for module in self._owners.get(id(each), ())}
            store.coming = Coming(parameters, modules, work)

    def check_views(self) -> None:
        """RuntimeError that names a parameter which no longer lies where its bucket is."""
        with torch._C.DisableTorchFunctionSubclass():
            for store in self.stores:
                memory = store.parameters.untyped_storage()._cdata
                for place in store.plan.places:
                    item, parameter = self.layout.items[place.item], self._parameters[place.item]
                    if parameter.shape != item.shape or parameter.untyped_storage()._cdata != memory:
                        raise RuntimeError(
                            f"parameter {item.name} was {list(item.shape)} in parallelize and has "
                            f"other memory now, {list(parameter.shape)}: change it before, or write into it"
                        )

    # What is known only together.

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm over all parameters of all ranks, fp32 scalar; gradients that are None count 0."""
        parts = [part.parameter.grad for part in self.parts if part.parameter.grad is not None]
        squares = squared_norm(parts, self._parameters[0].device)
        ops.all_reduce(squares, group=self.groups.shard, label="norm of the gradient")
        return squares.sqrt().float()


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of all squares, fp64 scalar: rounded to fp32, it does not depend on who holds which of them."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).square().sum().to(device)  # of parts in the host's memory it is made there
