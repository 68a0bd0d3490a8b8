"""One optimizer update on the global batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from imece.collectives.texts import gather_json
from imece.data.batches import Batches, rows
from imece.data_parallel.grad_scaler import forget_stage
from imece.data_parallel.replicate import DistributedDataParallel
from imece.membership.draws import begin_draws
from imece.mesh import Mesh
from imece.model_parallel.context import ContextParallel
from imece.models.cross_entropy import cross_entropy
from imece.train.batch import BatchPlan
from imece.train.clock import Clock
from imece.train.precision import Precision

_Found = tuple[float, list[str], list[int]] | None  # what is not finite: loss, parameters, documents


@dataclass(frozen=True)
class Outcome:
    """What one step brought; of all ranks together unless it says otherwise."""

    nats: float  # summed over this rank's tokens
    tokens: int  # of this rank
    grad_norm: float  # before clipping
    skipped: str = ""  # why the update was not made
    computed: int = 0  # tokens of this rank, with those that do not count


class _MicroBatch(NamedTuple):
    inputs: Tensor  # int64 [micro, seq / context]
    targets: Tensor  # the same
    tokens: int  # that count: all or none


class Step:
    """The phases of an update, in order:

    data      this rank's rows of the global batch, of each its part if ranks divide them
    forward, backward   for each micro-batch; the last backward sums the gradients over the ranks
    exposed   the part of that sum which backward did not hide
    optimizer the gradient's norm; if it is finite, clipping and the update

    All ranks make as many forwards and backwards, since with gathered parameters each is a collective: a rank
    with fewer micro-batches than another one ends with some of weight 0.

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
        context: ContextParallel,
        mesh: Mesh,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._context, self._mesh = context, mesh
        # Ranks, neighbours, that make each forward together.
        self._together = mesh.size("context") * mesh.size("tensor")
        self._forward_group = mesh.group("context", "tensor") if self._together > 1 else None
        divided = context.ranks > 1
        self._positions = context.positions(plan.seq, device=model.device) if divided else None
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._batches, self._plan = batches, plan
        self._precision, self._scaler = precision, precision.scaler()
        self._clip, self._clock = clip, clock
        self._rank = self._place()
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
        for number, (inputs, targets, tokens) in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            begin_draws(self._batches.seed, index, self._first(number), self._model.device)
            with contextlib.nullcontext() if last else self._model.no_sync(), self._context:
                with self._clock.phase("forward"), self._precision.autocast():
                    loss = cross_entropy(self._model(inputs, positions=self._positions), targets)
                with self._clock.phase("backward"):
                    weighed = self._model.weigh(loss, tokens)
                    (self._scaler.scale(weighed) if self._scaler else weighed).backward()
            if tokens:
                nats += loss.detach().double() * tokens
        trace = self._model.last_trace
        if trace is not None:
            self._clock.exposed(trace.exposed_s, self._model.backward_computed)
        with self._clock.phase("optimizer"):
            norm, skipped = self._update()
        counted = sum(each.tokens for each in micro_batches)
        computed = sum(each.targets.numel() for each in micro_batches)
        return Outcome(float(nats), counted, norm, skipped, computed)

    def blame(self, index: int) -> list[str]:
        """Who brought what is not finite into step `index`: a line for each rank, with its documents.
        Where the weights are not finite, or nothing that is computed with them is, no document is to
        blame, and they are named.

        All ranks call it after a step that was skipped. The step is computed once more, rank by rank: only
        then is a sum known to have been finite on one side. Costs nothing as long as all is well.
        """
        model = self._model
        # autograd.grad asks for the gradients of whole parameters, which may be gone after a unit's forward.
        with model.gathered():
            spoilt = self._not_finite([each.detach() for each in self._parameters])
            alone = bool(spoilt)
            if self._forward_group is not None:  # none may wait for one that makes no forward
                of_each = gather_json(spoilt, self._forward_group, model.device, "weights that are spoilt")
                alone = any(of_each)
            found = [] if alone else list(self._not_finite_in(index))
            largest = max((float(each.detach().abs().max()), name) for name, each in self._named())
        mine = [spoilt, found, largest]
        every = gather_json(mine, self._mesh.world_group, model.device, "who brought what is not finite")
        if all(spoilt for spoilt, *_ in every):
            return [f"weights that are not finite since an earlier update: {_names(every[0][0])}"]
        by_group = self._by_group([found for _, found, _ in every])
        everywhere = [each for found in by_group for each in found]
        if len(everywhere) > 1 and all(everywhere) and not any(spoilt for spoilt, *_ in every):
            size, name = every[0][2]
            return [
                f"all {len(everywhere)} micro-batches, so by no document but the weights, as earlier updates "
                f"left them: up to {size:.3g}, in {name}"
            ]
        lines, size = [], self._together
        for rank, (spoilt, _, _) in enumerate(every):
            if spoilt:
                lines.append(f"rank {rank}: weights that are not finite: {_names(spoilt)}")
            group, first = divmod(rank, size)
            those = range(rank, rank + size)
            lines += [self._describe(those, *each) for each in by_group[group] if each and not first]
        return lines

    def _by_group(self, by_rank: list[list[_Found]]) -> list[list[_Found]]:
        """Ranks that make a forward together have the same micro-batches: what one of them found of each."""
        size = self._together
        groups = (by_rank[first : first + size] for first in range(0, len(by_rank), size))
        return [[next(filter(None, each), None) for each in zip(*group, strict=True)] for group in groups]

    def _not_finite_in(self, index: int) -> Iterator[_Found]:
        """Of each micro-batch of this rank: its loss, the parameters, the documents; None if it is finite."""
        for number, (inputs, targets, tokens) in enumerate(self._read(index)):
            if not tokens:
                continue
            begin_draws(self._batches.seed, index, self._first(number), self._model.device)
            with self._context:
                with self._precision.autocast():
                    loss = cross_entropy(self._model.module(inputs, positions=self._positions), targets)
                gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            bad, nats = self._not_finite(gradients), float(loss.detach())
            begin = self._first(number)
            documents = self._batches.names(index, begin, begin + len(inputs))
            yield (nats, bad, documents) if bad or not math.isfinite(nats) else None

    def _first(self, number: int) -> int:
        """Where this rank's micro-batch `number` begins among the sequences of the global batch."""
        first, _ = rows(self._plan.sequences, self._rank, self._plan.ranks)
        return first + number * self._plan.micro

    def _read(self, index: int) -> list[_MicroBatch]:
        """This rank's micro-batches, as many as every other rank has."""
        with self._clock.phase("data"):
            both = self._batches.for_rank(index, self._rank, self._plan.ranks)
            whole = (torch.from_numpy(each).to(self._model.device) for each in both)
            inputs, targets = (self._context.part(each) for each in whole)
            parts = zip(inputs.split(self._plan.micro), targets.split(self._plan.micro), strict=True)
            found = [_MicroBatch(*part, part[1].numel()) for part in parts]
            # A sequence of its own: it brings nothing that is not finite unless it has done so already.
            ignored = _MicroBatch(inputs[:1], targets[:1], 0)
            return found + [ignored] * (self._plan.accumulation - len(found))

    def _update(self) -> tuple[float, str]:
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        length = float(self._model.gradient_norm())
        finite = math.isfinite(length)
        if finite and 0 < self._clip < length:
            self._model.scale_gradients(self._clip / length)
        if finite:  # of all gradients: the scaler alone would make the update of each optimizer that can
            for optimizer in self._optimizers:
                self._scaler.step(optimizer) if self._scaler is not None else optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
            return length, "" if finite else f"fp16 overflow; the scale is now {self._scaler.get_scale():g}"
        return length, "" if finite else "the gradient is not finite"

    def _not_finite(self, tensors: Sequence[Tensor | None]) -> list[str]:
        """Of one tensor for each parameter, the names of those parameters."""
        pairs = zip(self._named(), tensors, strict=True)
        return [name for (name, _), each in pairs if each is not None and not bool(each.isfinite().all())]

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self._model.module.named_parameters() if each.requires_grad]

    def _describe(self, ranks: Sequence[int], loss: float, bad: list[str], documents: list[int]) -> str:
        where = f"gradient of {_names(bad)}" if bad else "finite gradients"
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{who}: loss {loss:g}, {where}; documents {_listed(documents)}"

    def take_over(self, plan: BatchPlan) -> None:
        """The model is on other ranks now, and this is how they share the global batch."""
        self._plan = plan
        self._rank = self._place()
        self._parameters = [each for each in self._model.parameters() if each.requires_grad]

    def _place(self) -> int:
        """Whose rows of the global batch are this rank's; neighbours that divide sequences have the same."""
        return torch.distributed.get_rank(self._model.process_group) // self._context.ranks

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
            forget_stage(self._scaler)


def _names(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _listed(numbers: list[int], most: int = 8) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
