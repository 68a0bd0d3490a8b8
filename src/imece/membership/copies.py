"""A second copy of what each rank alone holds, in memory that outlives the rank.

    piece   what a rank holds of one tensor: elements from `start` on of it, flat
    slot    all pieces of a rank as they were after one finished step; there are two, written by turns
    copy    one rank's segment: a table of its pieces, the step of each slot, the two slots
    set     the copies of all ranks of a generation, which all of them have mapped

A segment is freed when the last process that maps it has ended: what a rank has written into its copy, the
others can read when it is dead. A rank writes its slot before it takes part in the sum of the next step, so a
rank that can write the slot of step n knows that all have written that of step n - 1: whenever a rank dies,
there is a step that all slots have.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imece.checkpoint.deal import Slice
from imece.checkpoint.manifest import DTYPE_NAMES, DTYPES
from imece.collectives import ops
from imece.collectives.shared_memory import segment
from imece.collectives.shared_memory.segment import Segment
from imece.collectives.texts import gather_texts
from imece.errors import CollectiveError, UserError
from imece.membership.pieces import Pieces
from imece.mesh import Mesh

Held = Mapping[str, Tensor | Slice]

_WORDS = 4  # int64: bytes of the table, bytes of a slot, the steps of the two slots
_NONE = -1  # the step of a slot that is not whole
_ALIGN = 64  # bytes


@dataclass(frozen=True)
class _Piece:
    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    offset: int  # bytes, in a slot


class Copy:
    """One rank's copy, its own or another's."""

    def __init__(self, memory: Segment) -> None:
        self.memory = memory
        self._words = memory.memory[: 8 * _WORDS].view(torch.int64)
        table_bytes, slot_bytes = int(self._words[0]), int(self._words[1])
        raw = memory.memory[8 * _WORDS : 8 * _WORDS + table_bytes].numpy().tobytes()
        self._table = [_Piece(each[0], each[1], tuple(each[2]), *each[3:]) for each in json.loads(raw)]
        first = _aligned(8 * _WORDS + table_bytes)
        flats = [memory.memory[first + at * slot_bytes :][:slot_bytes] for at in range(2)]
        self._slots = [
            [
                flat[piece.offset :][: piece.numel * DTYPES[piece.dtype].itemsize].view(DTYPES[piece.dtype])
                for piece in self._table
            ]
            for flat in flats
        ]
        self._names = [(piece.name, piece.numel) for piece in self._table]

    @classmethod
    def of(cls, held: Held) -> Copy:
        """A new one with room for these. UserError where the host has too little memory."""
        table, end = [], 0
        for name, value in held.items():
            tensor, shape, start = _parts(value)
            table.append(_Piece(name, DTYPE_NAMES[tensor.dtype], shape, start, tensor.numel(), end))
            end = _aligned(end + tensor.nbytes)
        raw = json.dumps([list(vars(piece).values()) for piece in table]).encode()
        first = _aligned(8 * _WORDS + len(raw))
        memory = segment.create(first + 2 * end, "a copy of this rank's part in memory", populate=True)
        memory.memory[: 8 * _WORDS].view(torch.int64)[:] = torch.tensor([len(raw), end, _NONE, _NONE])
        memory.memory[8 * _WORDS :][: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return cls(memory)

    @property
    def steps(self) -> set[int]:
        """Of which it has a whole slot."""
        return {step for step in self._words[2:4].tolist() if step != _NONE}

    def fits(self, held: Held) -> bool:
        """Whether these are the tensors that it was made for."""
        return self._names == [(name, _parts(value)[0].numel()) for name, value in held.items()]

    @torch.no_grad()
    def write(self, step: int, held: Held) -> None:
        """These, as of `step` finished steps, in place of what was there two steps before."""
        slot = step % 2
        self._words[2 + slot] = _NONE
        sources = [_parts(value)[0].reshape(-1) for value in held.values()]
        if sources:  # of a small model on many ranks, some have no part
            torch._foreach_copy_(self._slots[slot], sources)
        self._words[2 + slot] = step

    def read(self, step: int, into: Pieces) -> None:
        """Add what it has of `step` finished steps; the memory stays this copy's."""
        for piece, flat in zip(self._table, self._slots[step % 2], strict=True):
            into.add(piece.name, piece.shape, piece.start, flat)


