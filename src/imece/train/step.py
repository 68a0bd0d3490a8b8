"""One optimizer update on the global batch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from imece.collectives import ops
from imece.collectives.texts import gather_texts
from imece.data.batches import Batches, rows
from imece.data_parallel.replicate import DistributedDataParallel
from imece.membership.draws import begin_draws
from imece.models.transformer import Transformer, token_loss
from imece.train.batch import BatchPlan
from imece.train.clock import Clock
from imece.train.precision import Precision


@dataclass(frozen=True)
class Outcome:
    """What one step brought; of all ranks together unless it says otherwise."""

    nats: float  # summed over this rank's tokens
    tokens: int  # of this rank
    grad_norm: float  # before clipping
    skipped: str = ""  # why the update was not made


class Step:
    """The phases of an update, in order:

    data      this rank's rows of the global batch
    forward, backward   for each micro-batch; the last backward sums the gradients over the ranks
    exposed   the part of that sum which backward did not hide
    optimizer the gradient's norm; if it is finite, clipping and the update

    The gradient is that of the mean over all tokens of the global batch. Since it is bit-equal on all ranks
    after the sum, they all see the same norm, and skip or make the update without asking each other.

    What a model draws at random in a micro-batch depends on the seed, the step and where in the global batch
    the micro-batch begins: not on what was drawn before, nor on the number of ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Batches,
        plan: BatchPlan,
        precision: Precision,
        clip: float,
        clock: Clock,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._batches, self._plan = batches, plan
        self._precision, self._scaler = precision, precision.scaler()
        self._clip, self._clock = clip, clock
        self._rank = torch.distributed.get_rank(model.process_group)
        model.record_trace()

    def run(self, index: int, lr: float) -> Outcome:
        """Update number `index`, from 0, at this learning rate."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = lr
        micro_batches = self._read(index)
        # The sum stays on the device: reading it after each micro-batch would make a GPU wait.
        nats = torch.zeros((), dtype=torch.float64, device=self._model.device)
        for number, (inputs, targets) in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            begin_draws(self._batches.seed, index, self._first(number), self._model.device)
            with contextlib.nullcontext() if last else self._model.no_sync():
                with self._clock.phase("forward"), self._precision.autocast():
                    loss = token_loss(self._model(inputs), targets)
                with self._clock.phase("backward"):
                    weighed = self._model.weigh(loss, targets.numel())
                    (self._scaler.scale(weighed) if self._scaler else weighed).backward()
            nats += loss.detach().double() * targets.numel()
        trace = self._model.last_trace
        if trace is not None:
            self._clock.exposed(trace.exposed_s, self._model.backward_computed)
        with self._clock.phase("optimizer"):
            norm, skipped = self._update()
        tokens = sum(targets.numel() for _, targets in micro_batches)
        return Outcome(float(nats), tokens, norm, skipped)

    def blame(self, index: int) -> list[str]:
        """Who brought what is not finite into step `index`: a line for each rank, with its documents.

        All ranks call it after a step that was skipped. The step is computed once more, rank by rank: only
        then is a sum known to have been finite on one side. Costs nothing as long as all is well.
        """
        found: list[str] = []
        for number, (inputs, targets) in enumerate(self._read(index)):
            begin_draws(self._batches.seed, index, self._first(number), self._model.device)
            with self._precision.autocast():
                loss = token_loss(self._model.module(inputs), targets)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            bad, nats = self._not_finite(gradients), float(loss.detach())
            if bad or not math.isfinite(nats):
                begin = self._first(number)
                documents = self._batches.names(index, begin, begin + len(inputs))
                found.append(json.dumps([nats, bad, documents]))
        device = self._model.device
        texts = gather_texts(found, self._model.process_group, device, "who brought what is not finite")
        return [self._describe(rank, text) for rank, said in enumerate(texts) for text in said]

    def _first(self, number: int) -> int:
        """Where this rank's micro-batch `number` begins among the sequences of the global batch."""
        first, _ = rows(self._plan.sequences, self._rank, self._plan.ranks)
        return first + number * self._plan.micro

    def _read(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches: inputs and targets, each int64 [micro, seq]."""
        with self._clock.phase("data"):
            inputs, targets = self._batches.for_rank(index, self._rank, self._plan.ranks)
            device = self._model.device
            both = [torch.from_numpy(part).to(device).split(self._plan.micro) for part in (inputs, targets)]
            return list(zip(*both, strict=True))

    def _update(self) -> tuple[float, str]:
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
            self._agree_on_overflow()
        length = float(self._model.gradient_norm())
        finite = math.isfinite(length)
        if finite and 0 < self._clip < length:
            self._model.scale_gradients(self._clip / length)
        if finite:  # of all gradients: the scaler alone would make the update of each optimizer that can
            for optimizer in self._optimizers:
                scaled = self._scaler is not None and self._scaler._found_inf_per_device(optimizer)
                self._scaler.step(optimizer) if self._scaler is not None and scaled else optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
            return length, "" if finite else f"fp16 overflow; the scale is now {self._scaler.get_scale():g}"
        return length, "" if finite else "the gradient is not finite"

    def _agree_on_overflow(self) -> None:
        """Ranks of a sharded model have different parts of the gradient: one that saw Inf says it for all."""
        assert self._scaler is not None
        for optimizer in self._optimizers:
            found = list(self._scaler._found_inf_per_device(optimizer).values())
            # A rank without a part of this optimizer's gradients has looked at nothing, and takes part.
            flag = found[0] if found else torch.zeros(1)
            agreed = flag.to(self._model.device)  # of offloaded gradients it is on the CPU
            ops.all_reduce(agreed, "max", group=self._model.process_group, label="fp16 overflow")
            flag.copy_(agreed)

    def _not_finite(self, gradients: tuple[Tensor | None, ...]) -> list[str]:
        names = [name for name, each in self._model.module.named_parameters() if each.requires_grad]
        pairs = zip(names, gradients, strict=True)
        return [name for name, each in pairs if each is not None and not bool(each.isfinite().all())]

    def _describe(self, rank: int, text: str) -> str:
        loss, bad, documents = json.loads(text)
        where = f"gradient of {bad[0]}" if bad else "finite gradients"
        where += f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"rank {rank}: loss {loss:g}, {where}; documents {_listed(documents)}"

    def take_over(self, plan: BatchPlan) -> None:
        """The model is on other ranks now, and this is how they share the global batch."""
        self._plan = plan
        self._rank = torch.distributed.get_rank(self._model.process_group)
        self._parameters = [each for each in self._model.parameters() if each.requires_grad]

    @property
    def scale(self) -> float:
        """By which fp16's loss is multiplied; 0 in the other precisions, which need none."""
        return self._scaler.get_scale() if self._scaler is not None else 0.0

    @property
    def scaler_state(self) -> dict[str, float]:
        """Of fp16's scaler, for the checkpoint."""
        return self._scaler.state_dict() if self._scaler is not None else {}

    def load_scaler(self, state: dict[str, float]) -> None:
        """The reverse of `scaler_state`."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def unwrapped(model: DistributedDataParallel) -> Transformer:
    """The model inside."""
    module = model.module
    assert isinstance(module, Transformer)
    return module


def _listed(numbers: list[int], most: int = 8) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
