"""Runs a schedule over any torch group, and posts messages that progress together.

A step's messages are cut into pieces. Piece i of all of them is round i, and later rounds are in flight while
an earlier one is summed, so arithmetic and transfer overlap. Both ends of a message know its range, and cut
it alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from imece.collectives.given_up import Waitable
from imece.collectives.pending import wait_for
from imece.collectives.schedules import Schedule, Step
from imece.collectives.shared_memory.arithmetic import BINARY
from imece.collectives.shared_memory.group import on_device
from imece.collectives.shared_memory.tensors import as_bytes

CHUNK_BYTES = 512 * 1024
ROUNDS_AHEAD = 3

# Messages of one pair and tag arrive in the order of their posting; these tags keep imece's apart from
# the user's.
TAG_SCHEDULE = 0x1ECE0001
TAG_WIRE = 0x1ECE0003
TAG_HIERARCHICAL = 0x1ECE0100  # + the lane


class Message(NamedTuple):
    """A contiguous tensor to, or from, a rank of the group."""

    tensor: torch.Tensor
    peer: int
    tag: int


def post(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup, *, alone: bool = False
) -> list[Waitable]:
    """Start all of them at once. Receives come first, so that no message waits for its place.

    alone: a single message, which the peer posts alone too. Then NCCL needs only these two ranks; a batch
    uses the communicator of the whole group, and the group's first call makes that with all its ranks.
    ValueError for a single message with a tag over NCCL.
    """
    on_gpu = next((message.tensor for message in (*sends, *receives) if message.tensor.is_cuda), None)
    if on_gpu is not None:
        group = on_device(group, on_gpu)
        if not group._get_backend(on_gpu.device).supports_coalescing:
            return _post_staged(sends, receives, group)
        sends, receives = _in_bytes(sends), _in_bytes(receives)
        if not alone:
            return _post_batch(sends, receives, group)
        if tagged := [message.tag for message in (*sends, *receives) if message.tag]:
            raise ValueError(
                f"tag={tagged[0]}, but NCCL has no tags: it pairs messages in the order of the calls. Leave "
                "it out, or use exchange for messages of several tags"
            )
    works: list[Waitable] = [group.recv([m.tensor], m.peer, m.tag) for m in receives]
    works += [group.send([m.tensor], m.peer, m.tag) for m in sends]
    return works


def _in_bytes(messages: Sequence[Message]) -> list[Message]:
    """For NCCL, which does not know all dtypes: it has no complex ones, and no int16."""
    return [message._replace(tensor=as_bytes(message.tensor)) for message in messages]


def _post_batch(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup
) -> list[Waitable]:
    """Unless they are batched, NCCL runs calls one after the other: the first would wait forever.

    NCCL has no tags. It pairs what two ranks send and receive in the order of posting; so post in the order
    of tags.
    """
    device = (*sends, *receives)[0].tensor.device
    group._start_coalescing(device)
    for message in sorted(receives, key=attrgetter("tag")):
        group.recv([message.tensor], message.peer, message.tag)
    for message in sorted(sends, key=attrgetter("tag")):
        group.send([message.tensor], message.peer, message.tag)
    work = group._end_coalescing(device)
    return [work] if work is not None else []


def _post_staged(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup
) -> list[Waitable]:
    """Gloo takes a GPU's tensors in collectives, but in messages it would read their addresses as
    the CPU's."""
    works: list[Waitable] = []
    for message in receives:
        place = torch.empty_like(message.tensor, device="cpu")
        works.append(_Staged(group.recv([place], message.peer, message.tag), place, message.tensor))
    return works + [group.send([m.tensor.cpu()], m.peer, m.tag) for m in sends]


