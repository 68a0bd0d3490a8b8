"""Finds which rank brought a NaN or an Inf: after the sum every rank has it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from imece.collectives.texts import gather_texts, of_ranks
from imece.data_parallel.reducing.buckets import Bucket
from imece.device import has_streams


class Finite:
    """Looks at each bucket before it leaves; the training loop decides what to do about a finding."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._found: list[str] = []
        self._largest: list[tuple[str, torch.Tensor]] = []  # on a GPU, by parameter: the largest magnitude
        self.brought: dict[int, list[str]] = {}
        """After a backward: names of parameters whose gradient was not finite, by the rank that
        brought it."""

    def begin(self) -> None:
        """A backward begins: what was found in one that raised went with it."""
        self._found, self._largest = [], []

    def look(self, bucket: Bucket) -> None:
        """Before the sum: one pass over the bucket, and over its parameters only if something is wrong. On a
        GPU one over its parameters, of which the host asks when backward is over: else it would wait in it.
        """
        if has_streams(bucket.flat):
            slots = [slot for slot in bucket.slots if slot.view.numel()]
            largest = torch._foreach_norm([slot.view for slot in slots], math.inf) if slots else ()
            self._largest += zip([slot.name for slot in slots], largest, strict=True)
        elif not bool(torch.isfinite(bucket.buffer.sum())):
            names = (slot.name for slot in bucket.slots if not bool(torch.isfinite(slot.view).all()))
            self._found += names

    def judge(self, buckets: list[Bucket]) -> None:
        """After the sum, which is equal on all ranks, on those without inputs too: so either all of them ask
        each other, or none does."""
        self.brought, device = {}, buckets[0].flat.device
        finite = [torch.isfinite(bucket.buffer.sum()).to(device) for bucket in buckets]
        if bool(torch.stack(finite).all()):
            return
        self._found += (name for name, largest in self._largest if not bool(torch.isfinite(largest)))
        label = "ranks with a gradient that is not finite"
        texts = gather_texts(self._found, self._group, device, label)
        self.brought = {rank: names for rank, names in of_ranks(self._group, texts).items() if names}
