"""ZeRO-1/2/3 and hybrid sharding over the reducer's buckets: which rank keeps what, and what moves.

    gradients whole until the step (zero1)   buckets keep their memory; the sum over the ranks lands in this
                                             rank's own shard of the bucket, in place; the rest is scratch
                                             then
    gradients sharded (zero2, zero3)         a bucket borrows memory when its first gradient comes, is summed
                                             as soon as it is full, and gives the memory back; shards are kept
                                             until they are zeroed, on a CPU for good
    parameters whole (zero1, zero2)          each rank steps its shard, and an all-gather in place brings the
                                             others; over a network while the next forward begins
                                             (sharding/coming.py)
    parameters sharded (zero3)               on CPUs of one host: one copy in memory that all its ranks share;
                                             each steps its shard where it lies, and nothing moves. Elsewhere
                                             sharding/gathering.py gathers by unit

A sum over ranks runs in the order of ranks, whoever computes it. So all of these give the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from imece.buckets import most_under_way
from imece.collectives import ops
from imece.collectives.pending import Pending
from imece.data_parallel.reducing.buckets import Bucket, Gradients, Slot
from imece.data_parallel.reducing.way import is_over_hosts
from imece.data_parallel.sharding.accumulated import Accumulated
from imece.data_parallel.sharding.borrowed import BorrowedMemory
from imece.data_parallel.sharding.cast import let_any_come, widen_gradients
from imece.data_parallel.sharding.coming import Coming
from imece.data_parallel.sharding.divided import Divided
from imece.data_parallel.sharding.offload import Direct, Lane
from imece.data_parallel.sharding.parts import Part
from imece.data_parallel.sharding.stores import Division, Store, make_stores
from imece.data_parallel.sharding.trained import Trained
from imece.data_parallel.sharding.written import Written
from imece.device import behind_this_stream, keeps_freed


class Sharding(Gradients):
    """The memory of one model under one strategy, and the collectives on it. One reducer uses it."""

    def __init__(
        self,
        trained: Trained,
        frozen: Trained,
        division: Division,
        *,
        fill: Callable[[int], None] | None,
        may_come_late: weakref.WeakMethod[Callable[[], bool]],
        owners: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        """All ranks of the world group construct this together. frozen: frozen parameters to be sharded with
        the others.

        fill: see `make_stores`. may_come_late: asked in each step, whether the step may end before gathers
        over a network have ended. owners: for each parameter, by its id, the modules that have it.
        """
        self.trained, self.precision = trained, division.precision
        self.strategy, self.groups, self._way = division.strategy, division.groups, division.way
        self.gathering, self.offload = division.gathering, division.offload
        self.lane: Lane = self.offload.lane if self.offload is not None else Direct()
        self.common_parameters = division.common_parameters
        self._may_come_late, self._owners = may_come_late, owners
        self.gathers, self.borrows = self.gathering is not None, self.strategy.gradients
        self.rank, self.size = self.groups.shard.rank(), self.groups.shard.size()
        cap_bytes = None if self.gathers else division.cap_bytes
        self.layout, self.frozen_layout = (each.lay(self.size, cap_bytes) for each in (trained, frozen))
        self.stores, self.frozen = make_stores(
            [(trained, self.layout), (frozen, self.frozen_layout)], division, fill
        )
        """The stores of trained parameters, by bucket, and those of frozen parameters that are sharded."""
        device = self.stores[0].parameters.device
        self.most_under_way = most_under_way(
            overlap=self._way.overlap,
            over_hosts=is_over_hosts(self.groups, self._way.schedule),
            in_common=self.groups.in_common(device),
            replicas=self.groups.replicas is not None,
        )
        self._lets_go = self.offload is None and keeps_freed(device)  # gives memory back
        self._in_backward = False
        self._added: set[int] = set()  # buckets whose earlier sums this backward has been added to
        self.parts = [part for store in self.stores for part in store.parts]
        filled = [_bucket(store, self.precision.reduce) for store in self.stores]
        self.all = [bucket for bucket, _ in filled]
        self.slots = sorted((slot for _, slots in filled for slot in slots), key=lambda slot: slot.index)
        reduce_bytes = self.precision.reduce.itemsize if self.precision.reduce is not None else 0
        self._narrow = [slot.parameter for slot in self.slots if slot.parameter.dtype.itemsize < reduce_bytes]
        self._widens = False  # autograd adds up their gradients in `reduce`
        self.may_be_posted = self._way.is_plain and not self.borrows and self.groups.replicas is None
        # By bucket: its memory, and this rank's shard of that.
        self._owns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._landed: set[int] = set()  # buckets whose sum lands, or has landed, directly in the kept shard
        self.has_private = False  # this rank has private copies of parameters in shared memory, to stay
        self.accumulated = Accumulated(trained.kinds)
        self.divided = Divided(trained.named, self.strategy.name, freed=self.gathers)
        self.written = Written(self.every_store, division)
        self.memory = BorrowedMemory(self.stores, division, self.lane, keeps=not self._lets_go)
        if not self.borrows:
            for bucket in self.all:
                self.attach(bucket)

    # Memory.

    def attach(self, bucket: Bucket) -> None:
        """As in Gradients."""
        self.memory.lend(bucket)

    def let_go(self) -> None:
        """Let go of all memory but that of the parameters, whatever is under way. Nothing can follow."""
        self.lane.wait()
        for store in self.every_store:
            if store.coming is not None:
                store.coming.give_up()
            store.parts.clear()
        for kept in (self.stores, self.frozen, self.parts, self.memory, self._owns, self._narrow):
            kept.clear()
        del self.groups
        if self.gathering is not None:
            self.gathering.let_go()

    # A backward.

    def when_over(self, tell: Callable[[Sequence[Bucket]], None]) -> None:
        """As in Gradients: units of parameters that are gathered."""
        if self.gathering is None:
            return
        known, teller = weakref.ref(self), weakref.WeakMethod(tell)

        def over(units: set[int]) -> None:  # the modules' hooks keep it
            if (sharding := known()) is not None and (told := teller()) is not None:
                told([bucket for bucket in sharding.all if sharding.stores[bucket.index].unit in units])

        self.gathering.when_over = over

    def start(self) -> None:
        """A synchronised backward begins. It adds to sums that were not zeroed since the last one."""
        if self.gathering is not None:
            self.gathering.begin()
        if self._widens:
            self._widens = False
            let_any_come(self._narrow)
        self.refuse_mixed({store.kind for store in self.stores})
        self._in_backward = True
        live = []
        for store in self.stores:
            store.older = None
            here = [part for part in store.parts if part.parameter.grad is not None]
            if here:
                store.older = self._taken_aside(store)
            live += [part.index for part in here]
        self.accumulated.begin(live)

    def stay(self) -> None:
        """As in Gradients. If buckets have more bits than parameters, so has the sum over micro-batches."""
        if not self._widens:
            self._widens = True
            widen_gradients(self._narrow, self.precision.reduce)

    def _taken_aside(self, store: Store) -> torch.Tensor:
        """The gradients that a store holds, kept apart from where the next sum lands."""
        older = None
        if self.borrows and self.offload is None:  # the host's memory that the GPU reaches is not doubled
            older, store.gradient = store.gradient, None
        if older is None:
            older = torch.zeros_like(store.master)
        for part in store.parts:
            place, grad = part.of(older), part.parameter.grad
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        return older

    def leaves(self, bucket: Bucket, by_hook: bool) -> None:
        """A bucket is full: its unit may not be needed any more."""
        if self.gathering is not None:
            if by_hook:
                self.gathering.settle()
            self.gathering.bucket_left(self.stores[bucket.index].unit)

    def reduce(self, bucket: Bucket, async_op: bool) -> Pending | None:
        """Sum a full bucket over all ranks, into this rank's shard of the bucket or into the
        kept gradients."""
        flat, groups, store = bucket.flat, self.groups, self.stores[bucket.index]
        own = self._own(bucket)
        if self.borrows and self._is_kept_as(own, store):  # nothing is to be copied out of borrowed memory
            own = store.gradient = self._like_master(store) if store.gradient is None else store.gradient
            self._landed.add(bucket.index)
        if groups.replicas is None:
            work = ops.reduce_scatter(
                own, flat, group=groups.shard, schedule=self._way.schedule, wire=self._way.wire,
                async_op=async_op, label=bucket.label,
            )  # fmt: skip
        else:
            work = ops.sum_of_rows(
                own, flat, group=groups.shard, replicas=groups.replicas, wire=self._way.wire,
                async_op=async_op, label=bucket.label,
            )  # fmt: skip
        return work if isinstance(work, Pending) else None

    def reduced(self, bucket: Bucket) -> None:
        """The sum of a bucket is complete."""
        store = self.stores[bucket.index]
        if bucket.index in self._landed:
            self._landed.remove(bucket.index)
        elif not self.borrows and self._is_kept_as(own := self._own(bucket), store):
            store.gradient = own
        else:
            own = self._own(bucket)
            if store.gradient is None:
                store.gradient = self._like_master(store)
            self.lane.copy(store.gradient, own)
        if self.offload is None:
            self._complete(store)
        if self.borrows:
            self.memory.take_back(bucket)

    def _complete(self, store: Store) -> None:
        """A sum is where the optimizer steps: add it to those of earlier backwards. Frozen parts keep those
        alone."""
        assert store.gradient is not None
        for part in store.parts:
            if not part.parameter.requires_grad:
                part.of(store.gradient).zero_()
        if store.older is not None:
            store.gradient.add_(store.older)
            behind_this_stream(store.older)
            store.older = None
            if self.borrows and self.offload is None:
                self._added.add(store.plan.index)
                for part in store.parts:  # or earlier sums would keep their memory until backward is over
                    if part.parameter.grad is not None:
                        part.parameter.grad = part.of(store.gradient)

    def refuse_mixed(self, kinds: Collection[int]) -> None:
        """RuntimeError if a backward that raised was added to some gradients of these optimizers alone."""
        stores = [store for store in self.stores if store.kind in kinds]
        for store in stores:
            kept = any(part.parameter.grad is not None for part in store.parts)
            if kept and store.plan.index in self._added:
                raise RuntimeError(
                    "a backward that raised was added to some gradients of earlier micro-batches, and to "
                    "others not: call optimizer.zero_grad(), and begin the step again"
                )
        self._added.difference_update(store.plan.index for store in stores)

    def _own(self, bucket: Bucket) -> torch.Tensor:
        """This rank's shard of a bucket."""
        flat, own = self._owns.get(bucket.index, (None, bucket.flat))
        if flat is not bucket.flat:
            own = bucket.flat[slice(*self.stores[bucket.index].plan.shard(self.rank))]
            if not self.borrows:  # the view would keep memory that is given back
                self._owns[bucket.index] = bucket.flat, own
        return own

    def _is_kept_as(self, own: torch.Tensor, store: Store) -> bool:
        """Whether the optimizer can step with the sum as it is: it has the same dtype and kind of memory."""
        return self.offload is None and own.dtype == store.master.dtype

    def _like_master(self, store: Store) -> torch.Tensor:
        if self.offload is None:
            return torch.empty_like(store.master)
        return self.offload.empty(store.master.numel(), store.master.dtype)

    def finish(self, absent: Sequence[Slot], used_anywhere: Sequence[int]) -> None:
        """As in Gradients: set the gradients of parts, except frozen ones and those of parameters that no
        rank used."""
        self._in_backward = False
        self._added.clear()
        self.lane.wait()  # clipping and stepping read on the host, which no stream holds back
        unused = {slot.index for slot in absent if not used_anywhere[slot.index]}
        frozen = {part.index for part in self.parts if not part.parameter.requires_grad}  # in their groups
        self.accumulated.came({slot.index for slot in self.slots} - unused, frozen)
        for store in self.stores:
            if self.offload is not None:
                self._complete(store)
            assert store.gradient is not None
            for part in store.parts:
                if part.index not in unused and part.index not in frozen:
                    part.parameter.grad = part.of(store.gradient)
        self.divided.begin()

    def zeroed(self, kinds: Collection[int], set_to_none: bool) -> None:
        """The gradients of the optimizers of these numbers were zeroed: on a GPU, where memory is quick to
        get again, the sums give theirs to the next forward until the next sums come."""
        self.accumulated.zeroed(kinds, set_to_none)
        self.divided.end()
        self._added -= {store.plan.index for store in self.stores if store.kind in kinds}
        if not set_to_none or not self._lets_go or self._in_backward:
            return
        for store in self.stores:
            if store.kind in kinds and store.gradient is not None:
                behind_this_stream(store.gradient)
                store.gradient = None

    # A step.

    def settle(self, kinds: Collection[int] | None = None) -> None:
        """Wait for whatever the latest steps began: gathers, of these kinds, and copies."""
        for store in self.stores:
            if kinds is None or store.kind in kinds:
                store.settle()
        self.lane.wait()

    def before_step(self, kinds: Collection[int]) -> None:
        """Optimizers of these numbers step next: make sure that nobody still reads what they write.

        RuntimeError inside of `gathered`: what is stepped there would be lost.
        """
        if self.has_private:
            raise RuntimeError(
                "an optimizer's step, or a load from a checkpoint, inside of gathered(write=True): what is "
                "there would take its place; do it behind the `with`"
            )
        self.divided.end()
        self.settle(kinds)
        self.check_views()
        if self.gathering is not None:
            self.gathering.before_step()
        if self.common_parameters:
            ops.barrier(group=self.groups.shard)

    def after_step(self, kinds: Collection[int]) -> None:
        """Optimizers of these numbers have stepped this rank's shards: gather the others'."""
        stepped = [store for store in self.stores if store.kind in kinds]
        for store in reversed(stepped):  # in the order in which forward uses them
            store.bring_back()
            store.note_parts()
            if store.own is not store.master:
                self.lane.copy(store.own, store.master)
            if not self.common_parameters and self.gathering is None:
                self._gather(store)
        may_come_late = self._may_come_late()
        if self.offload is not None or may_come_late is None or not may_come_late():
            for store in reversed(stepped):
                store.settle()
        self.lane.wait()  # else the next write into masters, by a checkpoint, might change what goes up
        # Graphs from before this step have saved these parameters; autograd does not see ranks write
        # into buckets.
        torch.autograd.graph.increment_version(
            [
                parameter
                for store in stepped
                for place, parameter in zip(store.plan.places, store.members, strict=True)
                if place.item in self.accumulated.summed
            ]
        )
        self.note_versions()
        if self.common_parameters:  # last: others may write into it then, unnoted
            ops.barrier(group=self.groups.shard)

    def _gather(self, store: Store) -> None:
        if not _has_others(self.groups.shard):
            return
        label = f"parameters of {store.label}"
        in_background = self.offload is not None or self._way.schedule is not None or store.parameters.is_cuda
        with self.lane.within():
            work = ops.all_gather(
                store.parameters, store.own, group=self.groups.shard, schedule=self._way.schedule,
                label=label, async_op=in_background,
            )  # fmt: skip
        if isinstance(work, Pending):
            modules = {module for each in store.members for module in self._owners.get(id(each), ())}
            # The gather reads this rank's own elements where they lie, and may write them back.
            lies_there = [part.parameter for part in store.parts] if store.own is store.master else []
            store.coming = Coming([*store.members, *lies_there], modules, work)

    @property
    def every_store(self) -> list[Store]:
        """The stores of trained parameters, then those of frozen ones."""
        return [*self.stores, *self.frozen]

    @property
    def frozen_parts(self) -> list[Part]:
        """This rank's parts of frozen parameters that are sharded."""
        return [part for store in self.frozen for part in store.parts]

    @property
    def frozen_items(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) of sharded frozen parameters, whichever ranks hold them."""
        return [
            (item.name, item.shape, store.parameters.dtype) for store in self.frozen for item in store.items
        ]

    @property
    def stores_to_copy(self) -> list[Store]:
        """Stores whose parameters are not what a state dict holds: it needs copies of their masters."""
        return [store for store in self.every_store if self.gathers or store.has_more_bits]

    def gather_masters(self, store: Store, why: str) -> torch.Tensor:
        """The masters of all ranks, [numel], on the parameters' device; for frozen parameters,
        these themselves. why: for errors where not all ranks call this."""
        own = store.master.to(store.parameters.device)
        whole = own.new_empty(store.plan.numel)
        schedule, label = self._way.schedule, f"{store.label}, {why}"
        ops.all_gather(whole, own, group=self.groups.shard, schedule=schedule, label=label)
        return whole

    @property
    def of_each_rank(self) -> list[tuple[str, torch.Tensor]]:
        """The trained parameters of which each rank has a copy of its own, with their names, and in which it
        steps its part."""
        if self.gathering is not None or self.common_parameters:
            return []
        return [
            (item.name, each)
            for store in self.stores
            if store.own is store.master
            for item, each in zip(store.items, store.members, strict=True)
        ]

    def check_views(self) -> None:
        """RuntimeError that names a parameter which no longer lies in its bucket."""
        for store in self.every_store:
            store.check_views()

    def note_versions(self) -> None:
        """Accept all writes into parameters until now."""
        self.written.note()
        if self.gathering is not None:
            self.gathering.note_versions()

    def check_parts(self) -> None:
        """RuntimeError that names a parameter whose part was written into outside of a step."""
        for store in self.stores:
            store.check_parts()


def _has_others(group: dist.ProcessGroup) -> bool:
    """Whether gathering parameters in place brings any from other ranks."""
    return group.size() > 1


def _bucket(store: Store, reduce: torch.dtype | None) -> tuple[Bucket, list[Slot]]:
    """A bucket for the gradients of a store, without memory so far, and its slots. reduce: its dtype; None:
    that of the parameters."""
    nothing = store.parameters.new_empty(0, dtype=reduce)
    bucket = Bucket(store.plan.index, nothing, store.plan.used_numel, store.label, attached=False)
    members = zip(store.plan.places, store.items, store.members, strict=True)
    slots = [Slot(place.item, item.name, each, bucket, nothing) for place, item, each in members]
    for slot in slots:
        bucket.add(slot)
    return bucket, slots
