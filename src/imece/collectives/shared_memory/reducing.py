"""Reduce-scatter, and all-reduce and reduce on top of it: one path.

The flat tensor is cut into one row a rank. A rank sums its own row over all ranks (that is the
reduce-scatter); where others want the result too, it goes from there to them (the all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from imece.collectives.shared_memory.arithmetic import Reduction
from imece.collectives.shared_memory.board import SLOT_BYTES
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.waiting import Steps

SMALL_BYTES = 16 * 1024  # up to here every rank sums everything: cheaper than a second step
CHUNK_BYTES = 128 * 1024  # of one tensor; the chunks of all ranks together stay in the cache
_ALIGN = 64  # elements, so that two ranks do not write into one cache line

Row = tuple[int, int]  # start, stop in elements of the flat tensor


def even_rows(numel: int, world_size: int) -> list[Row]:
    """One row a rank, as long as each other but for the last ones."""
    length = -(-numel // world_size)
    length = -(-length // _ALIGN) * _ALIGN
    return [(min(numel, rank * length), min(numel, (rank + 1) * length)) for rank in range(world_size)]


def all_reduce(engine: Engine, fingerprint: int, tensor: torch.Tensor, how: Reduction) -> Steps:
    """In place on `tensor` (flat, contiguous). Moves 2(N-1)/N of its bytes a rank."""
    rows = even_rows(tensor.numel(), engine.world_size)
    return _reduce(engine, fingerprint, tensor, rows, how, tensor, range(engine.world_size))


def reduce(engine: Engine, fingerprint: int, tensor: torch.Tensor, how: Reduction, root: int) -> Steps:
    """In place on `tensor` of rank `root`; the others' tensors stay as they are."""
    rows = even_rows(tensor.numel(), engine.world_size)
    return _reduce(engine, fingerprint, tensor, rows, how, tensor, (root,))


def reduce_scatter(
    engine: Engine, fingerprint: int, output: torch.Tensor, tensor: torch.Tensor, how: Reduction
) -> Steps:
    """Row `rank` of the sum of `tensor` ([N * n], flat) into `output` ([n], flat)."""
    length = output.numel()
    rows = [(rank * length, (rank + 1) * length) for rank in range(engine.world_size)]
    return _reduce(engine, fingerprint, tensor, rows, how, output, ())


def _reduce(
    engine: Engine,
    fingerprint: int,
    tensor: torch.Tensor,
    rows: Sequence[Row],
    how: Reduction,
    output: torch.Tensor,
    readers: Sequence[int],
) -> Steps:
    """`readers` get all rows in place of their tensor; without readers each rank gets its row in `output`."""
    if tensor.numel() * tensor.itemsize <= SMALL_BYTES:
        yield from _small(engine, fingerprint, tensor, rows, how, output, readers)
        return
    engine.enter(fingerprint, tensor)
    yield from engine.entered(fingerprint)
    everybody = range(engine.world_size)
    offered = engine.in_place(everybody)
    if offered is None:
        yield from _staged(engine, tensor, rows, how, output, readers)
        return
    _direct(engine, [each.view(tensor.dtype) for each in offered], rows[engine.rank], how, output, readers)
    engine.tick()
    yield from engine.everybody(engine.clock)  # till then the others read and write this rank's tensor


def _small(
    engine: Engine,
    fingerprint: int,
    tensor: torch.Tensor,
    rows: Sequence[Row],
    how: Reduction,
    output: torch.Tensor,
    readers: Sequence[int],
) -> Steps:
    """The tensor travels with the announcement and every rank sums what it wants: one step."""
    slots = engine.slot_views(engine.next_slot(), 0, tensor.numel() * tensor.itemsize, tensor.dtype)
    slots[engine.rank].copy_(tensor)
    engine.enter(fingerprint)
    yield from engine.entered(fingerprint)
    if engine.rank in readers:
        how(slots, tensor, engine.scratch(how.within), in_place=True)
    elif not readers:
        start, stop = rows[engine.rank]
        how([slot[start:stop] for slot in slots], output, engine.scratch(how.within), in_place=True)


def _direct(
    engine: Engine,
    tensors: Sequence[torch.Tensor],
    row: Row,
    how: Reduction,
    output: torch.Tensor,
    readers: Sequence[int],
) -> None:
    """Sum the own row straight from all tensors, chunk by chunk, and write it where it is wanted."""
    start, stop = row
    if start == stop:
        return
    chunk = max(_ALIGN, CHUNK_BYTES // tensors[0].itemsize)
    pieces = [tensor[start:stop].split(chunk) for tensor in tensors]
    targets = [pieces[reader] for reader in readers] if readers else [output.split(chunk)]
    scratch = engine.scratch(how.within)
    # The running result may lie in the first target unless a later addend is overwritten by that.
    in_place = targets[0][0].data_ptr() not in [each[0].data_ptr() for each in pieces[2:]]
    for at, out in enumerate(targets[0]):
        how([each[at] for each in pieces], out, scratch, in_place)
        for target in targets[1:]:
            target[at].copy_(out)


def _staged(
    engine: Engine,
    tensor: torch.Tensor,
    rows: Sequence[Row],
    how: Reduction,
    output: torch.Tensor,
    readers: Sequence[int],
) -> Steps:
    """Piece by piece through the slots: while a piece is summed, the next one is already on its way.

    A piece holds the same window of every row; row r's part lies at r * width in the slot. A rank
    sends all parts but its own, sums its own part, and sends that where others want it.
    """
    rank, size = engine.rank, tensor.itemsize
    width = SLOT_BYTES // size // engine.world_size // _ALIGN * _ALIGN
    windows = [tensor[start:stop].split(width) if stop > start else () for start, stop in rows]
    outputs = windows[rank] if readers else output.split(width)
    wanted_here = not readers or rank in readers
    wanted_elsewhere = len(readers) > (rank in readers)
    scratch = engine.scratch(how.within)
    count = -(-max(stop - start for start, stop in rows) // width)
    base, slot = engine.clock, engine.next_slot()

    def part(of: int, row: int, numel: int) -> list[torch.Tensor]:
        return engine.slot_views(of, row * width * size, (row * width + numel) * size, tensor.dtype)

    def send(piece: int, into: int) -> None:
        for row, window in enumerate(windows):
            if row != rank and piece < len(window):
                part(into, row, window[piece].numel())[rank].copy_(window[piece])

    send(0, slot)
    engine.tick()
    for piece in range(count):
        following = slot
        if piece + 1 < count:
            following = engine.next_slot()
            send(piece + 1, following)
        engine.tick()
        yield from engine.everybody(base + max(1, 2 * piece))  # all have sent this piece
        if piece < len(windows[rank]):
            own = windows[rank][piece]
            parts = list(part(slot, rank, own.numel()))
            for_others, parts[rank] = parts[rank], own
            out = outputs[piece] if wanted_here else for_others
            how(parts, out, scratch, in_place=rank < 2 or out.data_ptr() != own.data_ptr())
            if wanted_elsewhere and wanted_here:
                for_others.copy_(out)
        engine.tick()
        if readers:
            yield from engine.everybody(base + 2 * piece + 3)  # all have sent their sums
            if rank in readers:
                for row, window in enumerate(windows):
                    if row != rank and piece < len(window):
                        window[piece].copy_(part(slot, row, window[piece].numel())[row])
        slot = following
