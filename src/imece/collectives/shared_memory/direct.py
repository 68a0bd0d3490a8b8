"""The five collectives on flat tensors, and imece's own way to call them, on the caller's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence

import torch

from imece.collectives import recorder
from imece.collectives.fingerprint import Announced, pack
from imece.collectives.shared_memory import exchanging, reducing
from imece.collectives.shared_memory.arithmetic import reduction
from imece.collectives.shared_memory.group_base import GroupBase
from imece.collectives.shared_memory.posted import Posted
from imece.collectives.shared_memory.small import (
    EXCHANGED_BYTES,
    REDUCED_BYTES,
    Small,
    SmallBroadcast,
    SmallGather,
    SmallReduce,
)
from imece.collectives.shared_memory.tensors import as_bytes, flat_and_back, nothing, plain, writing
from imece.collectives.shared_memory.waiting import Operation, Steps
from imece.collectives.waited import here, waiting

Tensor = torch.Tensor
_KEPT = 1024  # kinds of small calls


class DirectCalls(GroupBase):
    """The calls of `SharedMemoryGroup` that imece makes, besides those that torch makes."""

    def run_now(
        self, op: str, input: Tensor, output: Tensor, reduce_op: str = "", root: int = -1, label: str = ""
    ) -> None:
        """One collective, over when this returns, without torch's dispatch, options or work handles.

        op: all_reduce, reduce, broadcast (input is output), reduce_scatter or all_gather. The caller makes
        sure that both tensors are contiguous, on the CPU, of one dtype and of sizes that fit each other.
        """
        small = self._small(op, input.dtype, input.shape, reduce_op, root)
        if small is None:
            target, back = flat_and_back(output)
            source = target if output is input else plain(input).view(-1)
            fingerprint, steps = self._steps(op, input, source, target, reduce_op, root)
            noted = self._noted(fingerprint, input.dtype, input.shape, steps, back, label)
            self._calls += 1
            with waiting:
                self._runner.run(self._engine.operation(fingerprint, noted))
            return
        source = input.detach() if input.requires_grad else input
        source = source.view(-1) if source.dim() != 1 else source
        target = source
        if output is not input:
            target = (output.detach() if output.requires_grad else output).view(-1)
        if target.is_inference():  # `with writing()` for every call would take 0.8 of the 8 us, this 0.1
            with writing():
                self._run_small(small, source, target, label)
        else:
            self._run_small(small, source, target, label)

    def open(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """Every rank's `tensor` where it lies, in rank order; an empty list, on all ranks, unless all are in
        shared memory.

        tensor: flat, on the CPU, of one dtype and size on all ranks. From here until all ranks have called
        `barrier_now`, a rank may read and write its agreed part of all of them.
        """
        fingerprint = pack("open", "", tensor.dtype, tensor.numel(), -1)
        found = self._open(fingerprint, tensor, tensor.dtype, tensor.shape, label)
        return [each.view(tensor.dtype) for each in found]

    def open_each(self, offered: Tensor | None) -> list[Tensor]:
        """Like `open`, but each rank offers any contiguous tensor on the CPU, or none.

        Returns their bytes in rank order; an empty list, on all ranks, unless all are in shared memory.
        """
        return self._open(pack("open", "", torch.uint8, 0), offered, torch.uint8, ())

    def _open(
        self,
        fingerprint: int,
        offered: Tensor | None,
        dtype: torch.dtype,
        shape: Sequence[int],
        label: str = "",
    ) -> list[Tensor]:
        engine = self._engine
        found: list[Tensor] = []

        def steps() -> Steps:
            engine.enter(fingerprint, offered)
            yield from engine.entered(fingerprint)
            found.extend(engine.in_place(range(engine.world_size)) or ())

        noted = self._noted(fingerprint, dtype, tuple(shape), steps(), nothing, label)
        with waiting:
            self._runner.run(engine.operation(fingerprint, noted))
        return found

    def gather_and_open(self, row: Tensor, offered: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Every rank's `row`, and what every rank offers where it lies, in one meeting.

        row: uint8[nbytes], of the same length on every rank. offered: contiguous, on the CPU; ranks may offer
        different tensors. Returns the rows as uint8[world_size, nbytes] and the tensors as their bytes in
        rank order; no tensors, on all ranks, unless all are in shared memory. The rows must say who may do
        what with them.
        """
        engine = self._engine
        gathered: list[Tensor] = []
        found: list[Tensor] = []

        def steps() -> Steps:
            slots = engine.slot_views(engine.next_slot(), 0, row.numel(), torch.uint8)
            slots[engine.rank].copy_(row)
            engine.enter(fingerprint, offered)
            yield from engine.entered(fingerprint)
            gathered.append(torch.stack(slots))
            found.extend(engine.in_place(range(engine.world_size)) or ())

        fingerprint = pack("all_gather_list", "", row.dtype, row.numel())
        noted = self._noted(fingerprint, row.dtype, row.shape, steps(), nothing)
        self._runner.run(engine.operation(fingerprint, noted))
        return gathered[0], found

    def posted(self, tensors: Sequence[Tensor], *, scatter: bool = False) -> Posted | None:
        """Sums of these tensors that can be repeated: a rank posts each tensor when it is full, and early
        ranks sum for late ones. None, on all ranks, unless all tensors of all ranks are in shared memory.

        tensors: flat, on the CPU, at least one; equally many on all ranks, of the same dtypes and sizes.
        scatter: each tensor has as many equal parts as there are ranks, and each rank gets the sum of one, in
        place; otherwise all get all. All ranks make this together. Then each posts its tensors and calls
        `sum_posted`, again and again.
        """
        offered = [self.open(tensor, "to be posted") for tensor in tensors]
        if not all(offered):
            return None
        return Posted(
            self._engine,
            offered,
            [reduction("sum", tensor.dtype) for tensor in tensors],
            scatter=scatter,
            open_sheet=lambda sheet: self.open(sheet, "what is posted"),
            fail=self._runner.fail,
        )

    def sum_posted(self, posted: Posted, label: str = "") -> None:
        """Sum everything that was posted. This rank has posted all its tensors, and the others will."""
        engine = self._engine
        noted = self._noted(
            posted.fingerprint, posted.dtype, (posted.numel,), posted.finish(), nothing, label
        )
        operation = Operation(noted, posted.fingerprint, engine.which, posted.missing)
        with waiting:
            self._runner.run(operation)

    def agree(self, announced: Announced) -> None:
        """Returns when all ranks are known to make this call, which then goes its own `way`, as messages."""
        op, dtype, shape, reduce_op, root, label, way = announced
        key = (op, dtype, shape, reduce_op, root, way)
        small = self._smalls.get(key)
        if small is None:
            small = Small(self._engine, op, dtype, shape, reduce_op, root, way)
            self._keep(key, small)
        self._run_small(small, None, None, label)

    def barrier_now(self) -> None:
        """No rank goes on before all are here."""
        self._run_small(self._barrier, None, None)

    def give_back(self) -> None:
        """Free the slots through which ordinary tensors travel, until the next ones need them. All ranks call
        this, after something large that comes once."""
        self.barrier_now()
        self._engine.board.give_back_slots()

    def _run_small(self, small: Small, source: Tensor | None, target: Tensor | None, label: str = "") -> None:
        token = recorder.enter(
            small.op, self._name, small.dtype, small.shape, small.reduce_op, small.root, label
        )
        self._calls += 1
        began = time.perf_counter()
        try:
            self._runner.run_small(small, source, target, label)
        except BaseException:
            recorder.fail(token)
            raise
        recorder.leave(token)
        if not here.depth:  # `with waiting` would take 0.7 of the 8 us, this takes 0.2
            here.seconds += time.perf_counter() - began

    def _steps(
        self, op: str, tensor: Tensor, source: Tensor, target: Tensor, reduce_op: str = "", root: int = -1
    ) -> tuple[int, Steps]:
        """(fingerprint, steps) of a collective. tensor: must be alike on all ranks; source: the
        same, flat."""
        small = self._small(op, tensor.dtype, tensor.shape, reduce_op, root)
        if small is not None:
            return small.fingerprint, small.steps(source, target, self._label)
        fingerprint = pack(op, reduce_op, tensor.dtype, tensor.numel(), root)
        if reduce_op:
            how = reduction(reduce_op, tensor.dtype)
            return fingerprint, reducing.steps(self._engine, op, fingerprint, source, target, how, root)
        place = as_bytes(target)
        if op == "broadcast":
            return fingerprint, exchanging.spread(self._engine, fingerprint, place, root)
        return fingerprint, exchanging.gather(self._engine, fingerprint, as_bytes(source), place)

    def _small(
        self, op: str, dtype: torch.dtype, shape: Sequence[int], reduce_op: str, root: int
    ) -> Small | None:
        """What repeats with every small call of this kind; None if the tensor is too large for it."""
        key = (op, dtype, shape, reduce_op, root)
        try:
            return self._smalls[key]
        except KeyError:
            pass
        nbytes = dtype.itemsize * math.prod(shape)
        made: Small | None = None
        if nbytes <= (REDUCED_BYTES if reduce_op else EXCHANGED_BYTES):
            with torch.inference_mode(False):  # its views of slots are written to outside of the mode too
                if reduce_op:
                    made = SmallReduce(self._engine, op, reduction(reduce_op, dtype), shape, root)
                else:
                    kind = SmallBroadcast if op == "broadcast" else SmallGather
                    made = kind(self._engine, op, dtype, shape, root=root)
        self._keep(key, made)
        return made

    def _keep(self, key: Hashable, made: Small | None) -> None:
        if len(self._smalls) >= _KEPT:
            self._smalls.clear()
        self._smalls[key] = made
