"""The torch.distributed backend "shm": what torch calls, in terms of the engine.

torch takes a ProcessGroup written in Python as it is, and then asks no other backend; with
"cpu:shm,cuda:nccl" tensors on other devices therefore go on from here to a group of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from imece.collectives.fingerprint import pack
from imece.collectives.shared_memory import exchanging, reducing
from imece.collectives.shared_memory.arithmetic import Reduction, reduction
from imece.collectives.shared_memory.board import Board
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.exchanging import Read, as_bytes
from imece.collectives.shared_memory.messages import Messages, Wanted
from imece.collectives.shared_memory.other_devices import OtherDevices
from imece.collectives.shared_memory.runner import Runner
from imece.collectives.shared_memory.waiting import Operation, Steps
from imece.collectives.shared_memory.work import ShmWork

Tensor = torch.Tensor

_OP_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def _nothing() -> None:
    return None


class SharedMemoryGroup(dist.ProcessGroup):
    """A group of CPU ranks of one host. Made by torch.distributed for backend "shm"."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._board = Board(store, rank, size, timeout)
        self._engine = Engine(self._board)
        self._messages = Messages(self._board)
        self._runner = Runner(self._board, self._engine, self._messages, timeout.total_seconds())
        self._others = OtherDevices(store, rank, size, timeout)
        self._reductions: dict[tuple[str, torch.dtype], Reduction] = {}
        self._members = list(range(size))
        self._close = weakref.finalize(self, _close, self._runner, self._board)

    # The fast way for imece's own calls: no options object, no work handle.

    def all_reduce_(self, tensor: Tensor, op: str, label: str = "") -> None:
        """All-reduce in place, blocking. tensor: contiguous, on the CPU."""
        how = self._reduction(op, tensor.dtype)
        self._engine.shape, self._engine.label = tuple(tensor.shape), label
        flat = (tensor.detach() if tensor.requires_grad else tensor).view(-1)
        fingerprint = pack("all_reduce", op, tensor.dtype, flat.numel())
        self._runner.run(self._operation(fingerprint, reducing.all_reduce(self._engine, fingerprint, flat, how)))

    def exchange_(self, sends: Sequence[tuple[int, Tensor, int]], receives: Sequence[tuple[int, Tensor, int]]) -> None:
        """Send and receive together, blocking. Each item: (peer in the group, contiguous CPU tensor, tag)."""
        incoming = [self._receiving([peer], tensor, tag) for peer, tensor, tag in receives]
        operations = [operation for operation, _, _ in incoming]
        operations += [self._sending(peer, tensor, tag) for peer, tensor, tag in sends]
        self._runner.run_messages(operations)
        for _, _, back in incoming:
            back()

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_reduce of one tensor, in place."""
        if other := self._others.group(tensors[0], self):
            return other.allreduce(tensors, opts or dist.AllreduceOptions())
        (tensor,) = tensors
        how, name = self._how(opts, tensor)
        fingerprint = pack("all_reduce", name, tensor.dtype, tensor.numel())
        flat, back = _flat(tensor)
        steps = reducing.all_reduce(self._engine, fingerprint, flat, how)
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_reduce of several tensors."""
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's reduce: in place on the root, the others' tensors stay as they are."""
        if other := self._others.group(tensors[0], self):
            return other.reduce(tensors, opts)
        (tensor,) = tensors
        how, name = self._how(opts, tensor)
        fingerprint = pack("reduce", name, tensor.dtype, tensor.numel(), opts.rootRank)
        flat, back = _flat(tensor)
        steps = reducing.reduce(self._engine, fingerprint, flat, how, opts.rootRank)
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch's reduce_scatter_tensor: input [N * n] -> output [n]."""
        if other := self._others.group(output, self):
            return _named(other, "reduce_scatter_single", "_reduce_scatter_base")(output, input, opts)
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter on {self.size()} ranks needs an input of {self.size()} x the output: "
                f"{_text(input)} against {_text(output)}"
            )
        how, name = self._how(opts, input)
        fingerprint = pack("reduce_scatter", name, input.dtype, input.numel())
        flat, back = _flat(output)
        source = input.detach().contiguous().view(-1)
        steps = reducing.reduce_scatter(self._engine, fingerprint, flat, source, how)
        return self._collective(fingerprint, steps, input, opts, [output], back)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """torch's reduce_scatter of a list of tensors, one a rank."""
        if other := self._others.group(outputs[0], self):
            return other.reduce_scatter(outputs, inputs, opts)
        ((output,), (parts,)) = outputs, inputs
        if any(part.numel() != output.numel() for part in parts):
            return self._reduce_each(output, parts, opts)
        return self.reduce_scatter_single(output, torch.cat([part.reshape(-1) for part in parts]), opts)

    def _reduce_each(self, output: Tensor, parts: list[Tensor], opts: Any) -> dist.Work:
        """Parts of different lengths: one reduce to each rank."""
        works = []
        for root, part in enumerate(parts):
            one = dist.ReduceOptions()
            one.reduceOp, one.rootRank, one.asyncOp = opts.reduceOp, root, opts.asyncOp
            if root == self.rank():
                output.detach().copy_(part.detach().view(output.shape))
                part = output
            works.append(self.reduce([part], one))
        return self._all_of(works, [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's reduce_scatter_tensor of several tensors."""
        works = [self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)]
        return self._all_of(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Exchanges.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's broadcast from opts.rootRank, in place."""
        if other := self._others.group(tensors[0], self):
            return other.broadcast(tensors, opts)
        (tensor,) = tensors
        root = opts.rootRank
        fingerprint = pack("broadcast", "", tensor.dtype, tensor.numel(), root)
        flat, back = _flat(tensor)
        data = as_bytes(flat)
        reads = [] if root == self.rank() else [Read(root, 0, data)]
        steps = exchanging.exchange(self._engine, fingerprint, data, reads, [root], data.numel())
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch's all_gather_into_tensor: input [n] -> output [N * n]."""
        if other := self._others.group(output, self):
            return _named(other, "all_gather_single", "_allgather_base")(output, input, opts)
        if output.numel() != input.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"all_gather on {self.size()} ranks needs an output of {self.size()} x the input: "
                f"{_text(output)} against {_text(input)}"
            )
        flat, back = _flat(output)
        targets = list(as_bytes(flat).split(max(1, input.numel() * input.itemsize)))
        return self._gather_into(targets, input, self._members, "all_gather", -1, back, opts, [output])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_gather into a list of tensors, one a rank."""
        if other := self._others.group(inputs[0], self):
            return other.allgather(outputs, inputs, opts)
        ((targets,), (input,)) = outputs, inputs
        return self._gather_list(targets, input, "all_gather", -1, opts, [targets])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_gather of several tensors into lists."""
        works = [
            self.allgather([[each[at] for each in outputs]], [input], opts) for at, input in enumerate(inputs)
        ]
        return self._all_of(works, outputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_gather_into_tensor of several tensors."""
        works = [self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)]
        return self._all_of(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's gather to opts.rootRank."""
        if other := self._others.group(inputs[0], self):
            return other.gather(outputs, inputs, opts)
        (input,) = inputs
        targets = outputs[0] if opts.rootRank == self.rank() else []
        return self._gather_list(targets, input, "gather", opts.rootRank, opts, [targets])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """torch's scatter from opts.rootRank."""
        if other := self._others.group(outputs[0], self):
            return other.scatter(outputs, inputs, opts)
        (output,) = outputs
        root = opts.rootRank
        flat, back = _flat(output)
        target = as_bytes(flat)
        offered = None
        if root == self.rank():
            _same_size(inputs[0], output, "scatter")
            offered = as_bytes(torch.cat([part.detach().reshape(-1) for part in inputs[0]]))
        fingerprint = pack("scatter", "", output.dtype, output.numel(), root)
        reads = [Read(root, self.rank() * target.numel(), target)]
        steps = exchanging.exchange(self._engine, fingerprint, offered, reads, [root], target.numel() * self.size())
        return self._collective(fingerprint, steps, output, opts, [output], back)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """torch's all_to_all_single; splits are in rows of the first dimension, [] for even ones."""
        if other := self._others.group(output, self):
            named = _named(other, "all_to_all_single", "alltoall_base")
            return named(output, input, output_splits, input_splits, opts)
        flat, back = _flat(output)
        source = input.detach().contiguous()
        wanted = _split_bytes(output, output_splits, self.size())
        given = _split_bytes(source, input_splits, self.size())
        return self._all_to_all(as_bytes(flat), as_bytes(source.view(-1)), wanted, given, input.dtype, back, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_to_all of lists of tensors, one a rank."""
        if other := self._others.group(outputs[0], self):
            return other.alltoall(outputs, inputs, opts)
        given = [part.numel() * part.itemsize for part in inputs]
        wanted = [part.numel() * part.itemsize for part in outputs]
        source = as_bytes(torch.cat([part.detach().reshape(-1) for part in inputs]))
        target = torch.empty(sum(wanted), dtype=torch.uint8)

        def back() -> None:
            for part, data in zip(outputs, target.split(wanted), strict=True):
                part.detach().copy_(data.view(part.dtype).view(part.shape))

        return self._all_to_all(target, source, wanted, given, inputs[0].dtype, back, opts, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Nobody goes on before everybody is here."""
        fingerprint = pack("barrier", "", None, 0)
        return self._collective(fingerprint, self._engine.barrier(fingerprint), None, opts, [])

    # Messages.

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        """Send one tensor to rank `target` of the group."""
        if other := self._others.group(tensors[0], self):
            return other.send(tensors, target, tag)
        work = ShmWork(tensors, done=False)
        self._runner.submit(self._sending(target, tensors[0], tag), work.finish, message=True)
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive one tensor from rank `source` of the group."""
        if other := self._others.group(tensors[0], self):
            return other.recv(tensors, source, tag)
        return self._receive([source], tensors[0], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive one tensor from whichever rank sends first."""
        return self._receive([member for member in self._members if member != self.rank()], tensors[0], tag)

    def _receive(self, sources: list[int], tensor: Tensor, tag: int) -> dist.Work:
        operation, wanted, back = self._receiving(sources, tensor, tag)
        work = ShmWork([tensor], done=False)

        def finish(error: BaseException | None) -> None:
            if error is None:
                back()
            work.source = wanted.source
            work.finish(error)

        self._runner.submit(operation, finish, message=True)
        return work

    def _sending(self, target: int, tensor: Tensor, tag: int) -> Operation:
        data = as_bytes(tensor.detach().contiguous())
        fingerprint = pack("send", "", tensor.dtype, tensor.numel())
        steps = self._messages.send(target, data, fingerprint, tag)
        return Operation(steps, fingerprint, lambda: tag, lambda: [target])

    def _receiving(self, sources: list[int], tensor: Tensor, tag: int) -> tuple[Operation, Wanted, Callable[[], None]]:
        flat, back = _flat(tensor)
        wanted = Wanted(tag, pack("send", "", tensor.dtype, tensor.numel()), as_bytes(flat))
        steps = self._messages.receive(sources, wanted)
        shown = pack("recv", "", tensor.dtype, tensor.numel())
        return Operation(steps, shown, lambda: tag, lambda: sources), wanted, back

    # What torch asks of a group.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name in torch's tables."""
        return "shm"

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to set: collectives are counted from the beginning."""

    def shutdown(self) -> None:
        """Leave the group; torch's destroy_process_group calls this."""
        self._others.shutdown()
        self._close()

    def abort(self) -> None:
        """Give up what is under way and leave."""
        self.shutdown()

    # Inside.

    def _how(self, opts: Any, tensor: Tensor) -> tuple[Reduction, str]:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        name = _OP_NAMES.get(getattr(op, "op", op))
        if name is None:
            raise ValueError(f"the shm backend does not know the reduction {op}")
        return self._reduction(name, tensor.dtype), name

    def _reduction(self, op: str, dtype: torch.dtype) -> Reduction:
        found = self._reductions.get((op, dtype))
        if found is None:
            found = self._reductions[op, dtype] = reduction(op, dtype)
        return found

    def _operation(self, fingerprint: int, steps: Steps) -> Operation:
        engine = self._engine
        return Operation(steps, fingerprint, lambda: engine.number, engine.missing)

    def _collective(
        self,
        fingerprint: int,
        steps: Steps,
        tensor: Tensor | None,
        opts: Any,
        result: Any,
        back: Callable[[], None] = _nothing,
    ) -> dist.Work:
        """Run the collective here, or hand it to the worker; `back` runs at its end."""
        shape = tuple(tensor.shape) if tensor is not None else ()
        operation = self._operation(fingerprint, _described(self._engine, shape, steps, back))
        if getattr(opts, "asyncOp", True):
            work = ShmWork(result, done=False)
            self._runner.submit(operation, work.finish)
            return work
        timeout = getattr(opts, "timeout", None)
        self._runner.run(operation, timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else None)
        return ShmWork(result, done=True)

    def _all_of(self, works: Sequence[dist.Work], result: Any) -> dist.Work:
        """One handle for several operations, which run in order: the last one's end is the end of all."""
        if not works:
            return ShmWork(result, done=True)
        last = works[-1]
        return last.giving(result) if isinstance(last, ShmWork) else last

    def _gather_list(
        self, targets: list[Tensor], input: Tensor, op: str, root: int, opts: Any, result: Any
    ) -> dist.Work:
        _same_size(targets, input, op)
        flats = [_flat(target) for target in targets]

        def back() -> None:
            for _, one in flats:
                one()

        readers = [as_bytes(flat) for flat, _ in flats]
        return self._gather_into(readers, input, self._members, op, root, back, opts, result)

    def _gather_into(
        self,
        targets: Sequence[Tensor],
        input: Tensor,
        publishers: Sequence[int],
        op: str,
        root: int,
        back: Callable[[], None],
        opts: Any,
        result: Any,
    ) -> dist.Work:
        fingerprint = pack(op, "", input.dtype, input.numel(), root)
        data = as_bytes(input.detach().contiguous())
        reads = [Read(rank, 0, target) for rank, target in enumerate(targets)]
        steps = exchanging.exchange(self._engine, fingerprint, data, reads, publishers, data.numel())
        return self._collective(fingerprint, steps, input, opts, result, back)

    def _all_to_all(
        self,
        target: Tensor,
        source: Tensor,
        wanted: list[int],
        given: list[int],
        dtype: torch.dtype,
        back: Callable[[], None],
        opts: Any,
        result: Any,
    ) -> dist.Work:
        fingerprint = pack("all_to_all", "", dtype, 0)
        steps = exchanging.all_to_all(self._engine, fingerprint, target, source, wanted, given)
        return self._collective(fingerprint, steps, target, opts, result, back)


def _close(runner: Runner, board: Board) -> None:
    runner.close()
    board.close()


def _flat(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The tensor as one contiguous dimension, and what brings the result back if that is a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1), _nothing
    copy = tensor.contiguous()

    def back() -> None:
        tensor.copy_(copy)

    return copy.view(-1), back


def _described(engine: Engine, shape: tuple[int, ...], steps: Steps, last: Callable[[], None]) -> Steps:
    """`steps`, with the shape noted for messages when it is their turn, and then `last`."""
    engine.shape, engine.label = shape, ""
    yield from steps
    last()


def _named(group: dist.ProcessGroup, name: str, older_name: str) -> Callable[..., dist.Work]:
    """torch 2.13 renamed a few methods; older versions know the other name only."""
    found: Callable[..., dist.Work] = getattr(group, name, None) or getattr(group, older_name)
    return found


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _same_size(parts: Sequence[Tensor], whole: Tensor, op: str) -> None:
    for rank, part in enumerate(parts):
        if part.numel() != whole.numel() or part.dtype != whole.dtype:
            raise ValueError(f"{op}: tensor {rank} of the list is {_text(part)} and the other side {_text(whole)}")


def _split_bytes(tensor: Tensor, splits: list[int], world_size: int) -> list[int]:
    """Bytes for each rank; `splits` counts rows of the first dimension."""
    if not splits:
        if tensor.dim() and tensor.shape[0] % world_size:
            raise ValueError(f"all_to_all: {tensor.shape[0]} rows cannot be divided among {world_size} ranks")
        return [tensor.numel() * tensor.itemsize // world_size] * world_size
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(splits) != world_size or sum(splits) != rows:
        raise ValueError(f"all_to_all: splits {splits} for {world_size} ranks and {rows} rows")
    row_bytes = tensor.numel() * tensor.itemsize // rows if rows else 0
    return [each * row_bytes for each in splits]
