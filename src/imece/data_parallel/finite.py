"""Which rank brought a NaN or an Inf: after the sum it is on all of them."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.data_parallel.buckets import Bucket

_MAX_BYTES = 4096


class Finite:
    """Looks at each bucket before it leaves; what to do about a finding is left to the training loop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._found: list[str] = []
        self.brought: dict[int, list[str]] = {}
        """After a backward: parameters whose gradient was not finite, by the rank that brought it."""

    def look(self, bucket: Bucket) -> None:
        """Before the sum: one pass over the bucket, and over its parameters only if something is wrong."""
        if not bool(torch.isfinite(bucket.buffer.sum())):
            names = (slot.name for slot in bucket.slots if not bool(torch.isfinite(slot.view).all()))
            self._found += names

    def judge(self, buckets: list[Bucket]) -> None:
        """After the sum: equal on all ranks, so all of them ask each other, or none."""
        found, self._found, self.brought = self._found, [], {}
        if all(bool(torch.isfinite(bucket.buffer.sum())) for bucket in buckets):
            return
        text = json.dumps(found)
        while len(text.encode()) > _MAX_BYTES:
            found = found[: len(found) // 2]
            text = json.dumps([*found, "..."])
        row = torch.zeros(_MAX_BYTES, dtype=torch.uint8, device=buckets[0].flat.device)
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        row[: data.numel()] = data.to(row.device)
        rows = row.new_empty(self._group.size() * _MAX_BYTES)
        ops.all_gather(rows, row, group=self._group, label="ranks with a gradient that is not finite")
        for rank, raw in enumerate(rows.view(-1, _MAX_BYTES).cpu().numpy()):
            names = json.loads(raw.tobytes().rstrip(b"\0").decode())
            if names:
                self.brought[rank] = names
