"""Broadcast, all-gather, gather, scatter, all-to-all: bytes go from some ranks to others.

In general each rank offers bytes and reads what it wants (`exchange`). In an all-gather a rank offers its
bytes where they will lie (`gather`). In a broadcast all ranks write the root's bytes to all (`spread`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.reducing import CHUNK_BYTES, cut, even_rows
from imece.collectives.shared_memory.small import EXCHANGED_BYTES
from imece.collectives.shared_memory.tensors import as_bytes, copy_flat, overlap
from imece.collectives.shared_memory.waiting import Steps
from imece.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes [start, start + target.numel()) of what `rank` offers, to be put into `target` (uint8, flat)."""

    rank: int
    start: int
    target: torch.Tensor


def exchange(
    engine: Engine,
    fingerprint: int,
    offered: torch.Tensor | None,
    reads: Sequence[Read],
    publishers: Sequence[int],
    largest_bytes: int,
) -> Steps:
    """Offer `offered` (uint8, flat) if this rank is one of `publishers`, and do `reads`.

    largest_bytes: an upper bound of what any publisher offers, the same on all ranks.
    """
    offered = _apart(engine, offered, reads) if offered is not None and engine.rank in publishers else None
    if largest_bytes <= EXCHANGED_BYTES:
        slot = engine.next_slot()
        if offered is not None:
            copy_flat(engine.slot_views(slot, 0, offered.numel(), torch.uint8)[engine.rank], offered)
        engine.enter(fingerprint)
        yield from engine.entered(fingerprint)
        _copy_out(engine, slot, 0, largest_bytes, _own_reads(engine, offered, reads))
        return
    engine.enter(fingerprint, offered)
    yield from engine.entered(fingerprint)
    in_place = engine.in_place(publishers)
    if in_place is None:
        yield from _staged(engine, offered, reads, largest_bytes)
        return
    memory = dict(zip(publishers, in_place, strict=True))
    for read in _own_reads(engine, offered, reads):
        copy_flat(read.target, memory[read.rank][read.start : read.start + read.target.numel()])
    engine.tick()
    yield from engine.everybody(engine.clock)  # until then the others read this rank's tensor


def gather(engine: Engine, fingerprint: int, source: torch.Tensor, target: torch.Tensor) -> Steps:
    """all_gather of `source` into `target`, uint8, flat.

    In shared memory each rank puts its own part in place before the others come, and copies theirs from where
    they lie: it writes only into its own tensor, most of which is nearer to its core than to theirs.
    """
    rank, nbytes = engine.rank, source.numel()
    parts = target.split(nbytes) if nbytes else ()
    if parts and source.data_ptr() != parts[rank].data_ptr():
        copy_flat(parts[rank], source.clone() if overlap(source, parts[rank]) else source)
    engine.enter(fingerprint, target)
    yield from engine.entered(fingerprint)
    places = engine.in_place(range(engine.world_size))
    reads = [Read(other, other * nbytes, part) for other, part in enumerate(parts) if other != rank]
    if places is None:
        reads = [Read(read.rank, 0, read.target) for read in reads]
        yield from _staged(engine, parts[rank] if parts else source, reads, nbytes)
        return
    for read in _own_reads(engine, None, reads):
        copy_flat(read.target, places[read.rank][read.start : read.start + nbytes])
    engine.tick()
    yield from engine.everybody(engine.clock)  # until then the others read this rank's part


def spread(engine: Engine, fingerprint: int, tensor: torch.Tensor, root: int) -> Steps:
    """broadcast in place from `root`, uint8, flat. In shared memory each rank writes an even share of
    the root's bytes into the tensors of all: a chunk comes from memory once, and from the cache for
    further ranks.
    """
    everybody, rank = range(engine.world_size), engine.rank
    engine.enter(fingerprint, tensor)
    yield from engine.entered(fingerprint)
    places = engine.in_place(everybody)
    if places is None:
        reads = [Read(root, 0, tensor)]
        yield from _staged(engine, tensor if rank == root else None, reads, tensor.numel())
        return
    start, stop = even_rows(tensor.numel(), engine.world_size)[rank]
    targets = [places[(rank + at) % engine.world_size][start:stop] for at in everybody]
    source = places[root][start:stop]
    targets = [each for each in targets if each.data_ptr() != source.data_ptr()]
    for chunk, *copies in zip(*(cut(each, CHUNK_BYTES) for each in (source, *targets)), strict=True):
        for copy in copies:
            copy_flat(copy, chunk)
    engine.tick()
    yield from engine.everybody(engine.clock)  # until then the others write to this rank's tensor


