"""The buckets of a model in memory: one piece of it for all of them, cut up by layout.py.

When the order of parameters changes the same memory is cut anew, so a rebuild needs no second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from imece import layout
from imece.collectives.pending import Pending
from imece.collectives.shared_memory import shared_empty

_ALIGN_BYTES = 64


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter on its way."""

    index: int  # in registration order
    name: str
    parameter: torch.Tensor
    bucket: Bucket
    view: torch.Tensor  # shaped and strided as the parameter, in the bucket's memory
    uses: int = 1  # gradients that autograd writes in one backward
    kept: torch.Tensor | None = None  # the gradient of an unused parameter, until it is known to be so


@dataclass(eq=False, slots=True)
class Bucket:
    """A flat buffer that travels as one message."""

    index: int
    flat: torch.Tensor  # 1D, padded
    used_numel: int
    label: str  # for errors of the collective
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0  # slots that are not ready
    work: Pending | torch.futures.Future[Any] | None = None
    attached: bool = True  # whether it has memory; see shard.py

    def let_go(self) -> None:
        """Of its memory, and of what is under way in it."""
        if isinstance(self.work, Pending):
            self.work.give_up()
        self.work, self.attached = None, False
        self.flat = self.flat.new_empty(0)
        for slot in self.slots:
            slot.view, slot.kept = self.flat, None

    @property
    def buffer(self) -> torch.Tensor:
        """Without the padding."""
        return self.flat[: self.used_numel]


class Buckets:
    """All buckets of one model; `slots` stay the same objects when they are laid anew."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], *, shared: bool) -> None:
        """shared: whether ranks of this host reduce in place, so that memory on the CPU is to be shared."""
        self._items = [
            layout.Item(name, tuple(each.shape), _dtype(each), each.itemsize, str(each.device))
            for name, each in named
        ]
        self._parameters = [parameter for _, parameter in named]
        self._shared = shared
        self._memory: dict[torch.device, torch.Tensor] = {}  # uint8
        self.all: list[Bucket] = []
        self.slots: list[Slot] = []  # by parameter, in registration order

    def lay(
        self, cap_bytes: int | Sequence[int], first_bytes: int | None, order: Sequence[int] | None
    ) -> None:
        """Buckets and views for this order of parameters. Gradients that lie in old views move over."""
        self.layout = layout.build(
            self._items, cap_bytes=cap_bytes, first_bytes=first_bytes, order=order, align_bytes=_ALIGN_BYTES
        )
        moving = [
            (slot, slot.parameter.grad.clone()) for slot in self.slots if slot.parameter.grad is slot.view
        ]
        free = {device: memory.zero_() for device, memory in self._all_memory().items()}
        before, self.all = self.slots, []
        slots: dict[int, Slot] = {}
        for plan in self.layout.buckets:
            device = self._parameters[plan.places[0].item].device
            taken = -(-plan.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            flat = free[device][: plan.nbytes].view(self._parameters[plan.places[0].item].dtype)
            free[device] = free[device][taken:]
            names = [self._items[place.item].name for place in plan.places]
            label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            bucket = Bucket(plan.index, flat, plan.used_numel, label)
            for place in plan.places:
                parameter = self._parameters[place.item]
                view = _view(flat[place.start : place.stop], parameter)
                if before:
                    slot = before[place.item]
                    slot.bucket, slot.view = bucket, view
                else:
                    slot = Slot(place.item, self._items[place.item].name, parameter, bucket, view)
                slots[place.item] = slot
                bucket.slots.append(slot)
            self.all.append(bucket)
        self.slots = [slots[index] for index in range(len(self._items))]
        for slot, grad in moving:
            slot.view.copy_(grad)
            slot.parameter.grad = slot.view

    def let_go(self) -> None:
        """Of the memory for all layouts."""
        self._memory.clear()

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
        return self._memory


def _view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`flat`, [numel], shaped and strided as the parameter if that leaves no gaps."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
