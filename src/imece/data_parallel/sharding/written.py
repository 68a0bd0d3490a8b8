"""Finds writes of a rank into parameters, outside of a step, that would be lost, or that the others lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from imece.data_parallel.sharding.stores import Division, Store

_COMMON = (
    "and the ranks of this host have its memory in common, so that each of them changed what the others had "
    "written: do it inside of `with model.gathered(write=True):`"
)
_FROM_MASTER = (
    "and the optimizer steps a master copy of it, from which the next step would fill it again: do it inside "
    "of `with model.gathered(write=True):`, or by model.load_state_dict"
)


class Written:
    """Counts the writes into those parameters of one sharded model where a write would be lost.

    Steps write into parts, and gathers into buckets, which count versions of their own. Parameters gathered
    by unit are freed in between, and notice writes themselves (see Gathering). Writes through `.data` are not
    counted; for parameters in shared memory, which only a step may write, some elements are compared instead.
    """

    def __init__(self, stores: Sequence[Store], division: Division) -> None:
        self._probes: list[_Probe] = []
        self._guarded: list[tuple[Store, str, torch.Tensor, str]] = []
        """Store, name, parameter, and what becomes of a write."""
        self._versions: list[int] = []  # of those
        common, rank = division.common_parameters, division.groups.shard.rank()
        common = common and division.groups.shard.size() > 1
        self._copies = [_Copy(store, rank) for store in stores if _is_copied(store, division)]
        for store in stores if division.gathering is None else ():
            if common or store.own is not store.master:
                lost = _COMMON if common else _FROM_MASTER
                self._guarded += (
                    (store, item.name, each, lost)
                    for item, each in zip(store.items, store.members, strict=True)
                )
            if common:
                self._probes.append(_Probe(store, rank))
        self.note()

    def note(self) -> None:
        """Accept all writes until now."""
        self._versions = [_version(parameter) for *_, parameter, _ in self._guarded]
        for probe in self._probes:
            probe.note()
        for copy in self._copies:
            copy.note()

    def own_part_alone(self) -> list[tuple[str, float]]:
        """Elements of the parameters, with their names, if only those of this rank's parts were changed since
        `note`; else nothing. The other ranks may have another value then: only they can tell.

        What a script writes into whole parameters on all ranks mostly changes elements of others' parts, too.
        """
        changed = [copy.changed() for copy in self._copies]
        if not any(own for own, _ in changed) or any(others for _, others in changed):
            return []
        return [each for copy in self._copies for each in copy.elements()]

    def check(self) -> None:
        """RuntimeError that names a parameter which was written into since `note`."""
        for _, complaint in self._whole():
            raise RuntimeError(complaint)
        for probe in self._probes:
            if (changed := probe.changed()) is not None:
                raise RuntimeError(f"parameter {changed} was written into, {_COMMON}")

    def check_beside_parts(self) -> None:
        """The same before new values of the parts are given to all ranks: of buckets in which this rank's
        parts are as they were. Where those are new, a checkpoint may have filled them."""
        for store, complaint in self._whole():
            if store.parts and store.written_part() is None:
                raise RuntimeError(complaint)

    def _whole(self) -> Iterator[tuple[Store, str]]:
        """The store of each parameter that was itself written into since `note`, and what to say of it."""
        for (store, name, parameter, lost), version in zip(self._guarded, self._versions, strict=True):
            if _version(parameter) != version:
                yield store, f"parameter {name} was written into, {lost}"


class _Probe:
    """The first, the middle and the last element of this rank's part of each parameter in shared memory.
    Writes through `.data` change no version, and nobody else may write there.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._memory = store, store.parameters
        first, end = store.plan.shard(rank)
        looked = [
            (item.name, at)
            for item, place in zip(store.items, store.plan.places, strict=True)
            if (start := max(place.start, first)) < (stop := min(place.stop, end))
            for at in (start, (start + stop) // 2, stop - 1)
        ]
        self._names = [name for name, _ in looked]
        self._places = torch.tensor([at for _, at in looked], dtype=torch.int64, device=self._memory.device)
        self.note()

    def _bytes(self) -> torch.Tensor:
        """The elements as bytes, 1D, so that NaN equals itself."""
        return self._memory[self._places].view(torch.uint8)

    def note(self) -> None:
        """Accept the present values."""
        self._noted = self._bytes()

    def changed(self) -> str | None:
        """The name of a parameter with other bits than those noted, unless its part was written into."""
        now = self._bytes()
        if torch.equal(now, self._noted):
            return None
        if not self._store.is_frozen and self._store.written_part() is not None:
            return None
        return self._names[int((now != self._noted).nonzero()[0]) // self._memory.itemsize]


class _Copy:
    """An element of each rank's part of each parameter, where each rank has all of them and steps its own."""

    def __init__(self, store: Store, rank: int) -> None:
        self._memory, self._names, places, own = store.parameters, list[str](), list[int](), list[bool]()
        for item, place in zip(store.items, store.plan.places, strict=True):
            for owner in range(store.plan.shards):
                first, end = store.plan.shard(owner)
                if (start := max(place.start, first)) < (stop := min(place.stop, end)):
                    self._names.append(item.name)
                    places.append((start + stop) // 2)
                    own.append(owner == rank)
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._own = torch.tensor(own, dtype=torch.bool, device="cpu")
        self.note()

    def note(self) -> None:
        """Accept the present values."""
        self._noted = self._memory[self._places]

    def changed(self) -> tuple[bool, bool]:
        """Whether elements of this rank's parts have other bits than those noted, and those of others'."""
        now, noted = (each.view(torch.uint8) for each in (self._memory[self._places], self._noted))
        if torch.equal(now, noted):
            return False, False
        differ = (now != noted).view(len(self._names), -1).any(1)
        return bool((differ & self._own).any()), bool((differ & ~self._own).any())

    def elements(self) -> Iterator[tuple[str, float]]:
        """The names and the present values."""
        values = self._memory[self._places]
        numbers = torch.view_as_real(values).sum(1) if values.is_complex() else values
        return zip(self._names, numbers.tolist(), strict=True)


def _is_copied(store: Store, division: Division) -> bool:
    """Whether each rank has these parameters for itself, and steps its part of them where it lies, on a CPU:
    to look at them does not wait."""
    alone = division.gathering is None and not division.common_parameters
    return alone and store.own is store.master and store.parameters.is_cpu


def _version(parameter: torch.Tensor) -> int:
    """How often it was written into; does not wait for one that is coming."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version
