"""Whole gradients that were reduced and not zeroed, to which a mean over samples or tokens is added.

They have been divided already, and must not be again. So they are set aside while the next backward is
reduced. One in no_sync adds to them where they lie: then a copy is kept, and taken off before what was added
is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from imece.data_parallel.reducing.buckets import Slot
from imece.data_parallel.reducing.sharing import Sharing


def note(slots: Sequence[Slot], sharing: Sharing) -> None:
    """The first backward in no_sync since gradients were reduced begins."""
    for slot in slots:
        slot.older = grad.clone() if (grad := _reduced(slot, sharing)) is not None else None


def set_aside(slots: Sequence[Slot], touched: Sequence[int], sharing: Sharing) -> None:
    """A synchronised backward begins. touched: by slot, whether one in no_sync has written its gradient."""
    for slot, was_touched in zip(slots, touched, strict=True):
        grad = slot.parameter.grad
        if grad is None:  # it was zeroed since
            slot.older = None
        elif was_touched and slot.older is not None:
            with torch.no_grad():
                grad.sub_(slot.older)
        elif not was_touched:
            note([slot], sharing)
            if slot.older is not None:
                slot.parameter.grad = None


def _reduced(slot: Slot, sharing: Sharing) -> torch.Tensor | None:
    """The gradient of a slot, if it lies where this reducer or another one has put it."""
    grad = slot.parameter.grad
    if grad is not None and (slot.holds(grad) or sharing.has_reduced(slot.index, grad)):
        return grad
    return None
