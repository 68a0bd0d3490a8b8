"""The buckets of one model in one backward: each leaves as one collective, and is waited for at the end.

Buckets leave in their order, which is the same on every rank. The exception are buckets of units that are
over: these get no more gradients, and leave before their turn, on every rank as well. If nothing is free to
reduce them beside backward, all leave together at its end, and early ranks sum for late ones (posting.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from imece.collectives.given_up import value_of
from imece.collectives.pending import Pending
from imece.data_parallel.reducing.buckets import Bucket, Gradients
from imece.data_parallel.reducing.comm_hook import CommHook, take_result
from imece.data_parallel.reducing.finite import Finite
from imece.data_parallel.reducing.home import Home
from imece.data_parallel.reducing.line import Line
from imece.data_parallel.reducing.posting import Posting
from imece.data_parallel.reducing.trace import BucketTrace
from imece.data_parallel.reducing.watch import Watch


class Leaving:
    """Sends full buckets, through a communication hook if there is one, and shows them to the watch."""

    def __init__(
        self, gradients: Gradients, group: dist.ProcessGroup, overlap: bool, finite: Finite | None
    ) -> None:
        """overlap: whether a bucket leaves as soon as it is full; otherwise when backward is over."""
        self.overlap, self.finite = overlap, finite
        self.hook: CommHook | None = None
        self.watch: Watch | None = None
        self.home = Home(slot.parameter for slot in gradients.slots)
        self.ending = False
        """No more gradients will come in this backward."""
        self.gone: set[int] = set()
        """Numbers of buckets that left before their turn."""
        self._gradients = gradients
        self._next = 0  # the bucket whose turn it is
        self._group = group
        self._posting: Posting | None = None  # set if all buckets leave together
        self._posted: dict[int, float] = {}  # when each bucket was posted in this backward

    @property
    def all_left(self) -> bool:
        """Whether all buckets have left in this backward."""
        return self._next == len(self._gradients.all)

    def prepare(self) -> None:
        """Before a forward whose backward will be synchronised; all ranks call this.

        RuntimeError: as Posting.check.
        """
        buckets, posting = self._gradients.all, self._posting
        if self.overlap or not self._gradients.may_be_posted or self.hook is not None:
            self._posting = None
        elif posting is None or posting.buckets is not buckets:  # buckets may be laid out anew
            self._posting = Posting.of(buckets, self._group, scatter=not self._gradients.is_whole)
        else:
            posting.check()

    def start(self) -> None:
        """A backward begins: nothing has left yet."""
        self._next, self.ending, self.gone = 0, False, set()
        self._posted.clear()
        if self.finite is not None:
            self.finite.begin()

    def attach(self, bucket: Bucket) -> None:
        """Give memory to a bucket that has none: that of the oldest sum under way, if enough are."""
        under_way = [other for other in self._gradients.all if other.work is not None]
        if len(under_way) > self._gradients.most_under_way:
            self._wait(under_way[0])
        self._gradients.attach(bucket)

    def may_leave(self, line: Line) -> bool:
        """Whether full buckets may leave now: some kinds wait until backward is over."""
        overlap = self.overlap and not line.crossing
        return self.ending or ((overlap or self._gradients.borrows) and not self._gradients.gathers)

    def full(self, bucket: Bucket) -> None:
        """All gradients of a bucket are there. If all leave together, other ranks may start on it now."""
        if self._posting is not None:
            self._post(bucket, self._posting)

    def _post(self, bucket: Bucket, posting: Posting) -> None:
        if bucket.index in self._posted:
            return
        self._posted[bucket.index] = time.perf_counter() if self.watch is not None else 0.0
        self._gradients.leaves(bucket, by_hook=False)
        if self.finite is not None:
            self.finite.look(bucket)
        posting.post(bucket)

    def all_ready_leave(self) -> bool:
        """Send the buckets whose turn it is, up to the first that is not full. Returns whether all
        have left."""
        buckets = self._gradients.all
        if not self._next and self._posting is not None:
            self._leave_together(self._posting)
        while self._next < len(buckets) and not buckets[self._next].pending:
            bucket = buckets[self._next]
            self._next += 1
            if bucket.index not in self.gone:
                with self.home.of(bucket.flat.device):
                    self._leave(bucket)
        return self.all_left

    def _leave_together(self, posting: Posting) -> None:
        """Send all buckets, which are full."""
        buckets = self._gradients.all
        for bucket in buckets:
            self._post(bucket, posting)
        launched = time.perf_counter() if self.watch is not None else 0.0
        with torch.no_grad():
            posting.finish()
            for bucket in buckets:
                self._gradients.reduced(bucket)
        self._next = len(buckets)
        if self.watch is not None:
            for bucket in buckets:
                ready = self._posted[bucket.index]
                self.watch.left(BucketTrace(bucket.index, bucket.flat.nbytes, ready, launched), bucket)

    def before_their_turn(self, buckets: Sequence[Bucket], fill: Callable[[Bucket], None]) -> None:
        """Send each of these that has not left yet. fill: puts zeros or kept gradients in place of
        missing ones."""
        for bucket in buckets:
            if bucket.index not in self.gone:
                self.gone.add(bucket.index)
                with self.home.of(bucket.flat.device):
                    fill(bucket)
                    self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        ready = time.perf_counter() if self.watch is not None else 0.0
        if self.finite is not None:
            self.finite.look(bucket)
        if self._one_by_one(bucket) and bucket.index:
            self._wait(self._gradients.all[bucket.index - 1])
        launched = time.perf_counter() if self.watch is not None else 0.0
        self._gradients.leaves(bucket, by_hook=self.hook is not None)
        with torch.no_grad():
            bucket.work = self._reduce(bucket)
        flat_bytes = bucket.flat.nbytes
        if bucket.work is None:
            self._gradients.reduced(bucket)
        elif self._gradients.gathers and self._one_by_one(bucket):
            self._wait(bucket)  # nor may a gather come between a hook's collectives
        if self.watch is not None:
            self.watch.left(BucketTrace(bucket.index, flat_bytes, ready, launched), bucket)

    def _one_by_one(self, bucket: Bucket) -> bool:
        return self.hook is not None and self.hook.one_by_one(bucket.flat.device)

    def _reduce(self, bucket: Bucket) -> Pending | torch.futures.Future[Any] | None:
        """Reduce a bucket; returns what to wait for, or None if the result is there."""
        if self.hook is None:
            return self._gradients.reduce(bucket, self.overlap)
        return self.hook.reduce(bucket, last=bucket.index == len(self._gradients.all) - 1)

    def drop(self) -> None:
        """The backward has raised: nothing is under way any more."""
        if self._posting is not None:
            self._posting.take_back()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait for the sums that are under way."""
        for bucket in self._gradients.all:
            self._wait(bucket)

    def _wait(self, bucket: Bucket) -> None:
        work, bucket.work = bucket.work, None
        if work is None:
            return
        if isinstance(work, Pending):
            work.wait()
        else:
            take_result(value_of(work), bucket)
        self._gradients.reduced(bucket)

    def give_up(self) -> None:
        """Nobody waits for what is under way; buckets let go of their memory."""
        self.home.leave()
        self.finite = self._posting = None
        del self._group
        for bucket in self._gradients.all:
            bucket.let_go()
        if self.watch is not None:
            self.watch.give_up()