class Copies:
    """The newest set of copies that this rank has mapped, its own among them."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._own: Copy | None = None
        self._all: list[Copy] = []  # by rank of the generation that made them
        self._made = 0  # sets so far, over all generations: the same number on all ranks that were there

    def write(self, step: int, held: Held) -> bool:
        """What this rank holds after `step` finished steps; False if all have to `exchange` first."""
        if self._own is None or not self._own.fits(held):
            return False
        self._own.write(step, held)
        return True

    def exchange(self, step: int, held: Held) -> str:
        """A new set, of `step` finished steps. All ranks of the generation, which are on one host, call it.

        What was there stays until all have the new ones. Returns why there is none, for want of memory.
        """
        group, device = self._mesh.world_group, torch.device("cpu")
        with contextlib.ExitStack() as unless_done:
            try:
                own = Copy.of(held)
                unless_done.callback(own.memory.close)
                own.write(step, held)
                mine = [json.dumps([os.getpid(), own.memory.fd, own.memory.serial]), str(self._made)]
            except UserError as error:
                mine = [str(error)]
            said = gather_texts(mine, group, device, "copies in memory")
            if lacking := [texts[0] for texts in said if len(texts) == 1]:
                self.drop()
                return lacking[0]
            every = []
            for rank, (where, _) in enumerate(said):
                if rank == group.rank():
                    every.append(own)
                    continue
                every.append(_attached(*json.loads(where), keep=True))
                unless_done.callback(every[-1].memory.close)
            ops.barrier(group=group)  # now all have them open
            unless_done.pop_all()
        self.drop()
        self._own, self._all = own, every
        self._made = max(int(made) for _, made in said) + 1
        return ""

    def drop(self) -> None:
        """Let go of all."""
        for each in self._all:
            each.memory.close()
        self._own, self._all = None, []

    # After a death.

    def note(self) -> dict[str, Any]:
        """What this rank can offer, for the others."""
        held = [[os.getpid(), each.memory.fd, each.memory.serial] for each in self._all]
        return {"set": self._made if self._all else 0, "copies": held, "steps": self._common_steps()}

    def _common_steps(self) -> list[int]:
        return sorted(set.intersection(*(each.steps for each in self._all))) if self._all else []

    def recovered(self, notes: Iterable[Mapping[str, Any]]) -> tuple[int, Pieces] | None:
        """The newest step that all copies have, and what they hold of it; None if there is none.

        notes: of all ranks of the new generation. All of them come to the same step.
        """
        best = max(notes, key=lambda note: (int(note["set"]), note["steps"] != []))
        if not best["steps"]:
            return None
        step, pieces = int(best["steps"][-1]), Pieces()
        offered, ours = best["copies"], self._made == best["set"]
        for each in self._all if ours else [_attached(*where, keep=False) for where in offered]:
            each.read(step, pieces)
        return step, pieces


def _attached(pid: int, fd: int, serial: int, *, keep: bool) -> Copy:
    try:
        return Copy(segment.attach(pid, fd, serial, keep=keep))
    except (OSError, ValueError) as error:
        raise CollectiveError(f"the copy that process {pid} offers cannot be read: {error}") from None


def _parts(value: Tensor | Slice) -> tuple[Tensor, tuple[int, ...], int]:
    """(what there is of it, the whole shape, its first element)."""
    if isinstance(value, Slice):
        return value.tensor, value.shape, value.start
    return value, tuple(value.shape), 0


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN) * _ALIGN
