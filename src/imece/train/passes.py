"""How a rank's micro-batches become gradients: one after the other, or through the stages of a pipeline.

passes    the forwards and backwards of a step, and the sum of their gradients over the ranks
draws     called with the place of a micro-batch before it is computed, which determines its random draws
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from imece.data.batches import IGNORE
from imece.data_parallel.grad_scaler import GradScaler
from imece.data_parallel.replicate import DistributedDataParallel
from imece.model_parallel.context import ContextParallel
from imece.model_parallel.pipeline import Pipeline
from imece.models.cross_entropy import cross_entropy
from imece.train.batch import BatchPlan
from imece.train.evaluate import mean_nats, summed
from imece.train.model.precision import Precision
from imece.train.watch.clock import Clock

Draws = Callable[[int], None]


class MicroBatch(NamedTuple):
    """Sequences that go through the model together."""

    inputs: Tensor  # int64 [micro, seq / context]
    targets: Tensor  # int64 [micro, seq / context]
    tokens: int  # targets that count; with context some ranks may have none
    place: int  # of the first sequence in the global batch
    begins: Tensor | None  # int64 [micro, seq]: where each input's document does; None: attention crosses


class Brought(NamedTuple):
    """What one micro-batch yields: its loss, and this rank's parameters whose gradients are not finite."""

    loss: float | None  # nats per token; None: another stage knows it
    names: list[str]


class Passes(Protocol):
    """What all ranks do with their micro-batches together; each has equally many."""

    def gradients(
        self, micro_batches: Sequence[MicroBatch], draws: Draws, plan: BatchPlan, learned: int
    ) -> Tensor:
        """Add the gradient of the mean over all targets that count, of all ranks, to what each rank holds.
        Returns the nats of this rank's targets that count, an fp64 scalar. learned: the targets of the global
        batch that count."""

    def nats(self, inputs: Tensor, targets: Tensor, begins: Tensor | None) -> Tensor:
        """Nats of the targets that count, an fp64 scalar, without gradients. inputs: int64 [B, seq]; begins:
        as of a MicroBatch."""

    def not_finite(self, micro_batches: Sequence[MicroBatch], draws: Draws) -> list[Brought | None]:
        """For each micro-batch what it yields alone, or None if that is finite. Nothing is summed, and only
        ranks that make forwards together wait for each other."""


def trained(model: DistributedDataParallel) -> dict[str, Tensor]:
    """This rank's trained parameters, by name."""
    return {name: each for name, each in model.module.named_parameters() if each.requires_grad}


class InTurn:
    """One micro-batch after the other. Each backward sums the gradients over the ranks, or the last one all
    of them."""

    def __init__(
        self,
        model: DistributedDataParallel,
        precision: Precision,
        scaler: GradScaler | None,
        clock: Clock,
        context: ContextParallel,
        seq: int,
    ) -> None:
        """model: averages over tokens. seq: positions of a whole sequence."""
        self._model, self._precision, self._scaler, self._clock = model, precision, scaler, clock
        self._context = context
        self._positions = context.positions(seq, device=model.device) if context.ranks > 1 else None

    def gradients(
        self, micro_batches: Sequence[MicroBatch], draws: Draws, plan: BatchPlan, learned: int
    ) -> Tensor:
        # The sum stays on the device: reading it after each micro-batch would make the host wait for a GPU.
        nats = torch.zeros((), dtype=torch.float64, device=self._model.device)
        for number, each in enumerate(micro_batches):
            stays = plan.whole and number < len(micro_batches) - 1
            draws(each.place)
            with self._model.no_sync() if stays else contextlib.nullcontext(), self._context:
                with self._clock.phase("forward"), self._precision.autocast():
                    logits = self._model(each.inputs, positions=self._positions, begins=each.begins)
                    loss = mean_nats(logits, each.targets)
                with self._clock.phase("backward"):
                    balance = getattr(self._model.module, "balance", None)  # of a mixture's experts
                    both = loss if balance is None else loss + balance
                    weighed = self._model.weigh(both, each.tokens, learned)
                    (self._scaler.scale(weighed) if self._scaler else weighed).backward()
            if each.tokens:
                nats += loss.detach().double() * each.tokens
            if not stays and (trace := self._model.last_trace) is not None:
                self._clock.exposed(trace.exposed_s, self._model.backward_computed)
        return nats

    def nats(self, inputs: Tensor, targets: Tensor, begins: Tensor | None) -> Tensor:
        return summed(self._model.module, self._precision, inputs, targets, begins)

    def not_finite(self, micro_batches: Sequence[MicroBatch], draws: Draws) -> list[Brought | None]:
        return [self._brought(each, draws) for each in micro_batches]

    def _brought(self, each: MicroBatch, draws: Draws) -> Brought | None:
        named = trained(self._model)
        draws(each.place)
        with self._context:
            with self._precision.autocast():
                logits = self._model.module(each.inputs, positions=self._positions, begins=each.begins)
                loss = mean_nats(logits, each.targets)
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        names = not_finite(dict(zip(named, gradients, strict=True)))
        nats = float(loss.detach())
        return Brought(nats, names) if names or not math.isfinite(nats) else None