def _apart(engine: Engine, offered: torch.Tensor, reads: Sequence[Read]) -> torch.Tensor:
    """`offered`, or a copy if a read would overwrite what others still have to read."""
    for read in reads:
        at_home = read.rank == engine.rank and read.target.data_ptr() == offered.data_ptr() + read.start
        if not at_home and overlap(offered, read.target):
            return offered.clone()
    return offered


def _own_reads(engine: Engine, offered: torch.Tensor | None, reads: Sequence[Read]) -> list[Read]:
    """Do the reads from this rank's own offer, and return the others, beginning with the next rank.

    Ranks begin at different ranks so that they do not all read the same memory at the same time.
    """
    others = []
    for read in reads:
        if read.rank != engine.rank:
            others.append(read)
        elif offered is not None:
            source = offered[read.start : read.start + read.target.numel()]
            if source.data_ptr() != read.target.data_ptr():
                copy_flat(read.target, source)
    return sorted(others, key=lambda read: (read.rank - engine.rank) % engine.world_size)


def _staged(engine: Engine, offered: torch.Tensor | None, reads: Sequence[Read], largest_bytes: int) -> Steps:
    """Piece by piece through the slots."""
    size = engine.board.slot_bytes
    count = -(-largest_bytes // size)
    reads = _own_reads(engine, offered, reads)
    base = engine.clock

    def send(piece: int, into: int) -> None:
        if offered is not None:
            part = offered[piece * size : (piece + 1) * size]
            copy_flat(engine.slot_views(into, 0, part.numel(), torch.uint8)[engine.rank], part)

    for piece, slot in engine.in_pieces(count, send):
        yield from engine.everybody(base + 1 + piece)  # all have sent this piece
        _copy_out(engine, slot, piece * size, (piece + 1) * size, reads)


def _copy_out(engine: Engine, slot: int, start: int, stop: int, reads: Sequence[Read]) -> None:
    """Copy what `reads` want of bytes [start, stop), which lie in `slot`."""
    for read in reads:
        first, last = max(start, read.start), min(stop, read.start + read.target.numel())
        if first < last:
            source = engine.slot_views(slot, first - start, last - start, torch.uint8)[read.rank]
            copy_flat(read.target[first - read.start : last - read.start], source)


def all_to_all(
    engine: Engine,
    fingerprint: int,
    target: torch.Tensor,
    source: torch.Tensor,
    wanted: Sequence[int],
    given: Sequence[int],
) -> Steps:
    """Bytes `given[r]` of `source` go to rank r; `wanted[r]` bytes come from rank r into `target`.

    The ranks first exchange how much each gives, so splits that do not fit are an error that names both
    sides.
    """
    world_size = engine.world_size
    table = torch.empty(world_size, world_size, dtype=torch.int64, device="cpu")  # [from, to], bytes
    own = torch.tensor(given, dtype=torch.int64, device="cpu")
    rows = [Read(rank, 0, as_bytes(table[rank])) for rank in range(world_size)]
    yield from exchange(engine, fingerprint, as_bytes(own), rows, range(world_size), own.numel() * 8)
    for rank in range(world_size):
        if int(table[rank, engine.rank]) != wanted[rank]:
            names = engine.board.names
            raise MismatchError(
                f"all_to_all number {engine.number} differs between ranks: rank {names[rank]} sends "
                f"{int(table[rank, engine.rank])} bytes to rank {names[engine.rank]}, which expects "
                f"{wanted[rank]}"
            )
    starts = (table.cumsum(1) - table)[:, engine.rank].tolist()
    parts = target.split(list(wanted))
    reads = [Read(rank, int(starts[rank]), parts[rank]) for rank in range(world_size)]
    largest = int(table.sum(1).max())
    yield from exchange(engine, fingerprint, source, reads, range(world_size), largest)
