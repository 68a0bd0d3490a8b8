"""All-reduce over hosts: reduce-scatter in the host, all-reduce of slices between hosts, all-gather in it.

Only 2(K−1)/K · M/H bytes a rank pass between K hosts of H ranks, where a ring over all K·H ranks passes
nearly 2M between neighbouring hosts. The tensor goes in chunks through a pipeline of stages: stage s of chunk
c runs at tick c + s · CHUNKS_AHEAD. So a chunk's messages have that many ticks to travel before somebody
waits for them, the wire always has work in both directions, and all ranks do the same things in the same
order whatever their timing.

Where the tensors of a host lie in shared memory its ranks meet twice, at the beginning and at the end: each
sums its slices straight out of the others' tensors, and writes the results into all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from imece.collectives import native
from imece.collectives.execute import TAG_HIERARCHICAL, Message, pieces, post
from imece.collectives.pending import Waitable, wait_for
from imece.collectives.reduction import combine, landed, prepared
from imece.collectives.shared_memory.arithmetic import reduction
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.wire import Bf16Sum, check_bf16

CHUNK_BYTES = 1024 * 1024
CHUNKS_AHEAD = 3

Stage = Callable[[], None]


def all_reduce(
    tensor: torch.Tensor,
    host_group: dist.ProcessGroup,
    cross_group: dist.ProcessGroup,
    op: str = "sum",
    wire: str | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """In place; every rank of the H in host_group x K in cross_group gets the same bits.

    tensor: any shape, M bytes. host_group: the ranks of this host; cross_group: the ranks with this rank's
    place on every host, in one order of hosts on all ranks. op: sum, avg, min, max, product. wire="bf16":
    between hosts half the bytes (sum and avg of floating point only; summed in fp32). Bytes sent a rank:
    2(H−1)/H · M in the host, 2(K−1)/K · M/H between hosts. ValueError for an operation that the dtype or the
    wire does not know.
    """
    world_size = host_group.size() * cross_group.size()
    if wire == "bf16":
        check_bf16(tensor, op)
    elif wire is not None:
        raise ValueError(f"unknown wire {wire!r}: None or 'bf16'")
    with torch.no_grad():
        buffer, base = prepared(tensor, op, world_size)
        if wire == "bf16":
            buffer = buffer.float()
        in_host = _open(buffer, host_group)
        hosts = host_group.size()
        chunk = max(1, chunk_bytes // buffer.itemsize // hosts) * hosts
        even = buffer.numel() // hosts * hosts
        spans = pieces(even, chunk)
        chunks = [
            _Chunk(buffer[start:stop], host_group, cross_group, base, wire,
                   [each[start:stop] for each in in_host])
            for start, stop in spans
        ]  # fmt: skip
        # Every chunk has H equal slices; what is left over makes a padded one.
        tail = buffer.new_zeros(hosts) if even < buffer.numel() else None
        if tail is not None:
            tail[: buffer.numel() - even].copy_(buffer[even:])
            chunks.append(_Chunk(tail, host_group, cross_group, base, wire, []))
        _pipeline([each.stages() for each in chunks])
        if in_host:
            assert isinstance(host_group, SharedMemoryGroup)
            host_group.barrier_now()  # till then others write into this rank's tensor
        if tail is not None:
            buffer[even:].copy_(tail[: buffer.numel() - even])
        return landed(buffer.to(tensor.dtype) if wire else buffer, tensor, op, world_size)


def _open(buffer: torch.Tensor, host: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks of the host, where they lie; empty unless all of them are in shared memory."""
    if not isinstance(host, SharedMemoryGroup) or buffer.device.type != "cpu" or host.size() == 1:
        return []
    return host.open(buffer) or []


def _pipeline(chunks: list[list[Stage]]) -> None:
    """Later chunks first in each tick: their messages leave before an earlier chunk is summed."""
    depth = max((len(stages) for stages in chunks), default=0)
    for tick in range(len(chunks) + (depth - 1) * CHUNKS_AHEAD if chunks else 0):
        for stage in range(depth):
            index = tick - stage * CHUNKS_AHEAD
            if 0 <= index < len(chunks):
                chunks[index][stage]()


