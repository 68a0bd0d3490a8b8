"""Buckets that ranks of one host post when they are full: early ranks sum for late ones.

If the ranks' threads fill the cores of their host, nothing is summed beside backward. But ranks do not end
backward together, and a rank that waits has a core. See collectives/shared_memory/posted.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch.distributed as dist

from imece.collectives import auto, pending
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.posted import Posted
from imece.data_parallel.reducing.buckets import Bucket
from imece.listing import ends_of


class Posting:
    """The posted buckets of one model, which keep their memory."""

    def __init__(self, buckets: Sequence[Bucket], posted: Posted, group: SharedMemoryGroup) -> None:
        self.buckets, self._posted, self._group = buckets, posted, group
        self._label = ends_of([slot.name for bucket in buckets for slot in bucket.slots])
        self._addresses = _addresses(buckets)

    @classmethod
    def of(cls, buckets: Sequence[Bucket], group: dist.ProcessGroup, *, scatter: bool) -> Self | None:
        """All ranks of the group call this together. None on all ranks if posting is impossible.

        scatter: each rank gets its shard of a bucket; otherwise all of it.
        """
        on_cpu = all(bucket.flat.device.type == "cpu" for bucket in buckets)
        if not isinstance(group, SharedMemoryGroup) or group.size() == 1 or not on_cpu or auto.FORCED:
            return None
        pending.drain(group)
        posted = group.posted([bucket.flat for bucket in buckets], scatter=scatter)
        return cls(buckets, posted, group) if posted is not None else None

    def check(self) -> None:
        """RuntimeError if a bucket no longer lies where the other ranks know it: nobody would sum it."""
        for bucket, now, known in zip(self.buckets, _addresses(self.buckets), self._addresses, strict=True):
            if now != known:
                raise RuntimeError(
                    f"the gradients of {bucket.label} were moved out of the memory that the ranks share, by "
                    f"share_memory() or a queue: give other processes a clone"
                )

    def post(self, bucket: Bucket) -> None:
        """A bucket is full; nobody here touches it until `finish` is over."""
        self._posted.post(bucket.index)

    def finish(self) -> None:
        """All buckets are posted here: sum them together with all ranks."""
        pending.drain(self._group)
        self._group.sum_posted(self._posted, self._label)

    def take_back(self) -> None:
        """Take back what was posted in a backward that raised. CollectiveError if others have summed some
        of it."""
        self._posted.take_back()


def _addresses(buckets: Sequence[Bucket]) -> list[int]:
    return [bucket.flat.data_ptr() for bucket in buckets]