class StageLoss:
    """The last stage's loss: nats per token of all targets, whether they count or not, times a weight."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self.scaler = scaler
        self.weight = 1.0  # in training: all targets of the global batch by those that count
        self.heard: list[float] | None = None  # by micro-batch, while somebody listens

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(logits, targets, IGNORE, "sum") / targets.numel()
        if self.heard is not None:
            self.heard.append(float(loss.detach()))
        if torch.is_grad_enabled():
            loss = loss * self.weight
            return self.scaler.scale(loss) if self.scaler is not None else loss
        return loss


class InPipeline:
    """All micro-batches go through the stages of a pipeline, in its schedule's order. Nothing random is drawn
    there."""

    def __init__(
        self,
        pipeline: Pipeline,
        loss: StageLoss,
        model: DistributedDataParallel,
        precision: Precision,
        clock: Clock,
    ) -> None:
        """loss: the pipeline's. model: its part, wrapped; averages over ranks."""
        self._pipeline, self._loss, self._model = pipeline, loss, model
        self._precision, self._clock = precision, clock

    def gradients(
        self, micro_batches: Sequence[MicroBatch], draws: Draws, plan: BatchPlan, learned: int
    ) -> Tensor:
        weight = plan.tokens / max(1, learned)
        scaler, scale = self._loss.scaler, 1.0
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self._model.device))  # all stages unscale, one has the loss
            scale = scaler.get_scale()
        with self._clock.phase("exposed"), self._precision.autocast():
            inputs, targets, begins = _joined(micro_batches)
            self._loss.weight = weight
            loss = self._pipeline.step(inputs, targets, begins=begins)
        self._clock.busy(self._pipeline.marks)
        return loss / scale / weight * targets.numel()

    def nats(self, inputs: Tensor, targets: Tensor, begins: Tensor | None) -> Tensor:
        count = self._pipeline.micro_batches
        lacking = -len(inputs) % count
        if lacking:
            inputs = _with_more(inputs, lacking)
            targets = torch.cat([targets, torch.full_like(targets[:1], IGNORE).expand(lacking, -1)])
            begins = _with_more(begins, lacking) if begins is not None else None
        with self._precision.autocast():
            return self._pipeline.evaluate(inputs, targets, begins=begins) * targets.numel()

    def not_finite(self, micro_batches: Sequence[MicroBatch], draws: Draws) -> list[Brought | None]:
        """Each stage sees the gradients of one micro-batch after the other, in order."""
        found: list[set[str]] = [set() for _ in micro_batches]
        losses: list[float] = []
        self._loss.heard = losses
        try:
            with self._listening(found), self._model.no_sync(), self._precision.autocast():
                inputs, targets, begins = _joined(micro_batches)
                self._pipeline.step(inputs, targets, begins=begins)
        finally:
            self._loss.heard = None
        names = [[name for name in trained(self._model) if name in each] for each in found]
        if losses:
            return [Brought(loss, each) for loss, each in zip(losses, names, strict=True)]
        return [Brought(None, each) if each else None for each in names]

    @contextlib.contextmanager
    def _listening(self, found: list[set[str]]) -> Iterator[None]:
        """found: for each micro-batch, receives the parameters whose gradients are not finite."""
        hooks: list[RemovableHandle] = []
        for name, parameter in trained(self._model).items():
            coming = iter(found)

            def listen(gradient: Tensor, name: str = name, coming: Iterator[set[str]] = coming) -> None:
                here = next(coming)
                if not bool(gradient.isfinite().all()):
                    here.add(name)

            hooks.append(parameter.register_hook(listen))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def not_finite(tensors: dict[str, Tensor | None]) -> list[str]:
    """The names of tensors that are not finite."""
    return [name for name, each in tensors.items() if each is not None and not bool(each.isfinite().all())]


def _joined(micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and begins of all of them."""
    inputs, targets = ([getattr(each, name) for each in micro_batches] for name in ("inputs", "targets"))
    begins = [each.begins for each in micro_batches if each.begins is not None]
    return torch.cat(inputs), torch.cat(targets), torch.cat(begins) if begins else None


def _with_more(tensor: Tensor, count: int) -> Tensor:
    """The rows of a tensor, and so many more of its first."""
    return torch.cat([tensor, tensor[:1].expand(count, -1)])
