"""Collectives over hosts: reduce-scatter, all-gather, all-reduce (one and then the other), and the sum of
rows (an all-reduce of which each rank keeps one row, that of its place in the host).

With K hosts of H ranks each, only (K−1)/K · M/H bytes a rank pass between hosts in either half; a ring over
all K·H ranks passes nearly M between neighbouring hosts. The tensor goes in chunks through a pipeline of
stages: stage s of chunk c runs at tick c + s · CHUNKS_AHEAD. So a chunk's messages have that many ticks to
travel before somebody waits for them, the wire always has work in both directions, and all ranks do the same
things in the same order whatever their timing.

If the tensors of a host lie in shared memory, its ranks meet only twice, at the beginning and at the end:
each sums straight out of the others' tensors, and writes what it gathers into all of them. If a gather's
outputs are private memory, rows come into shared memory beside them, and each rank reads the rows of the
others.

Every sum is over the ranks of a host, in their order, and then over hosts, in theirs, whoever computes it: so
all of these give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist

from imece.collectives.execute import pieces
from imece.collectives.hierarchical_chunk import Chunk, Cut, HostGroups, Row, Stage
from imece.collectives.reduction import flattened, landed, prepared, shares_memory
from imece.collectives.shared_memory.arena import ARENAS, shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.wire_formats import FORMATS

CHUNK_BYTES = 1024 * 1024
LANE_CHUNK_BYTES = 2 * CHUNK_BYTES  # beside another call, the wire has work while this one begins and ends
AT_ONCE_CHUNK_BYTES = 8 * CHUNK_BYTES  # of an all_reduce between two hosts: a bucket is one message
BESIDE_BYTES = 64 * CHUNK_BYTES  # the most that is gathered beside its final place
LEAST_BYTES = 32 * 1024  # of a message between hosts: with many ranks chunks are larger
CHUNKS_AHEAD = 1  # more would only queue in front of the wire
LANE_CHUNKS_AHEAD = 3  # in a lane, whose thread waits for a core between chunks


def all_reduce(
    tensor: torch.Tensor, hosts: HostGroups, op: str = "sum", wire: str | None = None
) -> torch.Tensor:
    """In place; every rank gets the same bits.

    tensor: any shape, M bytes. op: sum, avg, min, max, product. wire: fewer bytes between hosts (sum and avg
    of floating point only; summed in fp32, as in wire.py; with two hosts the sum is not rounded). Bytes sent
    a rank: 2(H−1)/H · M in the host, 2(K−1)/K · M/H between hosts. ValueError for an operation that the dtype
    does not know. `check_sum` (wire.py) says what a wire takes.
    """
    world_size = hosts.world_size
    with torch.no_grad():
        buffer, base = _to_sum(tensor, op, world_size, wire)
        even = buffer.numel() // world_size * world_size
        peers, in_host = hosts.peers, _open(buffer, hosts)
        parts = _parts(peers)

        def cut(each: torch.Tensor, place: int) -> Row:
            return list(each.view(hosts.host.size(), parts, -1)[place])

        chunks = [
            Chunk(hosts, peers, buffer[start:stop], [each[start:stop] for each in in_host], cut, base, wire,
                  whole=buffer[start:stop])
            for start, stop in pieces(even, _length(buffer, hosts, parts, wire) * world_size)
        ]  # fmt: skip
        # Every chunk has equal parts; the remainder makes a padded one.
        tail = buffer.new_zeros(world_size) if even < buffer.numel() else None
        if tail is not None:
            tail[: buffer.numel() - even].copy_(buffer[even:])
            chunks.append(Chunk(hosts, peers, tail, [], cut, base, wire, whole=tail))
        _pipeline([each.all_reduce() for each in chunks], hosts)
        _close(in_host, hosts.host)
        if tail is not None:
            buffer[even:].copy_(tail[: buffer.numel() - even])
        return landed(buffer.to(tensor.dtype) if wire else buffer, tensor, op, world_size)


def reduce_scatter(
    out: torch.Tensor, tensor: torch.Tensor, hosts: HostGroups, op: str = "sum", wire: str | None = None
) -> torch.Tensor:
    """Put slice r of the reduced `tensor`, in flat order, into `out` on rank r of all; the same bits
    as all_reduce.

    tensor: K·H times as many elements as out, M bytes; out may be its own slice, and the others stay as they
    are. op, wire, ValueError: as for all_reduce, but the sum is never rounded. Bytes sent a rank:
    (H−1)/H · M in the host, (K−1)/K · M/H between hosts.
    """
    world_size = hosts.world_size
    assert tensor.numel() == world_size * out.numel()
    with torch.no_grad():
        buffer, base = _to_sum(tensor, op, world_size, wire)
        place = _place_for(out, buffer)
        peers, in_host = hosts.peers, _open(buffer, hosts)
        chunks = [
            Chunk(hosts, peers, buffer, in_host, _cut(hosts, place.numel(), start, stop), base, wire)
            .reduce_scatter(place[start:stop])
            for start, stop in pieces(place.numel(), _length(buffer, hosts, wire=wire))
        ]  # fmt: skip
        _pipeline(chunks, hosts)
        _close(in_host, hosts.host)
        return landed(place.to(out.dtype) if wire else place, out, op, world_size)


def sum_of_rows(
    out: torch.Tensor, tensor: torch.Tensor, hosts: HostGroups, op: str = "sum", wire: str | None = None
) -> torch.Tensor:
    """Put slice p of the reduced `tensor`, in flat order, into `out` on the ranks with place p of every host.

    tensor: H times as many elements as out, M bytes; out may be its own slice, and the others stay as they
    are. op, wire, ValueError, and bits: as for all_reduce. Bytes sent a rank: (H−1)/H · M in the host,
    2(K−1)/K · M/H between hosts.
    """
    world_size, numel, each = hosts.world_size, out.numel(), hosts.host.size()
    assert tensor.numel() == each * numel
    with torch.no_grad():
        buffer, base = _to_sum(tensor, op, world_size, wire)
        target = _place_for(out, buffer)
        peers, in_host, own = hosts.peers, _open(buffer, hosts), hosts.host.rank()
        parts = _parts(peers)
        length = _length(buffer, hosts, parts, wire) * len(peers)
        even, rest = numel - numel % parts, numel % parts

        def cut_at(start: int, stop: int) -> Cut:
            return lambda rows, place: list(rows.view(each, -1)[place, start:stop].view(parts, -1))

        chunks = [
            Chunk(hosts, peers, buffer, in_host, cut_at(start, stop), base, wire)
            .sum_of_row(list(target[start:stop].view(parts, -1)))
            for start, stop in pieces(even, length)
        ]  # fmt: skip
        # The remainder makes a padded chunk, as in all_reduce.
        tail = buffer.new_zeros(each * parts) if rest else None
        if tail is not None:
            tail.view(each, parts)[:, :rest].copy_(buffer.view(each, numel)[:, even:])
            place = tail.view(each, parts)[own]
            tail_chunk = Chunk(hosts, peers, tail, [], cut_at(0, parts), base, wire, whole=tail)
            chunks.append(tail_chunk.sum_of_row(list(place.view(parts, -1))))
        _pipeline(chunks, hosts)
        _close(in_host, hosts.host)
        if tail is not None:
            target[even:].copy_(tail.view(each, parts)[own, :rest])
        return landed(target.to(out.dtype) if wire else target, out, op, world_size)


def all_gather(
    out: torch.Tensor, tensor: torch.Tensor, hosts: HostGroups, *, offered: torch.Tensor | None = None
) -> torch.Tensor:
    """Put every rank's `tensor`, in the order of all ranks, into `out` on every rank.

    out: K·H times as many elements as tensor, M bytes; tensor may be its own slice of it. offered: the result
    of `offered_for(out, hosts)`, if that was made before. Bytes sent a rank: (H−1)/H · M in the host, (K−1)/K
    · M/H between hosts.
    """
    numel, here = tensor.numel(), hosts.peers.index(hosts.cross.rank())
    assert out.numel() == hosts.world_size * numel
    with torch.no_grad():
        place = flattened(out) if out.is_contiguous() else out.new_empty(out.numel())
        if offered is None:
            offered = offered_for(out, hosts)

        def put_own(memory: torch.Tensor) -> None:
            own = _row(memory, hosts, numel, hosts.host.rank())[here]
            if not shares_memory(own, tensor):
                own.copy_(tensor.reshape(-1))

        put_own(place if offered is None else offered)  # the result may lie where others are about to write
        in_host = _open_each(offered, out, hosts)
        if any(each.numel() < out.numel() for each in in_host):
            _gather_rows(place, hosts, in_host, numel)
        else:
            if offered is not None and not shares_memory(offered, place):
                put_own(place)
            chunks = [
                Chunk(hosts, hosts.peers, place, in_host, _cut(hosts, numel, start, stop)).all_gather()
                for start, stop in pieces(numel, _length(place, hosts))
            ]
            _pipeline(chunks, hosts)
        _close(in_host, hosts.host)
        if not shares_memory(place, out):
            out.copy_(place.view(out.shape))
        return out


def offered_for(out: torch.Tensor, hosts: HostGroups) -> torch.Tensor | None:
    """The flat memory that ranks of the host may access while `out` is gathered; None if there is none.

    It is `out` itself, into which they write what comes to them; or a row beside it, unless that is too
    large, which all of them read afterwards. That is less work than meeting for every chunk, which is copied
    three times.
    """
    if not _has_memory_in_common(hosts.host, out):
        return None
    if out.is_contiguous() and ARENAS.locate(out.data_ptr(), out.nbytes) is not None:
        return flattened(out)
    numel = out.numel() // hosts.host.size()
    return shared_empty(numel, out.dtype) if numel * out.itemsize <= BESIDE_BYTES else None


def _gather_rows(place: torch.Tensor, hosts: HostGroups, in_host: Sequence[torch.Tensor], numel: int) -> None:
    """Gather each rank's row into what it has offered; the others read it there when all rows have come."""
    own = hosts.host.rank()
    rows = [_row(each, hosts, numel, of) for of, each in enumerate(in_host)]

    def read(of: int) -> None:
        for part, target in zip(rows[of], _row(place, hosts, numel, of), strict=True):
            if not shares_memory(part, target):
                target.copy_(part)

    chunk = Chunk(hosts, hosts.peers, in_host[own], [], lambda _, of: rows[of])
    _pipeline([chunk.gather_row()], hosts)
    read(own)
    _close(in_host, hosts.host)
    for at in range(1, len(rows)):
        read((own + at) % len(rows))  # each rank begins elsewhere, so that not all read from one


