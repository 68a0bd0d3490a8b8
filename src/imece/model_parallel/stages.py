"""torch's pipeline stages and schedules, extended by shapes known in advance, times, and checks.

Importing this takes a second, because torch's compiler comes along.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import _batch_p2p, _PipelineScheduleRuntime
from torch.func import functional_call

from imece.errors import UserError
from imece.model_parallel.cutting import Values
from imece.model_parallel.schedules import Loss, Mark, Moment, StageError
from imece.models.dealing import MOST_SENT

Sent = deque[list[dist.Work]]
"""The latest messages that a rank has sent, the oldest first."""


def values_of(output: Any) -> Values:
    """The outputs of a stage as a tuple. ValueError unless it is a tensor or several: nothing else can be
    sent."""
    values = tuple(output) if isinstance(output, tuple | list) else (output,)
    wrong = [type(each).__name__ for each in values if not isinstance(each, Tensor)]
    if wrong:
        raise ValueError(f"a stage returns a tensor or a tuple of tensors, and this one a {wrong[0]}")
    return values


def said(error: BaseException) -> str:
    """What it says; with its type where that alone says little, as KeyError's text is a key."""
    return str(error) if isinstance(error, ValueError | RuntimeError | UserError) else repr(error)


def shapes(stages: Mapping[str, nn.Module], inputs: Values, device: torch.device) -> list[Values]:
    """The inputs of each stage and the outputs of the last, as tensors without memory.

    Nothing is computed and no rank is asked; parameters may be on the meta device. stages: by what errors
    call them. inputs: a micro-batch.

    StageError, on all ranks, if a stage raises, returns something else, or has outputs whose shapes depend on
    the data.
    """
    found: list[Values] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        x = tuple(torch.empty_like(each, device=device) for each in inputs)
        for name, stage in stages.items():
            found.append(x)
            own = _without_memory(stage, device)
            x = tuple(each.detach().requires_grad_(each.requires_grad) for each in x)
            try:
                x = values_of(functional_call(stage, own, x, tie_weights=False))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise StageError(
                    f"{name} asks for values of a tensor, as .item() and `if` do, by {error.func}: what "
                    "stages send each other may depend on shapes alone"
                ) from error
            except UserError:  # its type says what to do
                raise
            except Exception as error:
                given = ", ".join(f"{each.dtype} {list(each.shape)}" for each in x)
                raise StageError(f"{name}, given {given}: {said(error)}") from error
        found.append(x)
    return [
        tuple(
            torch.empty(each.shape, dtype=each.dtype, device="meta", requires_grad=each.requires_grad)
            for each in values
        )
        for values in found
    ]


