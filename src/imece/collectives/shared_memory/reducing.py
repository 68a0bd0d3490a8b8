"""Reduce-scatter, and all-reduce and reduce on top of it: one path.

The flat tensor is cut into one row a rank. A rank sums its own row over all ranks (the reduce-scatter); if
others want the result too, it goes from there to them (the all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from imece.collectives.shared_memory.arithmetic import Reduction, Scratch
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.tensors import copy_flat, overlap
from imece.collectives.shared_memory.waiting import Steps

CHUNK_BYTES = 256 * 1024  # of one tensor; the chunks of all ranks together stay in the cache
_ALIGN = 64  # elements, so that two ranks do not write into one cache line

Row = tuple[int, int]  # start, stop in elements of the flat tensor


class Chunk(NamedTuple):
    """Some elements of a row."""

    pieces: list[torch.Tensor]  # one a rank, to sum
    out: torch.Tensor
    in_place: bool  # whether the running result may lie in `out`
    copies: list[torch.Tensor]  # where else the result goes


def even_rows(numel: int, world_size: int) -> list[Row]:
    """One row a rank, of equal lengths except the last ones."""
    length = -(-numel // world_size)
    length = -(-length // _ALIGN) * _ALIGN
    return [(min(numel, rank * length), min(numel, (rank + 1) * length)) for rank in range(world_size)]


def cut(tensor: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Pieces of `length` elements; the last may be shorter, and a short tensor is its own piece."""
    return tensor.split(length) if tensor.numel() > length else (tensor,)


def steps(
    engine: Engine,
    op: str,
    fingerprint: int,
    tensor: torch.Tensor,
    output: torch.Tensor,
    how: Reduction,
    root: int = -1,
) -> Steps:
    """all_reduce or reduce in place on `tensor`, or reduce_scatter into `output`; both flat.

    all_reduce moves 2(N-1)/N of the bytes a rank. reduce leaves the tensors of all but `root` as they are.
    reduce_scatter puts row `rank` of the reduced `tensor`, [N * n], into `output`, [n].
    """
    everybody = range(engine.world_size)
    if op == "reduce_scatter":
        length = output.numel()
        rows = [(rank * length, (rank + 1) * length) for rank in everybody]
        own = tensor.data_ptr() + engine.rank * output.nbytes
        if output.data_ptr() != own and overlap(output, tensor):
            place = torch.empty_like(output)
            return _then_copied(_reduce(engine, fingerprint, tensor, rows, how, place, ()), place, output)
        return _reduce(engine, fingerprint, tensor, rows, how, output, ())
    rows = even_rows(tensor.numel(), engine.world_size)
    return _reduce(engine, fingerprint, tensor, rows, how, tensor, (root,) if op == "reduce" else everybody)


def _then_copied(steps: Steps, place: torch.Tensor, output: torch.Tensor) -> Steps:
    """Then copy to an `output` that lies in what others read until then."""
    yield from steps
    output.copy_(place)


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
    engine.enter(fingerprint, tensor)
    yield from engine.entered(fingerprint)
    everybody = range(engine.world_size)
    offered = engine.in_place(everybody)
    if offered is None:
        yield from _staged(engine, tensor, rows, how, output, readers)
        return
    row = rows[engine.rank]
    place = tuple(each.data_ptr() for each in offered)

    def make() -> list[Chunk]:
        return chunks_of([each.view(tensor.dtype) for each in offered], row, output, readers)

    # Without readers the output is the caller's: a kept view of it would keep its memory too.
    chunks = engine.kept((place, row, tuple(readers), tensor.dtype), make) if readers else make()
    for chunk in chunks:
        sum_chunk(chunk, how, engine.scratch)
    engine.tick()
    yield from engine.everybody(engine.clock)  # until then the others read and write this rank's tensor


def chunks_of(
    ranks: Sequence[torch.Tensor], row: Row, output: torch.Tensor, readers: Sequence[int]
) -> list[Chunk]:
    """One row of all ranks' tensors, in chunks that fit the cache.

    ranks: in their order, [numel] each. The sum goes to the rows of `readers`, or to `output` if there
    are none.
    """
    start, stop = row
    if start == stop:
        return []
    length = max(_ALIGN, CHUNK_BYTES // output.itemsize)
    pieces = [cut(each[start:stop], length) for each in ranks]
    targets = [pieces[reader] for reader in readers] if readers else [cut(output, length)]
    # The running result may lie in the first target unless that would overwrite a later addend.
    in_place = targets[0][0].data_ptr() not in [each[0].data_ptr() for each in pieces[2:]]
    return [
        Chunk([each[at] for each in pieces], out, in_place, [target[at] for target in targets[1:]])
        for at, out in enumerate(targets[0])
    ]


def sum_chunk(chunk: Chunk, how: Reduction, scratch: Scratch) -> None:
    """Sum one chunk and copy the result. scratch: as in Reduction."""
    pieces, out, in_place, copies = chunk
    how(pieces, out, scratch, in_place)
    for copy in copies:
        copy.copy_(out)


def _staged(
    engine: Engine,
    tensor: torch.Tensor,
    rows: Sequence[Row],
    how: Reduction,
    output: torch.Tensor,
    readers: Sequence[int],
) -> Steps:
    """Piece by piece through the slots. A piece holds the same window of every row; row r's part lies at r *
    width in the slot. A rank sends all parts but its own, sums its own, and sends that if others want it."""
    rank, size = engine.rank, tensor.itemsize
    width = engine.board.slot_bytes // size // engine.world_size // _ALIGN * _ALIGN
    windows = [tensor[start:stop].split(width) if stop > start else () for start, stop in rows]
    outputs = windows[rank] if readers else output.split(width)
    wanted_here = not readers or rank in readers
    wanted_elsewhere = len(readers) > (rank in readers)
    count = -(-max(stop - start for start, stop in rows) // width)
    base = engine.clock

    def part(of: int, row: int, numel: int) -> list[torch.Tensor]:
        return engine.slot_views(of, row * width * size, (row * width + numel) * size, tensor.dtype)

    def send(piece: int, into: int) -> None:
        for row, window in enumerate(windows):
            if row != rank and piece < len(window):
                copy_flat(part(into, row, window[piece].numel())[rank], window[piece])

    for piece, slot in engine.in_pieces(count, send):
        yield from engine.everybody(base + max(1, 2 * piece))  # all have sent this piece
        if piece < len(windows[rank]):
            own = windows[rank][piece]
            parts = list(part(slot, rank, own.numel()))
            for_others, parts[rank] = parts[rank], own
            out = outputs[piece] if wanted_here else for_others
            how(parts, out, engine.scratch, in_place=rank < 2 or out.data_ptr() != own.data_ptr())
            if wanted_elsewhere and wanted_here:
                copy_flat(for_others, out)
        engine.tick()
        if readers:
            yield from engine.everybody(base + 2 * piece + 3)  # all have sent their sums
            if rank in readers:
                for row, window in enumerate(windows):
                    if row != rank and piece < len(window):
                        copy_flat(window[piece], part(slot, row, window[piece].numel())[row])
