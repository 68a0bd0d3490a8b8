"""Gradients that are whole on every rank: `.grad` are views of one piece of memory that layout.py cuts up.

If the order of parameters changes, the same memory is cut anew, so a rebuild needs no second piece.

`share_memory()`, or a queue to another process, moves a storage: torch puts other memory under all its views.
But other ranks write into the old memory as long as they know of it. So buckets are views of a storage that
nobody else gets, and `.grad` are views of a second storage on the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from imece import layout
from imece.collectives import ops
from imece.collectives.auto import links_of
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending
from imece.collectives.shared_memory import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.reducing.buckets import Bucket, Gradients, Slot
from imece.data_parallel.reducing.cap import cap_over
from imece.data_parallel.reducing.way import HIERARCHICAL, Way
from imece.listing import ends_of

_ALIGN_BYTES = 64


class WholeGradients(Gradients):
    """All gradients on every rank, summed by all-reduce in place."""

    is_whole = True

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        group: dist.ProcessGroup,
        caps_bytes: Sequence[int],
        way: Way,
        *,
        choose_cap: bool,
    ) -> None:
        """named: in registration order, the same on all ranks. caps_bytes: of the first, second, ... bucket;
        the last one repeats. choose_cap: that one is for the first backward only; then cap.py chooses
        another."""
        self._items = [
            layout.Item(name, tuple(each.shape), _dtype(each), each.itemsize, str(each.device))
            for name, each in named
        ]
        self._parameters = [parameter for _, parameter in named]
        self._numels = [item.numel for item in self._items]
        self._group, self._way = group, way
        self.caps_bytes, self._choose_cap = caps_bytes, choose_cap
        # Ranks of this host reduce in place, so memory on the CPU must be shared.
        self._shared = isinstance(group, SharedMemoryGroup) or way.schedule == HIERARCHICAL
        self.may_be_posted = way.is_plain
        self._memory: dict[torch.device, torch.Tensor] = {}  # uint8, the storage under the buckets
        self._given: dict[torch.device, torch.Tensor] = {}  # the same bytes, the storage under `.grad`
        self._places: dict[int, layout.Place] = {}  # by parameter: its place in its bucket
        self.all = []
        self.slots = []
        self._lay(None)

    def reduce(self, bucket: Bucket, async_op: bool) -> Pending | None:
        """As in Gradients."""
        work = ops.all_reduce(
            bucket.flat, group=self._group, schedule=self._way.schedule, wire=self._way.wire,
            async_op=async_op, label=bucket.label,
        )  # fmt: skip
        return work if isinstance(work, Pending) else None

    def start(self) -> None:
        """As in Gradients. `grad.data = ...`, and so `model.to(...)`, takes a view out of its bucket; this
        puts it back.

        RuntimeError if a parameter has another dtype, device or number of elements than when it was wrapped.
        """
        if [slot.view.data_ptr() for slot in self.slots] != self._addresses:
            for slot in self.slots:  # the values in .grad are copied into the view, like any other gradient
                self._view_again(slot)
        if list(map(torch.Tensor.numel, self._parameters)) != self._numels:
            for slot in self.slots:  # else a gradient would be written over its neighbour, without an error
                self.check_kind(slot)

    def leaves(self, bucket: Bucket, by_hook: bool) -> None:
        """As in Gradients: copies back gradients that were moved out during this backward."""
        for moved, slot in self._moved(bucket):
            slot.view.copy_(moved)

    def reduced(self, bucket: Bucket) -> None:
        """As in Gradients: the sum is in the bucket, wherever `.grad` was moved meanwhile."""
        for _ in self._moved(bucket):
            pass

    def _moved(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Slot]]:
        """(old view, slot) for views that were moved out of a bucket; each slot gets a view of the
        bucket again."""
        slots = bucket.slots
        if slots[0].view.data_ptr() == self._addresses[slots[0].index]:
            return
        for slot in slots:
            moved, is_in_it = slot.view, slot.holds(slot.parameter.grad)
            self._view_again(slot)
            yield moved, slot
            if is_in_it:
                slot.parameter.grad = slot.view

    def _view_again(self, slot: Slot) -> None:
        if slot.view.data_ptr() != self._addresses[slot.index]:
            self.check_kind(slot)
            slot.view = _view(self._given_to(slot), slot.parameter)

    def _given_to(self, slot: Slot) -> torch.Tensor:
        """A slot's elements in the storage under `.grad`, 1D; in a new storage if that one was moved."""
        place, flat, device = self._places[slot.index], slot.bucket.flat, slot.bucket.flat.device
        memory = self._memory[device]
        if self._given[device].data_ptr() != memory.data_ptr():
            self._given[device] = _another_storage(memory)
        first = flat.data_ptr() - memory.data_ptr()
        flat = self._given[device][first : first + flat.nbytes].view(flat.dtype)
        return flat[place.start : place.stop]

    def check_kind(self, slot: Slot) -> None:
        """As in Gradients."""
        item, flat, parameter = self._items[slot.index], slot.bucket.flat, slot.parameter
        as_wrapped = parameter.dtype == flat.dtype and parameter.device == flat.device
        if not as_wrapped or parameter.numel() != item.numel:
            was = f"{item.dtype}{list(item.shape)} on {flat.device}"
            now = f"{_dtype(parameter)}{list(parameter.shape)} on {parameter.device}"
            raise RuntimeError(
                f"parameter {slot.name} was {was} when the model was wrapped, and is {now} now: change it "
                f"before, or wrap the model again"
            )

    def finish(self, absent: Sequence[Slot], used_anywhere: Sequence[int]) -> None:
        """As in Gradients: an unused parameter gets other ranks' gradient, or keeps what was there before."""
        for slot in absent:
            if used_anywhere[slot.index]:
                slot.parameter.grad = slot.view
            elif slot.kept is not None:
                slot.view.copy_(slot.kept)
            slot.kept = None
        for slot in self.slots:
            if slot.older is not None:
                _add(slot, slot.older)
                slot.older = None

    def rebuild(self, came: Sequence[int], arrivals: Sequence[tuple[int, float]], overlap: bool) -> None:
        """As in Gradients: in rank 0's order; parameters without a gradient go last.

        RuntimeError: as `start`.
        """
        for slot in self.slots:
            self.check_kind(slot)
        seen = set(came)
        order = [*came, *(at for at in reversed(range(len(self.slots))) if at not in seen)]
        cap, device = 0, self.all[0].flat.device
        if self._choose_cap:
            links = links_of(self._group, device)
            cap = cap_over(links, self._way.schedule or "native", arrivals, self.caps_bytes[0], overlap)
        agreed = torch.tensor([cap, *order], dtype=torch.int64, device=host_device(self._group, device))
        ops.broadcast(agreed, 0, group=self._group, label="order of gradients")
        cap, *order = agreed.tolist()
        if cap:
            self.caps_bytes = [self.caps_bytes[0], cap]
        with torch.no_grad():
            self._lay(order)

    def let_go(self) -> None:
        """As in Gradients."""
        self._memory.clear()
        self._given.clear()
        del self._group

    def _lay(self, order: Sequence[int] | None) -> None:
        """Make buckets and views for this order of parameters. Gradients in old views move over."""
        laid = layout.build(self._items, cap_bytes=self.caps_bytes, order=order, align_bytes=_ALIGN_BYTES)
        here = {memory.untyped_storage().data_ptr() for memory in self._all_memory().values()}
        moving = [
            (slot, grad.clone())
            for slot in self.slots
            if (grad := slot.parameter.grad) is not None and grad.untyped_storage().data_ptr() in here
        ]
        free = {device: memory.zero_() for device, memory in self._memory.items()}
        before, self.all = self.slots, []
        slots: dict[int, Slot] = {}
        for plan in laid.buckets:
            device = self._parameters[plan.places[0].item].device
            taken = -(-plan.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            flat = free[device][: plan.nbytes].view(self._parameters[plan.places[0].item].dtype)
            free[device] = free[device][taken:]
            label = ends_of([self._items[place.item].name for place in plan.places])
            bucket = Bucket(plan.index, flat, plan.used_numel, label)
            for place in plan.places:
                parameter, self._places[place.item] = self._parameters[place.item], place
                if before:
                    slot = before[place.item]
                    slot.bucket = bucket
                else:
                    slot = Slot(place.item, self._items[place.item].name, parameter, bucket, flat)
                slot.view = _view(self._given_to(slot), parameter)
                slots[place.item] = slot
                bucket.add(slot)
            self.all.append(bucket)
        self.slots = [slots[index] for index in range(len(self._items))]
        self._addresses = [slot.view.data_ptr() for slot in self.slots]
        for slot, grad in moving:
            slot.view.copy_(grad)
            slot.parameter.grad = slot.view

    def _all_memory(self) -> dict[torch.device, torch.Tensor]:
        """Enough for any layout of these parameters: each of them might end a bucket, and be padded."""
        if not self._memory:
            sizes: dict[torch.device, int] = {}
            for parameter in self._parameters:
                padded = parameter.nbytes + 2 * _ALIGN_BYTES
                sizes[parameter.device] = sizes.get(parameter.device, 0) + padded
            for device, nbytes in sizes.items():
                if self._shared and device.type == "cpu":
                    self._memory[device] = shared_empty((nbytes,), torch.uint8)
                else:
                    self._memory[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._given[device] = _another_storage(self._memory[device])
        return self._memory


def _another_storage(memory: torch.Tensor) -> torch.Tensor:
    """A second storage on the same memory. On a GPU the same storage: nothing moves it there."""
    return torch.from_numpy(memory.numpy()) if memory.device.type == "cpu" else memory


def _view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`flat`, [numel], shaped and strided like the parameter if that leaves no gaps."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _add(slot: Slot, older: torch.Tensor) -> None:
    """Add the gradient from before this backward."""
    if slot.holds(slot.parameter.grad):
        slot.view.add_(older)
    else:  # nobody used the parameter in this backward
        slot.view.copy_(older)
        slot.parameter.grad = slot.view


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