def _without_memory(stage: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Tensors like its parameters and buffers, tied where these are, by one name for each module's own: what
    has two names would be left with such a tensor, as torch puts back what it finds under each."""
    like: dict[int, Tensor] = {}
    found = {}
    for prefix, module in stage.named_modules():  # each once
        for name, each in itertools.chain(module._parameters.items(), module._buffers.items()):
            if each is not None:
                if id(each) not in like:
                    empty = torch.empty_like(each, device=device)
                    like[id(each)] = empty.requires_grad_(each.requires_grad)
                found[f"{prefix}.{name}" if prefix else name] = like[id(each)]
    return found


@dataclass(frozen=True)
class Run:
    """What the stages of one schedule have in common on this rank."""

    along: Sequence[Values]
    """The result of `shapes`."""
    device: torch.device
    group: dist.ProcessGroup
    marks: list[Mark]
    """Gets what each stage did when."""
    before_last: Callable[[int], None]
    """Called with a stage's number before its last backward of a step."""
    beside: Callable[[int], dict[str, Tensor]]
    """By a micro-batch's number, what this rank gives to each of its stages by name."""


class TimedStage(PipelineStage):
    """A stage of torch's that records when it was busy, and checks that its outputs have the agreed
    shapes.

    What it receives of a micro-batch has memory until its backward is over. torch's own stage keeps memory
    for all micro-batches of a step.
    """

    def __init__(self, stage: nn.Module, number: int, run: Run, sent: Sent | None) -> None:
        """number: of the stage. sent: of all stages of this rank; None: torch sends, and waits."""
        inputs, self._agreed = run.along[number], run.along[number + 1]
        stages = len(run.along) - 1
        super().__init__(stage, number, stages, run.device, inputs, self._agreed, group=run.group)
        self._run, self._sent = run, sent
        self._kinds: dict[Any, Tensor] | None = None  # of all that other ranks send: a tensor without memory
        self._nothing = torch.empty(0, device=run.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, into memory of their own."""
        self._lend(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, into memory of their own."""
        if self.has_backward and not self.is_last:
            self._lend(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, or none if they are started here."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, or none if they are started here."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        """Waiting for what was sent before cannot make two ranks wait for each other: in torch's order of
        actions each message is received before anything that depends on a later one."""
        if self._sent is None or not messages:
            return messages
        self._sent.append(_batch_p2p(messages))
        _wait(self._sent, MOST_SENT)
        return []

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self._free_unused()
        with self._busy("forward", fwd_chunk_id):
            beside = {**(kwargs or {}), **self._run.beside(fwd_chunk_id)}
            output = super().forward_one_chunk(fwd_chunk_id, args, beside, save_forward_output)
        if not self.has_backward:  # nobody needs the inputs any more, nor outputs that are not sent
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = (() if self.is_last else outputs, [])
            self._take_back(self.args_recv_info[fwd_chunk_id])
        if not self.is_last:
            for value, agreed in zip(values_of(output), self._agreed, strict=True):
                if (value.shape, value.dtype) != (agreed.shape, agreed.dtype):
                    raise ValueError(
                        f"it returned {value.dtype} {list(value.shape)} for micro-batch {fwd_chunk_id}, "
                        f"where {agreed.dtype} {list(agreed.shape)} follows from its input: do its shapes "
                        "depend on the data?"
                    )
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward:
            self._run.before_last(self.stage_index)
        with self._busy("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if isinstance(loss, Tensor):  # torch keeps all losses of a step, and with a graph what came for it
            loss.detach_()
        self._take_back(self.args_recv_info[bwd_chunk_id])
        self._take_back(self.grad_recv_info.get(bwd_chunk_id, ()))

    def _free_unused(self) -> dict[Any, Tensor]:
        """Take back what torch has made for a whole step, once; returns the kinds."""
        if self._kinds is None:
            every = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
            self._kinds = {
                info: torch.empty_like(info.buffer, device="meta", requires_grad=info.buffer.requires_grad)
                for info in itertools.chain(*every)
                if getattr(info, "buffer", None) is not None and self._comes(info)
            }
            self._take_back(self._kinds)
        return self._kinds

    def _lend(self, infos: Iterable[Any]) -> None:
        """infos: torch's, one for each tensor that is received of a micro-batch."""
        kinds = self._free_unused()
        for info in infos:
            if (kind := kinds.get(info)) is not None:
                info.buffer = torch.empty_like(kind, device=self.device, requires_grad=kind.requires_grad)

    def _take_back(self, infos: Iterable[Any]) -> None:
        kinds = self._free_unused()
        for info in infos:
            if info in kinds:
                info.buffer = self._nothing

    def _comes(self, info: Any) -> bool:
        """Whether it comes from another rank, and is not handed over on this one."""
        return self.stage_index_to_group_rank[info.source] != self.group_rank

    @contextlib.contextmanager
    def _busy(self, what: str, micro_batch: int) -> Iterator[None]:
        start = Moment(self.device)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised anew
            cause = error.__cause__ or error  # torch's error says only which stage
            raise StageError(
                f"{what} of micro-batch {micro_batch} in stage {self.stage_index}: {said(cause)}"
            ) from cause
        self._run.marks.append(Mark(what, self.stage_index, micro_batch, start, Moment(self.device)))


class _Interleaved(ScheduleInterleaved1F1B):
    """torch's own keeps all that is sent until the end of a step: outputs and gradients of each micro-batch
    and chunk. Here stages keep the latest."""

    sent: Sent

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._step_microbatches(*args, **kwargs)
        _wait(self.sent, 0)
        return result


def _wait(sent: Sent, left: int) -> None:
    """For the oldest, until so many are left."""
    while len(sent) > left:
        for work in sent.popleft():
            work.wait()


def schedule_of(name: str, stages: Mapping[int, nn.Module], run: Run, micro_batches: int, loss: Loss) -> Any:
    """torch's schedule for this rank's stages, which are by number."""
    # Other schedules of torch's wait for what they send, some in one batch with what they receive.
    keeps = name == "interleaved" and issubclass(ScheduleInterleaved1F1B, _PipelineScheduleRuntime)
    sent: Sent | None = deque() if keeps else None
    made = [TimedStage(stage, number, run, sent) for number, stage in stages.items()]
    if name == "interleaved":
        interleaved = _Interleaved(made, micro_batches, loss, scale_grads=False)  # type: ignore[arg-type]
        interleaved.sent = sent if sent is not None else deque()
        return interleaved
    kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    return kind(made[0], micro_batches, loss, scale_grads=False)