class _Staged:
    """A message that comes to the host; `wait` copies it to its place."""

    def __init__(self, work: Waitable, place: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work, self._place, self._tensor = work, place, tensor

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        self._tensor.copy_(self._place)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def run_schedule(schedule: Schedule, flat: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> None:
    """Run this rank's schedule, in place on `flat`.

    flat: 1D and contiguous, of one length and dtype on every rank. op: sum, min, max or product, for what the
    schedule calls "sum". Scratch: the summed part of ROUNDS_AHEAD + 1 rounds.
    The rank with the lower number is always the left operand, so both ends of an exchange get the same bits.
    """
    assert flat.dim() == 1 and flat.is_contiguous()
    runner = _Runner(flat, group, op)
    for step in schedule:
        runner.run(step)


class _Arrived(NamedTuple):
    """Where a received piece lies and where it goes; scratch is None for a copy, which arrives in place."""

    peer: int
    target: torch.Tensor
    scratch: torch.Tensor | None


class _Round(NamedTuple):
    works: list[Waitable]
    arrivals: list[_Arrived]
    peers: list[int]


class _Runner:
    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup, op: str) -> None:
        self.flat, self.group, self.op, self.rank = flat, group, op, group.rank()
        self._scratch: list[torch.Tensor] = []  # free ones, each as long as a piece
        # NCCL cuts and overlaps by itself, and each batch costs a kernel: there the whole step is one piece.
        self.piece = max(1, flat.numel() if flat.is_cuda else CHUNK_BYTES // flat.itemsize)

    def run(self, step: Step) -> None:
        in_flight: deque[_Round] = deque()
        for number in range(self._rounds(step)):
            in_flight.append(self._post(step, number))
            if len(in_flight) > ROUNDS_AHEAD:
                self._finish(in_flight.popleft())
        while in_flight:
            self._finish(in_flight.popleft())

    def _rounds(self, step: Step) -> int:
        ranges = [(m.start, m.stop) for m in step.sends] + [(m.start, m.stop) for m in step.receives]
        longest = max((stop - start for start, stop in ranges), default=0)
        return -(-longest // self.piece)

    def _cut(self, start: int, stop: int, number: int) -> torch.Tensor | None:
        """Piece `number` of a range; None if the range is too short to have one."""
        start += number * self.piece
        return self.flat[start : min(stop, start + self.piece)] if start < stop else None

    def _post(self, step: Step, number: int) -> _Round:
        sends, receives, arrivals = [], [], []
        for incoming in step.receives:
            target = self._cut(incoming.start, incoming.stop, number)
            if target is None:
                continue
            scratch = self._take(target.numel()) if incoming.how == "sum" else None
            place = target if scratch is None else scratch[: target.numel()]
            arrivals.append(_Arrived(incoming.peer, target, scratch))
            receives.append(Message(place, incoming.peer, TAG_SCHEDULE))
        for outgoing in step.sends:
            part = self._cut(outgoing.start, outgoing.stop, number)
            if part is not None:
                sends.append(Message(part, outgoing.peer, TAG_SCHEDULE))
        works = post(sends, receives, self.group)
        return _Round(works, arrivals, [message.peer for message in (*receives, *sends)])

    def _finish(self, this: _Round) -> None:
        # Wait for all works first: an exchange sums into the very elements that it sends.
        for work in this.works:
            peers = ", ".join(map(str, dict.fromkeys(this.peers)))
            wait_for(work, f"a schedule's exchange with rank {peers} of the group")
        for peer, target, scratch in this.arrivals:
            if scratch is None:
                continue
            got = scratch[: target.numel()]
            left, right = (got, target) if peer < self.rank else (target, got)
            BINARY[self.op](left, right, out=target)
            self._scratch.append(scratch)

    def _take(self, numel: int) -> torch.Tensor:
        """Scratch for one piece, from an earlier one of the same length if there is one."""
        for i, scratch in enumerate(self._scratch):
            if scratch.numel() >= numel:
                return self._scratch.pop(i)
        self._scratch.clear()  # too short for this step; the next ones are as long as this
        return torch.empty(numel, dtype=self.flat.dtype, device=self.flat.device)


def pieces(numel: int, length: int) -> Iterator[tuple[int, int]]:
    """0:numel in ranges of `length`; the last one may be shorter."""
    for start in range(0, numel, length):
        yield start, min(numel, start + length)