class _Chunk:
    """One chunk on its way. `whole`: [H * n], a part of the tensor; `mine`: [n], this rank's slice of it."""

    def __init__(
        self,
        whole: torch.Tensor,
        host: dist.ProcessGroup,
        cross: dist.ProcessGroup,
        op: str,
        wire: str | None,
        in_host: list[torch.Tensor],
    ) -> None:
        """in_host: `whole` of every rank of the host, [H * n], if this rank can reach into them."""
        length = whole.numel() // host.size()
        self.whole = whole
        self.mine = whole[host.rank() * length : (host.rank() + 1) * length]
        self.slices = [each[host.rank() * length : (host.rank() + 1) * length] for each in in_host]
        self.host, self.cross, self.op, self.wire = host, cross, op, wire
        # What belongs to a chunk under way, and is let go when it is done.
        self.works: list[Waitable] = []
        self.pair: list[torch.Tensor] = []  # of two hosts: what each of them sends, in their order
        self.bf16: Bf16Sum | None = None

    def stages(self) -> list[Stage]:
        """What to do with it, in order; the same number for every chunk of a call."""
        if self.cross.size() == 1:
            return [self.reduce_in_host, self.gather_in_host]
        if self.cross.size() == 2:
            return [self.send_to_other_host, self.sum_of_two]
        if self.wire is None:
            return [self.start_between_hosts, self.end_between_hosts]
        return [self.start_bf16, self.continue_bf16, self.end_bf16]

    def reduce_in_host(self) -> None:
        if self.slices:
            how = reduction(self.op, self.mine.dtype)
            in_place = self.host.rank() < 2  # or an addend would be overwritten before its turn
            scratch = self.mine.new_empty(
                0 if in_place and how.within is how.dtype else self.mine.numel(), dtype=how.within
            )
            how(self.slices, self.mine, scratch, in_place)
        elif self.host.size() > 1:
            wait_for(native.reduce_scatter(self.mine, self.whole, self.op, self.host), "the sum in the host")

    def gather_in_host(self) -> None:
        if self.slices:
            for rank, each in enumerate(self.slices):
                if rank != self.host.rank():
                    each.copy_(self.mine)
        elif self.host.size() > 1:
            wait_for(native.all_gather(self.whole, self.mine, self.host), "the gather in the host")

    def send_to_other_host(self) -> None:
        self.reduce_in_host()
        sent = self.mine if self.wire is None else self.mine.to(torch.bfloat16)
        theirs = torch.empty_like(sent)
        host = self.cross.rank()
        self.pair = [sent, theirs] if host == 0 else [theirs, sent]
        sends, receives = (Message(each, 1 - host, TAG_HIERARCHICAL) for each in (sent, theirs))
        self.works = post([sends], [receives], self.cross)

    def sum_of_two(self) -> None:
        """Both hosts compute host 0 + host 1 of the same numbers, so they get the same bits."""
        self.wait()
        left, right = self.pair
        self.pair = []
        if self.wire is None:
            combine(self.op, left, right, self.mine)
        else:
            self.mine.copy_(left).add_(right)  # bf16 + bf16 in fp32, without copies in fp32
        self.gather_in_host()

    def start_between_hosts(self) -> None:
        """The group's own all-reduce, which is a ring between hosts on Gloo."""
        self.reduce_in_host()
        self.works = [native.all_reduce(self.mine, self.op, self.cross)]

    def end_between_hosts(self) -> None:
        self.wait()
        self.gather_in_host()

    def start_bf16(self) -> None:
        self.reduce_in_host()
        self.bf16 = Bf16Sum(self.mine, self.cross)
        self.bf16.post_slices()

    def continue_bf16(self) -> None:
        assert self.bf16 is not None
        self.bf16.post_sums()

    def end_bf16(self) -> None:
        assert self.bf16 is not None
        self.bf16.finish()
        self.bf16 = None
        self.gather_in_host()

    def wait(self) -> None:
        for work in self.works:
            wait_for(work, "the exchange between hosts")
        self.works = []
