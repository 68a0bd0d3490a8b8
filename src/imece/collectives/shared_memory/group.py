"""The torch.distributed backend "shm": what torch calls, in terms of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imece.collectives.fingerprint import pack
from imece.collectives.shared_memory import exchanging
from imece.collectives.shared_memory.direct import DirectCalls
from imece.collectives.shared_memory.exchanging import Read
from imece.collectives.shared_memory.messages import Wanted
from imece.collectives.shared_memory.tensors import (
    as_bytes,
    check_rank,
    check_tag,
    check_written,
    flat_and_back,
    named,
    nothing,
    plain,
    same_size,
    split_bytes,
    text,
)
from imece.collectives.shared_memory.waiting import Operation
from imece.collectives.shared_memory.work import ShmWork
from imece.errors import UserError

Tensor = torch.Tensor

_OP_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def _op_name(opts: Any) -> str:
    """imece's name of torch's reduction. ValueError for one that the backend does not know."""
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    op = getattr(op, "op", op)
    name = _OP_NAMES.get(op)
    if name is None:
        raise ValueError(f"the shm backend does not know the reduction {op}")
    return name


def _addend(tensor: Tensor, opts: Any) -> tuple[Tensor, Callable[[], None]]:
    """As `flat_and_back`, of an addend. For PREMUL_SUM that is a copy, times this rank's own factor."""
    flat, back = flat_and_back(tensor)
    if _op_name(opts) != "premul_sum":
        return flat, back
    _, factor = opts.reduceOp.__getstate__()  # torch before 2.13 has no other way to it
    product = flat * float(factor)

    def multiplied_back() -> None:
        flat.copy_(product)
        back()

    return product, multiplied_back


def on_device(group: dist.ProcessGroup, tensor: Tensor) -> dist.ProcessGroup:
    """The group that really moves this tensor: another one for a GPU's tensor in a
    "cpu:shm,cuda:nccl" group."""
    other = group._others.on(tensor.device, group) if type(group) is SharedMemoryGroup else None
    return other if other is not None else group


def _refuse_batch() -> None:
    """UserError for a message that torch's batch_isend_irecv starts outside of any batch.

    Before torch 2.14 batch_isend_irecv makes a batch only in groups of torch's own class. Here it makes one
    call after the other, and NCCL runs them one after the other: two ranks that send to each other would wait
    forever.
    """
    frame = sys._getframe(2)  # torch's isend or irecv
    if frame.f_back is not None and frame.f_back.f_code is dist.batch_isend_irecv.__code__:
        raise UserError(
            "torch.distributed.batch_isend_irecv makes no batch of a GPU's tensors in a group that has shm "
            "beside NCCL: use imece.exchange, or a group of torch.distributed.new_group(backend='nccl')"
        )


