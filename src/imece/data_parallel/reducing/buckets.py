"""Where a reducer's gradients lie: in flat buckets, each of which travels as one message.

There are two ways to keep them: WholeGradients (whole.py) keeps all gradients on every rank, Sharding
(../shard.py) in the end only this rank's part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from imece.collectives.pending import Pending


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """One parameter, and how far its gradient is in this backward."""

    index: int  # in registration order
    name: str
    parameter: torch.Tensor
    bucket: Bucket
    view: torch.Tensor  # shaped and strided like the parameter, in the bucket's memory
    uses: int = 1  # gradients that autograd writes in one backward
    kept: torch.Tensor | None = None  # the gradient of a possibly unused parameter, until that is known
    older: torch.Tensor | None = None  # an earlier reduced gradient, to which this backward's is added

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient lies in the view, even as another object, as after `.grad = .grad.data`."""
        return grad is self.view or (grad is not None and grad.data_ptr() == self.view.data_ptr())


@dataclass(eq=False, slots=True)
class Bucket:
    """A flat buffer that travels as one message."""

    index: int
    flat: torch.Tensor  # 1D, padded
    used_numel: int
    label: str  # names the bucket in errors of its collective
    _slots: list[weakref.ref[Slot]] = field(default_factory=list)
    pending: int = 0  # slots that are not ready
    work: Pending | torch.futures.Future[Any] | None = None
    attached: bool = True  # whether it has memory; see shard.py
    scale: torch.Tensor | float | None = None  # factor for its gradients; None: not known yet

    def add(self, slot: Slot) -> None:
        """Add one more slot, behind the others."""
        self._slots.append(weakref.ref(slot))

    @property
    def slots(self) -> list[Slot]:
        """Its slots, in the order of their memory. `Gradients.slots` keeps them: a slot refers to its bucket,
        and in a cycle a dropped model would keep its memory until the garbage collector comes."""
        return [slot for each in self._slots if (slot := each()) is not None]

    def let_go(self) -> None:
        """Let go of its memory and of what is under way in it."""
        if isinstance(self.work, Pending):
            self.work.give_up()
        self.work, self.attached = None, False
        self.flat = self.flat.new_empty(0)
        for slot in self.slots:
            slot.view, slot.kept = self.flat, None

    @property
    def buffer(self) -> torch.Tensor:
        """The gradients, without padding."""
        return self.flat[: self.used_numel]


class Gradients:
    """The buckets of one model. The reducer says when one is full; then this class or a hook sums it."""

    all: list[Bucket]
    """The buckets in the order in which they leave."""
    slots: list[Slot]
    """One slot per parameter, in registration order; slots stay the same objects when buckets are laid
    out anew."""
    is_whole = False
    """Whether `.grad` is a view into its bucket; otherwise each rank keeps only its part of the gradient."""
    borrows = False
    """Whether buckets take memory when their first gradient comes, so that a full one must leave at once."""
    most_under_way = 0
    """How many buckets may be summed while another one fills, if buckets borrow memory."""
    gathers = False
    """Whether parameters are gathered between buckets; then a full bucket may not always leave at once."""
    may_be_posted = False
    """Whether buckets keep their memory, and are summed in one group, without a schedule or a wire."""

    def reduce(self, bucket: Bucket, async_op: bool) -> Pending | None:
        """Sum a full bucket over the ranks; returns None if that is done already."""
        raise NotImplementedError

    def finish(self, absent: Sequence[Slot], used_anywhere: Sequence[int]) -> None:
        """All buckets are summed: set every `.grad`.

        absent: slots that this rank did not use. used_anywhere: by parameter, whether some rank used it.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Let go of all memory and of the group, whatever is under way. Nothing can follow."""
        raise NotImplementedError

    def start(self) -> None:
        """A synchronised backward begins."""

    def stay(self) -> None:
        """What backward writes from now on stays in `.grad`, where later gradients are added to it."""

    def check_kind(self, slot: Slot) -> None:
        """RuntimeError, with what to do, if a parameter is no longer what its bucket was laid out for."""

    def attach(self, bucket: Bucket) -> None:
        """Give a bucket memory, if buckets borrow it."""

    def leaves(self, bucket: Bucket, by_hook: bool) -> None:
        """A bucket is about to be reduced."""

    def reduced(self, bucket: Bucket) -> None:
        """The sum of a bucket is complete."""

    def rebuild(self, came: Sequence[int], arrivals: Sequence[tuple[int, float]], overlap: bool) -> None:
        """Lay out whole buckets anew, in the order in which gradients came in the first backward; all
        ranks do.

        came: numbers of parameters. arrivals: (bytes, time) of each, in that order. overlap: whether buckets
        leave while backward goes on.
        """

    def when_over(self, tell: Callable[[Sequence[Bucket]], None]) -> None:
        """Register whom to tell of buckets that get no more gradients in this backward, full or not."""
