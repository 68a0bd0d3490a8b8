"""What a rank keeps of a sharded model, by bucket: parameters, masters, summed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from imece import layout
from imece.collectives import ops
from imece.collectives.common_memory import common_zeros
from imece.collectives.shared_memory import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.reducing.way import HIERARCHICAL, Way
from imece.data_parallel.sharding.cast import MixedPrecision
from imece.data_parallel.sharding.coming import Coming
from imece.data_parallel.sharding.gathering import Gathering
from imece.data_parallel.sharding.offload import Direct, Lane, Offload
from imece.data_parallel.sharding.parts import Part, make_parts, move_into
from imece.data_parallel.sharding.trained import FROZEN, Trained
from imece.data_parallel.sharding.units import Flat
from imece.data_parallel.strategy import ShardGroups, Strategy
from imece.device import casts_fast
from imece.listing import ends_of


@dataclass(frozen=True, eq=False)
class Division:
    """How a model is divided among these ranks, where it lies, and how it travels."""

    strategy: Strategy
    groups: ShardGroups
    cap_bytes: int
    """The cap of a bucket, if nothing is gathered by unit."""
    precision: MixedPrecision
    way: Way
    """How buckets travel in the shard group; a hybrid strategy's wire is for the way between hosts.

    Sharding says when a step may end before its gathers have.
    """
    gathering: Gathering | None = None
    """Who gathers parameters that are not in shared memory."""
    offload: Offload | None = None
    """Where what the optimizer steps lies, if not with the parameters."""
    root: int | None = None
    """The rank of the world group that has all frozen parameters, if newcomers lack them; None: all ranks
    have them, or nobody."""

    @property
    def in_common(self) -> bool:
        """Whether all ranks of the shard group share memory."""
        return isinstance(self.groups.shard, SharedMemoryGroup)

    @property
    def in_reach(self) -> bool:
        """Whether some ranks of the shard group share memory."""
        return self.in_common or self.way.schedule == HIERARCHICAL

    @property
    def common_parameters(self) -> bool:
        """Whether parameters lie in shared memory, one copy for all ranks."""
        return self.in_common and self.strategy.parameters and self.gathering is None


@dataclass(eq=False, repr=False)
class Store:
    """The memory of one bucket on this rank."""

    plan: layout.Bucket
    unit: int
    kind: int
    items: list[layout.Item]  # in the order of places
    members: list[torch.Tensor]  # in the order of places: the model's parameters, views of `parameters`
    parameters: torch.Tensor  # [numel]
    own: torch.Tensor  # [shard_numel], what other ranks get: a view of `parameters` unless gathered
    master: torch.Tensor  # `own` itself unless that has fewer bits or lies elsewhere; see offload.py
    # For a unit gathered on a GPU, each gather casts `own`: then it is the master, even if that has
    # more bits.
    parts: list[Part]
    gradient: torch.Tensor | None = None  # [shard_numel], where `master` lies; None: nothing came yet
    older: torch.Tensor | None = None  # what the sum under way will be added to
    coming: Coming | None = None  # what the latest step gathers, while it may be under way
    _noted: list[tuple[int, int]] = field(default_factory=list)  # of each part, when all ranks had it

    @property
    def label(self) -> str:
        """Names the bucket in errors."""
        return ends_of([item.name for item in self.items])

    @property
    def is_frozen(self) -> bool:
        """Whether its parameters are frozen: then it has only `own` besides them."""
        return self.kind == FROZEN

    @property
    def has_more_bits(self) -> bool:
        """Whether masters have more bits than the parameters."""
        return self.parameters.dtype != self.master.dtype

    def settle(self) -> None:
        """Wait until what the latest step gathers has come.

        RuntimeError that names a parameter whose part was written into before that.
        """
        if self.coming is not None:
            early = self.written_part() if self.own is self.master and self.coming.nobody_waited else None
            self.coming.settle()
            self.coming = None
            if early is not None:
                raise RuntimeError(
                    f"this rank's part of parameter {early.name} was written into while other ranks still "
                    f"got it from the latest step, by code that does not wait for that (compiled, or with a "
                    f"tensor made of the part before the step): call model.settle() before it"
                )

    def check_views(self) -> None:
        """RuntimeError that names a parameter which no longer lies where its bucket is."""
        home = self.parameters
        with torch._C.DisableTorchFunctionSubclass():  # some may be freed, or be coming
            for item, _, parameter in self._elsewhere():
                if self._is_as_ever(item, parameter):
                    raise RuntimeError(
                        f"parameter {item.name} was given other memory (`p.data = ...`) after "
                        f"parallelize: write into what it has, `p.copy_(...)`, or do it inside of `with "
                        f"model.gathered(write=True):`"
                    )
                raise RuntimeError(
                    f"parameter {item.name} was {list(item.shape)}, {home.dtype} on {home.device}, in "
                    f"parallelize, and is {list(parameter.shape)}, {parameter.dtype} on "
                    f"{parameter.device}, in other memory now: change it before, or write into it"
                )

    def take_in(self) -> None:
        """Make parameters lie in the bucket again, with their values: who may write into them may have given
        them other memory, `p.data = ...`, as peft does."""
        with torch._C.DisableTorchFunctionSubclass():  # codes have a class of their own
            for item, place, parameter in self._elsewhere():
                if self._is_as_ever(item, parameter):
                    view = self.parameters[place.start : place.stop].view(item.shape)
                    view.copy_(parameter)
                    parameter.data = view

    def _elsewhere(self) -> Iterator[tuple[layout.Item, layout.Place, torch.Tensor]]:
        """Each parameter that no longer lies where its bucket is."""
        memory = self.parameters.untyped_storage()._cdata
        for item, place, parameter in zip(self.items, self.plan.places, self.members, strict=True):
            if parameter.shape != item.shape or parameter.untyped_storage()._cdata != memory:
                yield item, place, parameter

    def _is_as_ever(self, item: layout.Item, parameter: torch.Tensor) -> bool:
        """Whether a parameter has the shape, dtype and device that it had."""
        kind = parameter.shape, parameter.dtype, parameter.device
        return kind == (item.shape, self.parameters.dtype, self.parameters.device)

    def bring_back(self) -> None:
        """Make parts lie in `master` again: an optimizer may have given them other memory, `p.data = ...`.

        RuntimeError that names a parameter whose part has another size now.
        """
        address, itemsize = self.master.data_ptr(), self.master.itemsize
        for part in self.parts:
            parameter = part.parameter
            if parameter.data_ptr() != address + part.offset * itemsize and part.numel:
                if parameter.numel() != part.numel:
                    raise RuntimeError(
                        f"an optimizer has made {list(parameter.shape)} of the {part.numel} elements that it "
                        f"steps of parameter {part.name}"
                    )
                place = part.of(self.master)
                place.copy_(parameter)
                parameter.data = place

    def note_parts(self) -> None:
        """All ranks have the present values of the parts, or will have them soon."""
        self._noted = _written(self.parts)

    def check_parts(self) -> None:
        """RuntimeError that names a parameter whose part was written into since `note_parts`."""
        if (part := self.written_part()) is not None:
            raise RuntimeError(
                f"this rank's part of parameter {part.name} was written into outside of its optimizer's "
                f"step, and the other ranks do not have that: call imece.barrier() before it and "
                f"model.take_over_masters() after it, on all ranks"
            )

    def written_part(self) -> Part | None:
        """The first part that was written into since `note_parts`."""
        trios = zip(self.parts, _written(self.parts), self._noted, strict=True)
        return next((part for part, now, noted in trios if now != noted), None)


def _written(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """A stamp for each part, which changes when the part is written into or given other memory."""
    with torch._C.DisableTorchFunctionSubclass():  # they may be coming
        return [(part.parameter._version, part.parameter.data_ptr()) for part in parts]


def make_stores(
    all_laid: Sequence[tuple[Trained, layout.Layout]],
    division: Division,
    fill: Callable[[int], None] | None,
) -> list[list[Store]]:
    """The buckets of each layout. The model's parameters move into them; all ranks of the world group
    call this.

    fill: gives a unit's parameters memory and values, if they have none. It runs unit by unit, so that a rank
    has no more than one whole unit.
    """
    found: list[dict[int, Store]] = [{} for _ in all_laid]
    filled = set()
    plans = [
        (trained.pairs[plan.group][0], at, plan)
        for at, (trained, laid) in enumerate(all_laid)
        for plan in laid.buckets
    ]
    # The root last: it has what units share, and each of them may fill that.
    for unit, at, plan in sorted(plans, key=lambda each: (each[0] == 0, -each[0])):
        if fill is not None and unit not in filled:
            fill(unit)
            filled.add(unit)
        trained, laid = all_laid[at]
        found[at][plan.index] = _store(plan, laid, trained, division)
    return [[stores[index] for index in range(len(stores))] for stores in found]


def _store(plan: layout.Bucket, laid: layout.Layout, trained: Trained, division: Division) -> Store:
    rank, (unit, kind) = division.groups.shard.rank(), trained.pairs[plan.group]
    items = [laid.items[place.item] for place in plan.places]
    members = [trained.named[place.item][1] for place in plan.places]
    own_dtype, device = trained.dtypes[plan.places[0].item], members[0].device
    dtype = own_dtype if kind == FROZEN else division.precision.param or own_dtype
    start, stop = plan.shard(rank)
    flat = _memory(division, plan.numel, dtype, device)
    own = master = flat[start:stop]
    if dtype != own_dtype:
        before = torch.zeros(plan.numel, dtype=own_dtype, device=device)
        for place, parameter in zip(plan.places, members, strict=True):
            before[place.start : place.stop].copy_(parameter.detach().reshape(-1))
        master = before[start:stop].clone()
    root = division.root if kind == FROZEN else None
    first = rank == 0 if root is None else division.groups.world.rank() == root
    copies = not division.common_parameters or first
    if copies:
        move_into(flat, plan, members, copy=True)
    if division.common_parameters:
        ops.barrier(group=division.groups.shard)
    if root is not None and not (division.common_parameters and division.groups.replicas is None):
        ops.broadcast(flat, root, group=division.groups.world, label="frozen parameters")
    if not copies:  # before, `first` may die: then these still have its values
        move_into(flat, plan, members, copy=False)
    if kind == FROZEN:
        own = master = _kept_own(division, own)
    else:
        own, master = _kept(division, own, master)
    if division.gathering is not None:
        named = [(item.name, parameter) for item, parameter in zip(items, members, strict=True)]
        offload = division.offload
        lane: Lane | None = offload.lane if offload is not None and offload.parameters else None
        if own.dtype != flat.dtype:
            lane = Direct()
        division.gathering.units[unit].add(Flat(flat, own, named, lane, is_frozen=kind == FROZEN))
    parts = make_parts(plan, laid.items, rank, master, kind in trained.whole, frozen=kind == FROZEN)
    store = Store(plan, unit, kind, items, members, flat, own, master, parts)
    store.note_parts()
    return store


def _memory(division: Division, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a bucket of parameters."""
    if device.type != "cpu" or not division.in_reach or division.gathering is not None:
        return torch.zeros(numel, dtype=dtype, device=device)
    if division.common_parameters:
        nbytes = numel * dtype.itemsize
        return common_zeros(nbytes, division.groups.shard, "a bucket of parameters").view(dtype)
    return shared_empty(numel, dtype).zero_()


def _kept(division: Division, own: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in their kept memory: separate memory if units are gathered, and the host's if offloaded."""
    offload, same = division.offload, master is own
    if division.gathering is not None and offload is None and not same and casts_fast(own.device):
        return master, master
    own = _kept_own(division, own)
    master = own if same else master
    if offload is not None and not (offload.parameters and same):
        master = offload.hosted(master)
    return own, master


def _kept_own(division: Division, own: torch.Tensor) -> torch.Tensor:
    """The shard that other ranks get, in its kept memory."""
    if division.gathering is None:
        return own
    offload = division.offload
    return offload.hosted(own) if offload is not None and offload.parameters else own.clone()