class SharedMemoryGroup(DirectCalls):
    """A group of CPU ranks of one host. Made by torch.distributed for backend "shm"."""

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_reduce of one tensor, in place."""
        if other := self._others.on(tensors[0].device, self):
            return other.allreduce(tensors, opts or dist.AllreduceOptions())
        (tensor,) = tensors
        flat, back = _addend(tensor, opts)
        fingerprint, steps = self._steps("all_reduce", tensor, flat, flat, _op_name(opts))
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_reduce of several tensors."""
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's reduce: in place on the root, the others' tensors stay as they are."""
        if other := self._others.on(tensors[0].device, self):
            return other.reduce(tensors, opts)
        check_rank("reduce to", opts.rootRank, self)
        (tensor,) = tensors
        flat, back = _addend(tensor, opts)
        back = back if opts.rootRank == self.rank() else nothing
        fingerprint, steps = self._steps("reduce", tensor, flat, flat, _op_name(opts), opts.rootRank)
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch's reduce_scatter_tensor: input [N * n] -> output [n]."""
        if other := self._others.on(output.device, self):
            return named(other, "reduce_scatter_single", "_reduce_scatter_base")(output, input, opts)
        if input.numel() != output.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter on {self.size()} ranks needs an input of {self.size()} x the output: "
                f"{text(input)} against {text(output)}"
            )
        flat, back = flat_and_back(output)
        source, _ = _addend(plain(input), opts)
        fingerprint, steps = self._steps("reduce_scatter", input, source, flat, _op_name(opts))
        return self._collective(fingerprint, steps, input, opts, [output], back)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """torch's reduce_scatter of a list of tensors, one a rank."""
        if other := self._others.on(outputs[0].device, self):
            return other.reduce_scatter(outputs, inputs, opts)
        ((output,), (parts,)) = outputs, inputs
        if any(part.numel() != output.numel() for part in parts):
            return self._reduce_each(output, parts, opts)
        return self.reduce_scatter_single(output, torch.cat([part.reshape(-1) for part in parts]), opts)

    def _reduce_each(self, output: Tensor, parts: list[Tensor], opts: Any) -> dist.Work:
        """Parts of different lengths: one reduce to each rank."""
        check_written(output)
        works = []
        for root, part in enumerate(parts):
            one = dist.ReduceOptions()
            one.reduceOp, one.rootRank, one.asyncOp = opts.reduceOp, root, opts.asyncOp
            if root == self.rank():
                output.detach().copy_(part.detach().reshape(output.shape))
                part = output
            works.append(self.reduce([part], one))
        return self._all_of(works, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """torch's reduce_scatter_tensor of several tensors."""
        works = [self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)]
        return self._all_of(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Exchanges.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's broadcast from opts.rootRank, in place."""
        if other := self._others.on(tensors[0].device, self):
            return other.broadcast(tensors, opts)
        check_rank("broadcast from", opts.rootRank, self)
        (tensor,) = tensors
        flat, back = flat_and_back(tensor)
        fingerprint, steps = self._steps("broadcast", tensor, flat, flat, root=opts.rootRank)
        return self._collective(fingerprint, steps, tensor, opts, [tensor], back)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch's all_gather_into_tensor: input [n] -> output [N * n]."""
        if other := self._others.on(output.device, self):
            return named(other, "all_gather_single", "_allgather_base")(output, input, opts)
        if output.numel() != input.numel() * self.size() or input.dtype != output.dtype:
            raise ValueError(
                f"all_gather on {self.size()} ranks needs an output of {self.size()} x the input: "
                f"{text(output)} against {text(input)}"
            )
        flat, back = flat_and_back(output)
        source = plain(input).view(-1)
        fingerprint, steps = self._steps("all_gather", input, source, flat)
        return self._collective(fingerprint, steps, input, opts, [output], back)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_gather into a list of tensors, one a rank."""
        if other := self._others.on(inputs[0].device, self):
            return other.allgather(outputs, inputs, opts)
        ((targets,), (input,)) = outputs, inputs
        if any(target.numel() != targets[0].numel() for target in targets):
            return self._gather_each(targets, input, opts)
        return self._gather_list(targets, input, "all_gather_list", -1, opts, [targets])

    def _gather_each(self, targets: list[Tensor], input: Tensor, opts: Any) -> dist.Work:
        """Tensors of different lengths, which NCCL gathers too: one broadcast from each rank."""
        mine = targets[self.rank()]
        same_size([mine], input, "all_gather")
        for target in targets:
            check_written(target)
        mine.detach().copy_(input.detach().reshape(mine.shape))
        works = []
        for root, target in enumerate(targets):
            one = dist.BroadcastOptions()
            one.rootRank, one.asyncOp = root, getattr(opts, "asyncOp", True)
            works.append(self.broadcast([target], one))
        return self._all_of(works, [targets])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """torch's all_gather of several tensors into lists."""
        works = [
            self.allgather([[each[at] for each in outputs]], [input], opts) for at, input in enumerate(inputs)
        ]
        return self._all_of(works, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """torch's all_gather_into_tensor of several tensors."""
        works = [self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)]
        return self._all_of(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's gather to opts.rootRank."""
        if other := self._others.on(inputs[0].device, self):
            return other.gather(outputs, inputs, opts)
        check_rank("gather to", opts.rootRank, self)
        (input,) = inputs
        targets = outputs[0] if opts.rootRank == self.rank() else []
        return self._gather_list(targets, input, "gather", opts.rootRank, opts, [targets])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """torch's scatter from opts.rootRank."""
        if other := self._others.on(outputs[0].device, self):
            return other.scatter(outputs, inputs, opts)
        check_rank("scatter from", opts.rootRank, self)
        (output,) = outputs
        root = opts.rootRank
        flat, back = flat_and_back(output)
        target = as_bytes(flat)
        offered = None
        if root == self.rank():
            same_size(inputs[0], output, "scatter")
            offered = as_bytes(torch.cat([part.detach().reshape(-1) for part in inputs[0]]))
        fingerprint = pack("scatter", "", output.dtype, output.numel(), root)
        reads = [Read(root, self.rank() * target.numel(), target)]
        steps = exchanging.exchange(
            self._engine, fingerprint, offered, reads, [root], target.numel() * self.size()
        )
        return self._collective(fingerprint, steps, output, opts, [output], back)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """torch's all_to_all_single; splits are in rows of the first dimension, [] for even ones."""
        if other := self._others.on(output.device, self):
            call = named(other, "all_to_all_single", "alltoall_base")
            return call(output, input, output_splits, input_splits, opts)
        flat, back = flat_and_back(output)
        source = plain(input)
        wanted = split_bytes(output, output_splits, self.size())
        given = split_bytes(source, input_splits, self.size())
        return self._all_to_all(
            as_bytes(flat), as_bytes(source.view(-1)), wanted, given, input.dtype, back, opts, [output]
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """torch's all_to_all of lists of tensors, one a rank."""
        if other := self._others.on(outputs[0].device, self):
            return other.alltoall(outputs, inputs, opts)
        for output in outputs:
            check_written(output)
        given = [part.numel() * part.itemsize for part in inputs]
        wanted = [part.numel() * part.itemsize for part in outputs]
        source = as_bytes(torch.cat([part.detach().reshape(-1) for part in inputs]))
        target = torch.empty(sum(wanted), dtype=torch.uint8, device="cpu")

        def back() -> None:
            for part, data in zip(outputs, target.split(wanted), strict=True):
                part.detach().copy_(data.view(part.dtype).view(part.shape))

        return self._all_to_all(target, source, wanted, given, inputs[0].dtype, back, opts, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """No rank goes on before all are here."""
        steps = self._barrier.steps(None, None)
        return self._collective(self._barrier.fingerprint, steps, None, opts, [])

    # Messages.

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        """Send one tensor to rank `target` of the group."""
        if other := self._others.on(tensors[0].device, self):
            if not self._batching:
                _refuse_batch()
            return other.send(tensors, target, tag)
        check_rank("send to", target, self)
        work = ShmWork(tensors, done=False)
        self._message(self._sending(target, tensors[0], tag), work.finish)
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive one tensor from rank `source` of the group."""
        if other := self._others.on(tensors[0].device, self):
            if not self._batching:
                _refuse_batch()
            return other.recv(tensors, source, tag)
        check_rank("recv from", source, self)
        return self._receive([source], tensors[0], tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Later calls of this thread with tensors of a GPU become one batch."""
        if other := self._others.on(device, self):
            self._batching = True
            return other._start_coalescing(device)
        return super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Start the batch."""
        if other := self._others.on(device, self):
            self._batching = False
            return other._end_coalescing(device)
        return super()._end_coalescing(device)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive one tensor from whichever rank sends first."""
        if other := self._others.on(tensors[0].device, self):
            return other.recv_anysource(tensors, tag)  # NCCL refuses it
        return self._receive([member for member in self._members if member != self.rank()], tensors[0], tag)

    def _receive(self, sources: list[int], tensor: Tensor, tag: int) -> dist.Work:
        operation, wanted = self._receiving(sources, tensor, tag)
        work = ShmWork([tensor], done=False)

        def finish(error: BaseException | None) -> None:
            work.source = wanted.source
            work.finish(error)

        self._message(operation, finish)
        return work

    def _sending(self, target: int, tensor: Tensor, tag: int) -> Operation:
        check_tag(tag)
        data = as_bytes(plain(tensor))
        fingerprint = pack("send", "", tensor.dtype, tensor.numel())
        shown = pack("send", "", tensor.dtype, tensor.numel(), target)
        steps = self._messages.send(target, data, fingerprint, tag)
        steps = self._noted(shown, tensor.dtype, tuple(tensor.shape), steps, nothing)
        return Operation(steps, fingerprint, lambda: f"tag {tag}", lambda: [target])

    def _receiving(self, sources: list[int], tensor: Tensor, tag: int) -> tuple[Operation, Wanted]:
        check_tag(tag)
        flat, back = flat_and_back(tensor)
        wanted = Wanted(tag, pack("send", "", tensor.dtype, tensor.numel()), as_bytes(flat))
        steps = self._messages.receive(sources, wanted)
        shown = pack("recv", "", tensor.dtype, tensor.numel(), sources[0] if len(sources) == 1 else -1)
        steps = self._noted(shown, tensor.dtype, tuple(tensor.shape), steps, back)
        return Operation(steps, shown, lambda: f"tag {tag}", lambda: self._messages.awaited(sources)), wanted

    def _gather_list(
        self, targets: list[Tensor], input: Tensor, op: str, root: int, opts: Any, result: Any
    ) -> dist.Work:
        same_size(targets, input, op.removesuffix("_list"))
        flats = [flat_and_back(target) for target in targets]

        def back() -> None:
            for _, one in flats:
                one()

        fingerprint = pack(op, "", input.dtype, input.numel(), root)
        data = as_bytes(plain(input))
        reads = [Read(rank, 0, as_bytes(flat)) for rank, (flat, _) in enumerate(flats)]
        steps = exchanging.exchange(self._engine, fingerprint, data, reads, self._members, data.numel())
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
