"""One optimizer update on the global batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from imece.collectives.texts import gather_json
from imece.data.batches import IGNORE, Batches, rows
from imece.data_parallel.grad_scaler import GradScaler, forget_stage
from imece.data_parallel.replicate import DistributedDataParallel
from imece.listing import rank_words, some
from imece.membership.draws import begin_draws
from imece.mesh import Mesh
from imece.model_parallel.context import ContextParallel
from imece.train.batch import BatchPlan
from imece.train.passes import MicroBatch, Passes, not_finite, trained
from imece.train.sending import sent
from imece.train.watch.clock import Clock

# What is not finite in a micro-batch: its loss, if known here; parameters; documents.
_Found = tuple[float | None, list[str], list[int]] | None


@dataclass(frozen=True)
class Outcome:
    """What one step yielded, over all ranks unless it says otherwise."""

    nats: float  # summed over this rank's targets that count
    tokens: int  # of this rank
    grad_norm: float  # before clipping
    skipped: str = ""  # why there was no update
    computed: int = 0  # tokens of this rank, including those of micro-batches that do not count
    learned: int = 0  # targets of this rank that count


class Step:
    """The phases of an update, in order:

        forward, backward   of the micro-batches (passes.py), and the sum of gradients over the ranks
        exposed             the part of that sum that backward did not hide, and what a stage waits for others
        optimizer           the gradient's norm
        data                of the next step: this rank's rows of the global batch, or its part of them
        optimizer           if the norm is finite, clipping and the update

    While the host reads data for the next step, a GPU is still busy with the first phases. Then the host
    waits, once: for the norm and the loss. Whatever follows the update, the host does while the GPU makes it.

    All ranks make equally many forwards and backwards, because with gathered parameters each is a collective.
    A rank with fewer micro-batches ends with some of weight 0.

    The gradient is that of the mean over all targets of the global batch that count. After the sum it has the
    same bits on all ranks, so they see the same norm, and skip or make the update without asking each other.

    Random draws of the model in a micro-batch depend on the seed, the step and the micro-batch's place in the
    global batch: not on earlier draws or the number of ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Batches,
        plan: BatchPlan,
        passes: Passes,
        scaler: GradScaler | None,
        clip: float,
        clock: Clock,
        context: ContextParallel,
        mesh: Mesh,
        separate: bool = False,
    ) -> None:
        """scaler: of fp16; the passes use the same one. separate: whether attention stays within a document;
        not with context."""
        self._model, self._optimizers = model, optimizers
        self._context, self._mesh = context, mesh
        together = ("pipeline", "context", "tensor")
        several = any(mesh.size(axis) > 1 for axis in together)
        self._together = mesh.group(*together) if several else None  # ranks that make each forward together
        self._batches, self._plan, self.passes = batches, plan, passes
        self._scaler, self._clip, self._clock, self._separate = scaler, clip, clock, separate
        self.meanwhile: Callable[[], None] = lambda: None
        """Called once everything before the update is queued on a GPU."""
        self.when_summed: Callable[[], None] = lambda: None
        """Called once the host has the norm, which depends on all sums that the updates use."""
        self._ahead: tuple[int, list[MicroBatch]] | None = None  # read ahead for a coming step
        model.record_trace()

    def run(self, index: int, lr: float) -> Outcome:
        """Make update number `index`, from 0, at this learning rate."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = lr
        ahead, self._ahead = self._ahead, None
        own = ahead[1] if ahead is not None and ahead[0] == index else self._read(index)
        # Repeats a sequence of its own: it adds nothing that is not finite unless it already did.
        begins = own[0].begins[:1] if own[0].begins is not None else None
        ignored = MicroBatch(own[0].inputs[:1], own[0].targets[:1], 0, own[0].place, begins)
        micro_batches = own + [ignored] * (self._plan.accumulation - len(own))
        learned = self._batches.learned(index)
        found = self.passes.gradients(micro_batches, self._draws(index), self._plan, learned)
        with self._clock.phase("optimizer"):
            both = torch.stack((self._norm().double(), found))
        self._ahead = index + 1, self._read(index + 1)
        self.meanwhile()
        with self._clock.phase("optimizer"):
            norm, nats = both.tolist()
            self.when_summed()
            skipped = self._update(norm)
        tokens, computed = (sum(each.targets.numel() for each in those) for those in (own, micro_batches))
        return Outcome(nats, tokens, norm, skipped, computed, sum(each.tokens for each in own))

    def blame(self, index: int) -> list[str]:
        """Find what is not finite in step `index`: a line for each rank, with its documents. If weights are
        not finite, or nothing computed from them is, the weights are named instead of documents.

        All ranks call this after a skipped step. The step is computed again, rank by rank: only then is it
        known which addend of a sum was not finite. Costs nothing as long as all is well.
        """
        model = self._model
        # autograd.grad asks for gradients of whole parameters, which a unit may have freed after its forward.
        with model.gathered():
            weights = {name: each.detach() for name, each in trained(model).items()}
            spoilt = not_finite({**weights})
            alone = bool(spoilt)
            if self._together is not None:  # nobody may wait for a rank that makes no forward
                of_each = gather_json(spoilt, self._together, model.device, "weights that are spoilt")
                alone = any(of_each)
            found = [] if alone else self._found_in(index)
            largest = max((float(each.abs().max()), name) for name, each in weights.items())
        mine = [self._mesh.batch_rank, spoilt, found, largest]
        every = gather_json(mine, self._mesh.world_group, model.device, "who brought what is not finite")
        if all(spoilt for _, spoilt, *_ in every):
            return [f"weights that are not finite since an earlier update: {some(every[0][1], 1)}"]
        by_group = _by_group(every)
        everywhere = [each for found in by_group.values() for each in found]
        if len(everywhere) > 1 and all(everywhere) and not any(spoilt for _, spoilt, *_ in every):
            size, name = max(largest for *_, largest in every)
            return [
                f"all {len(everywhere)} micro-batches, so by no document but the weights, as earlier updates "
                f"left them: up to {size:.3g}, in {name}"
            ]
        lines = []
        for rank, (group, spoilt, *_) in enumerate(every):
            if spoilt:
                lines.append(f"rank {rank}: weights that are not finite: {some(spoilt, 1)}")
            those = [other for other, (its, *_) in enumerate(every) if its == group]
            if rank == those[0]:
                lines += [_describe(those, *each) for each in by_group[group] if each]
        return lines

    def _found_in(self, index: int) -> list[_Found]:
        """For each micro-batch of this rank what is not finite; None if nothing is known to be."""
        micro_batches = self._read(index)
        found: list[_Found] = []
        brought = self.passes.not_finite(micro_batches, self._draws(index))
        for micro_batch, each in zip(micro_batches, brought, strict=True):
            place = micro_batch.place
            documents = self._batches.names(index, place, place + len(micro_batch.inputs))
            found.append((*each, documents) if each is not None else None)
        return found

    def _draws(self, index: int) -> Callable[[int], None]:
        return lambda place: begin_draws(self._batches.seed, index, place, self._model.device)

    def _read(self, index: int) -> list[MicroBatch]:
        """This rank's micro-batches; other ranks may have one more."""
        with self._clock.phase("data"):
            rank, micro = self._mesh.batch_rank, self._plan.micro
            both = self._batches.for_rank(index, rank, self._plan.ranks)
            parts = [self._context.part(torch.from_numpy(each)) for each in both]
            counts = [int((each != IGNORE).sum()) for each in parts[1].split(micro)]  # before a GPU has it
            if self._separate:
                parts.append(torch.from_numpy(self._batches.begins(index, rank, self._plan.ranks)))
            inputs, targets, *more = (sent(each, self._model.device).split(micro) for each in parts)
            begins = more[0] if more else [None] * len(inputs)
            first, _ = rows(self._plan.sequences, rank, self._plan.ranks)
            places = range(first, first + len(both[0]), micro)
            return list(starmap(MicroBatch, zip(inputs, targets, counts, places, begins, strict=True)))

    def _norm(self) -> Tensor:
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        return self._model.gradient_norm()

    def _update(self, length: float) -> str:
        """length: norm of the gradient. Returns why there was no update, or ""."""
        finite = math.isfinite(length)
        if finite:  # of all gradients: the scaler alone would step each optimizer that can
            if 0 < self._clip < length:
                self._model.scale_gradients(self._clip / length)
            for optimizer in self._optimizers:
                self._scaler.step(optimizer) if self._scaler is not None else optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
            return "" if finite else f"fp16 overflow; the scale is now {self._scaler.get_scale():g}"
        return "" if finite else "the gradient is not finite"

    def take_over(self, plan: BatchPlan) -> None:
        """The model is now on other ranks, which divide the global batch by this plan."""
        self._plan, self._ahead = plan, None

    @property
    def scale(self) -> float:
        """The loss scale of fp16; 0 in other precisions, which need none."""
        return self._scaler.get_scale() if self._scaler is not None else 0.0

    @property
    def scaler_state(self) -> dict[str, float]:
        """The scaler's state for the checkpoint."""
        return self._scaler.state_dict() if self._scaler is not None else {}

    def load_scaler(self, state: dict[str, float]) -> None:
        """The reverse of `scaler_state`."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
            forget_stage(self._scaler)


def _by_group(every: list[Any]) -> dict[int, list[_Found]]:
    """What all ranks that read the same found together: they have the same micro-batches.

    every: for each rank (what it reads, ..., what it found, ...).
    """
    groups = defaultdict(list)
    for group, _, found, _ in every:
        groups[group].append(found)
    return {
        group: [_merged(each) for each in zip(*by_rank, strict=True)] for group, by_rank in groups.items()
    }


def _merged(of_ranks: Sequence[_Found]) -> _Found:
    found = [each for each in of_ranks if each is not None]
    loss = next((loss for loss, *_ in found if loss is not None), None)
    names = list(dict.fromkeys(name for _, names, _ in found for name in names))
    if not names and (loss is None or math.isfinite(loss)):
        return None
    return loss, names, found[0][2]


def _describe(ranks: Sequence[int], loss: float | None, bad: list[str], documents: list[int]) -> str:
    assert loss is not None, "one of the ranks knows it"
    where = f"gradient of {some(bad, 1)}" if bad else "finite gradients"
    return f"{rank_words(ranks)}: loss {loss:g}, {where}; documents {some(documents, 8)}"
