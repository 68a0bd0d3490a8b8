"""The memory in which buckets of gradients are filled and summed. A bucket borrows what another gives back;
on GPUs, where torch's allocator is quick, from the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from imece import layout
from imece.collectives.shared_memory import shared_empty
from imece.data_parallel.reducing.buckets import Bucket
from imece.data_parallel.sharding.offload import Lane
from imece.data_parallel.sharding.stores import Division, Store
from imece.device import behind_this_stream


class BorrowedMemory:
    """The memory for the buckets of one sharded model."""

    def __init__(self, stores: Sequence[Store], division: Division, lane: Lane, *, keeps: bool) -> None:
        """stores: by bucket. lane: for copies out of this memory. keeps: memory that is given back
        stays here."""
        self._keeps = keeps or not division.strategy.gradients
        self._stores, self._lane = stores, lane
        self._dtype, self._in_reach = division.precision.reduce, division.in_reach
        # Buckets of gathered units differ more in size, so each takes exactly its own.
        self._fits_any = division.strategy.gradients and division.gathering is None
        self._spare: list[torch.Tensor] = []  # uint8
        self._borrowed: dict[int, torch.Tensor] = {}  # by bucket
        self.most_bytes = 0
        """The most bytes that existed at a time."""

    @property
    def nbytes(self) -> int:
        """Bytes of all this memory, lent or not."""
        return sum(each.nbytes for each in (*self._spare, *self._borrowed.values()))

    def lend(self, bucket: Bucket) -> None:
        """Give a bucket memory for its gradients."""
        store = self._stores[bucket.index]
        plan, device = store.plan, store.parameters.device
        dtype = self._dtype or store.parameters.dtype
        nbytes = plan.numel * dtype.itemsize
        fitting = [
            at for at, each in enumerate(self._spare) if each.numel() >= nbytes and each.device == device
        ]
        if fitting:
            memory = self._spare.pop(min(fitting, key=lambda at: self._spare[at].nbytes))
            self._lane.reuse(memory)
        else:
            if self._fits_any and self._keeps:
                alike = [each.plan.numel for each in self._stores if each.kind == store.kind]
                nbytes_taken = max(alike) * dtype.itemsize
            else:
                nbytes_taken = nbytes
            memory = self._new(nbytes_taken, device)
        self._borrowed[bucket.index] = memory
        self.most_bytes = max(self.most_bytes, self.nbytes)
        bucket.flat = memory[:nbytes].view(dtype)
        if not self._keeps:
            _zero_between(bucket.flat, plan.places)
        for place, slot in zip(plan.places, bucket.slots, strict=True):
            slot.view = bucket.flat[place.start : place.stop].view(slot.parameter.shape)
        bucket.attached = True

    def _new(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._in_reach and device.type == "cpu":
            return shared_empty(nbytes, torch.uint8).zero_()
        make = torch.zeros if self._keeps else torch.empty
        return make(nbytes, dtype=torch.uint8, device=device)

    def take_back(self, bucket: Bucket) -> None:
        """The sum was taken out of a bucket's memory: take the memory back."""
        bucket.flat = bucket.flat.new_empty(0)
        for slot in bucket.slots:
            slot.view = bucket.flat
        bucket.attached = False
        memory = self._borrowed.pop(bucket.index)
        if self._keeps:
            self._spare.append(memory)
        else:
            behind_this_stream(memory)

    def clear(self) -> None:
        """Let go of all memory."""
        self._spare.clear()
        self._borrowed.clear()


def _zero_between(flat: torch.Tensor, places: Sequence[layout.Place]) -> None:
    """Zero the padding: no gradient fills it, but it is summed and checked with the rest."""
    stops = [0, *(place.stop for place in places)]
    starts = [*(place.start for place in places), flat.numel()]
    for start, stop in zip(stops, starts, strict=True):
        if start < stop:
            flat[start:stop].zero_()