def _row(memory: torch.Tensor, hosts: HostGroups, numel: int, of: int) -> Row:
    """The elements of the ranks with place `of`, by host. memory: holds those of all ranks, or only these."""
    whole = memory.numel() == hosts.world_size * numel
    at = [ranks[of] for ranks in hosts.ranks] if whole else range(len(hosts.ranks))
    return [memory[each * numel : (each + 1) * numel] for each in at]


def _to_sum(tensor: torch.Tensor, op: str, world_size: int, wire: str | None) -> tuple[torch.Tensor, str]:
    """Like `prepared`, but dtypes of fewer bits are summed in fp32."""
    buffer, base = prepared(tensor, op, world_size)
    return (buffer if wire is None else buffer.float()), base


def _place_for(out: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Flat memory for the sums of `buffer`: `out` if they can lie there."""
    direct = out.is_contiguous() and out.dtype == buffer.dtype
    return flattened(out) if direct else buffer.new_empty(out.numel())


def _parts(peers: Sequence[int]) -> int:
    """Parts of a row that is summed and gathered again; hierarchical_chunk.py says why two hosts need
    only one."""
    return 1 if len(peers) == 2 else len(peers)


def _length(tensor: torch.Tensor, hosts: HostGroups, parts: int = 0, wire: str | None = None) -> int:
    """Elements of one rank's part of a chunk, whose bytes are counted as they are sent: it is a message's
    handling that keeps chunks from being small. parts: those of a row that is summed and gathered again."""
    in_lane = AT_ONCE_CHUNK_BYTES if 0 < parts < hosts.cross.size() else LANE_CHUNK_BYTES
    chunk_bytes = max(in_lane if hosts.lane else CHUNK_BYTES, LEAST_BYTES * hosts.world_size)
    itemsize = tensor.itemsize if wire is None else FORMATS[wire].itemsize
    return max(1, chunk_bytes // itemsize // hosts.world_size)


def _cut(hosts: HostGroups, numel: int, start: int, stop: int) -> Cut:
    """Cuts elements start:stop out of each of the slices, one a rank, of `numel` elements."""

    def cut(tensor: torch.Tensor, place: int) -> Row:
        firsts = [ranks[place] * numel for ranks in hosts.ranks]
        return [tensor[first + start : first + stop] for first in firsts]

    return cut


def _has_memory_in_common(host: dist.ProcessGroup, tensor: torch.Tensor) -> TypeGuard[SharedMemoryGroup]:
    return isinstance(host, SharedMemoryGroup) and tensor.device.type == "cpu" and host.size() > 1


def _open(tensor: torch.Tensor, hosts: HostGroups) -> list[torch.Tensor]:
    """The tensors of all ranks of the host, where they lie; empty unless all of them are in shared memory."""
    host = hosts.host
    if not _has_memory_in_common(host, tensor):
        return []
    # All ranks must agree on whether a copy is worked on.
    if hosts.opened and hosts.opened[host.rank()].data_ptr() == tensor.data_ptr():
        return [each.view(tensor.dtype) for each in hosts.opened]
    return host.open(tensor)


def _open_each(offered: torch.Tensor | None, out: torch.Tensor, hosts: HostGroups) -> list[torch.Tensor]:
    """Like `_open`, for tensors that each rank offers by itself."""
    host = hosts.host
    if not _has_memory_in_common(host, out):
        return []
    opened = hosts.opened
    if offered is None or not opened or opened[host.rank()].data_ptr() != offered.data_ptr():
        opened = host.open_each(offered)
    return [each.view(out.dtype) for each in opened]


def _close(in_host: Sequence[torch.Tensor], host: dist.ProcessGroup) -> None:
    """Until then others read this rank's tensor, and write into it."""
    if in_host:
        assert isinstance(host, SharedMemoryGroup)
        host.barrier_now()


def _pipeline(chunks: Sequence[list[Stage]], hosts: HostGroups) -> None:
    """Run the stages. In each tick later chunks come first: their messages leave before an earlier chunk
    is summed."""
    depth = max((len(stages) for stages in chunks), default=0)
    ahead = LANE_CHUNKS_AHEAD if hosts.lane else CHUNKS_AHEAD
    for tick in range(len(chunks) + (depth - 1) * ahead if chunks else 0):
        for stage in range(depth):
            index = tick - stage * ahead
            if 0 <= index < len(chunks):
                for do in chunks[index][stage]:
                    do()
