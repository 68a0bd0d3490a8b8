"""Where a reducer's gradients lie: in flat buckets, each of which travels as one message.

Who keeps them is one of two: WholeGradients (whole.py), all of them on every rank; Sharding (../shard.py), in
the end this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from imece.collectives.pending import Pending


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
    older: torch.Tensor | None = None  # a gradient that was reduced before, which this backward's is added to

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient lies in the view. `.grad = .grad.data`, say, makes it another object there."""
        return grad is self.view or (grad is not None and grad.data_ptr() == self.view.data_ptr())


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
    scale: torch.Tensor | float | None = None  # of gradients on their way into it; None: not known yet

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


def label_of(names: Sequence[str]) -> str:
    """Of a bucket, by its parameters."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


class Gradients:
    """The buckets of one model. A reducer says when one is full, then it is summed by this, or by a hook."""

    all: list[Bucket]
    """In the order in which they leave."""
    slots: list[Slot]
    """By parameter, in registration order; they stay the same objects when buckets are laid anew."""
    is_whole = False
    """Whether `.grad` is a view into its bucket; otherwise it goes to the part of it that is this rank's."""
    borrows = False
    """Whether buckets take memory when their first gradient comes, so that a full one must leave at once."""
    most_under_way = 0
    """How many are being summed while another one fills, where buckets borrow memory."""
    gathers = False
    """Whether parameters are gathered between buckets, which may then not leave as soon as they are full."""
    may_be_posted = False
    """Whether buckets keep their memory, and are summed in one group, as they are and by no schedule."""

    def reduce(self, bucket: Bucket, async_op: bool) -> Pending | None:
        """Sum a full bucket over the ranks; None: it is done."""
        raise NotImplementedError

    def finish(self, absent: Sequence[Slot], used_anywhere: Sequence[int]) -> None:
        """All are summed: leave `.grad` right.

        absent: what this rank did not use. used_anywhere: by parameter, whether some rank did.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Of all memory and of the group, whatever is under way. Nothing comes after it."""
        raise NotImplementedError

    def start(self) -> None:
        """A synchronised backward begins."""

    def check_kind(self, slot: Slot) -> None:
        """RuntimeError: a parameter is no longer what its bucket was laid for, with what to do."""

    def attach(self, bucket: Bucket) -> None:
        """Give a bucket memory, where buckets borrow it."""

    def leaves(self, bucket: Bucket, by_hook: bool) -> None:
        """A bucket is about to be reduced."""

    def reduced(self, bucket: Bucket) -> None:
        """The sum of a bucket is there."""

    def rebuild(self, came: Sequence[int], arrivals: Sequence[tuple[int, float]], overlap: bool) -> None:
        """Lay whole ones anew by the order in which gradients came in the first backward; all ranks call it.

        came: parameters. arrivals: bytes and time of each, in that order. overlap: whether buckets leave
        while backward goes on.
        """

    def when_over(self, tell: Callable[[Sequence[Bucket]], None]) -> None:
        """Who is to be told of buckets to which no more gradients come in this backward, full or not."""
