"""Pipeline parallelism: divides the layers of a model among the ranks along the mesh's axis "pipeline".

On p ranks a step of m micro-batches idles for (p - 1) / m of the time that it is busy, interleaved (p - 1) /
(v m). The schedules are torch.distributed.pipelining's (schedules.py). This file has the cut, the shapes, the
shared parameters, and the reduction over the data axes: a stage's buckets leave during its last backward of a
step, while other stages still compute; those of shared parameters leave after all backwards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from imece import mesh as meshes
from imece.collectives import ops, waited
from imece.listing import ends_of
from imece.mesh import Mesh
from imece.model_parallel.alike import Draws, check_alike, content_of, plain_tensors
from imece.model_parallel.cutting import Part, Place, Values, dealt_by, names_in, pieces_of
from imece.model_parallel.schedules import Loss, Mark, Moment, Span, StageError, check_loss, check_schedule
from imece.model_parallel.shared import Shared, connect
from imece.models.dealing import deal

_KEPT = 4  # schedules kept for inputs of other shapes, each with memory for what it receives


class Pipeline:
    """A model cut into stages, and this rank's part of it.

        pipeline = imece.Pipeline(model, mesh, micro_batches=8, loss=loss)
        part, optimizer = imece.parallelize(pipeline.part, AdamW, "zero1", mesh)
        loss = pipeline.step(tokens, targets)
        optimizer.step()

    Parameters have the names that they have in the whole model.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        mesh: Mesh | None = None,
        *,
        micro_batches: int,
        loss: Loss,
        schedule: str = "1f1b",
        chunks: int | None = None,
        cuts: Sequence[int] | None = None,
        seq: int | None = None,
    ) -> None:
        """All ranks of the pipeline construct together, from the same whole model.

        model: an imece Transformer, an nn.Sequential, or a list of modules, each of which takes what the one
        before returns: a tensor or a tuple of tensors, whose first dim is the batch and whose shapes follow
        from those of the inputs. The model is taken apart: this rank's part moves to the mesh's device, and
        all other parts lose their memory here.

        mesh: by default that of imece.init(). micro_batches: how many a batch is split into. loss: function
        of (output of the last stage, targets) of a micro-batch that returns the mean. schedule: gpipe, 1f1b
        or interleaved. chunks: stages of each rank if interleaved (2). cuts: the first piece of each stage
        but the first; pieces are the children of an nn.Sequential, or the blocks of a Transformer and, last,
        its head. By default the most expensive stage is as cheap as possible. seq: how long sequences will
        be, which says what a Transformer's attention costs; by default as long as it allows.

        ValueError for a model that cannot be cut so or has no values, for a schedule that cannot run with so
        many micro-batches, for a mesh with an axis context, for a rank that would train nothing beside
        data axes, and if ranks share a GPU.
        """
        self.mesh = mesh = meshes.chosen(mesh)
        if (parts := mesh.size("context")) > 1:
            raise ValueError(
                f"imece.Pipeline on a mesh with {parts} ranks along context: stages take no positions, and "
                "these ranks would all compute the same whole sequences: give them to replicate, say"
            )
        check_sends(mesh)
        self.micro_batches, self.schedule = micro_batches, schedule
        chunks = chunks if chunks is not None else 1 + (schedule == "interleaved")
        size, rank = mesh.size("pipeline"), mesh.coordinate("pipeline")
        check_schedule(schedule, micro_batches, chunks, size)
        self._pieces, stages = pieces_of(model, seq), size * chunks
        costs = self._pieces.costs
        self._dealt = deal(costs, stages) if cuts is None else dealt_by(cuts, len(costs), stages)
        self._group, self._messages = mesh.group("pipeline"), mesh.messages_group("pipeline")
        self._loss, self._named = loss, [self._pieces.named(which) for which in self._dealt]
        self._mine = list(range(rank, stages, size))
        self._check_parts(size)
        self._compared = False  # the ranks' first batches
        self._draws = Draws(mesh.group("tensor"), mesh.device, "step") if mesh.size("tensor") > 1 else None
        self.marks: list[Mark] = []
        """What this rank did in the latest step or evaluation; the next one starts a new list."""
        self.part = Part({name: each for at in self._mine for name, each in self._named[at].items()})
        """This rank's part of the model, for `parallelize`, or directly for an optimizer if no other rank has
        it."""
        self.part.place = self._place()
        self._wrapper: Any = None  # what `parallelize` made of the part
        self._coming: set[int] = set()  # stages of this rank that still have backwards to begin
        self._begins: Sequence[Tensor] | None = None  # of each micro-batch
        self.part.owner = weakref.WeakMethod(self._take)
        self.part.to(mesh.device)
        for group in dict.fromkeys((self._group, self._messages)):
            connect(group, mesh.device)
        self._shared = Shared([self._named[at::size] for at in range(size)], self._group)
        self._free_others()
        self._began_trained = self._trained()
        self._began_dtypes = [{name: each.dtype for name, each in kind} for kind in _states(self.part)]
        # What is kept refers to this object weakly. In a cycle with it a dropped model would keep its memory
        # until the garbage collector comes.
        make = functools.partial(Pipeline._make_schedule, weakref.proxy(self))
        self._schedule_for = functools.lru_cache(_KEPT)(make)

    def step(
        self, inputs: Tensor | Sequence[Tensor], targets: Tensor, *, begins: Tensor | None = None
    ) -> Tensor:
        """Run forward and backward of a batch, and sum the gradients over the data axes.

        All ranks of the pipeline call this with the same batch: the first stage reads the inputs, the last
        one the targets, and all of them `begins`, which is for a Transformer (see its forward). Returns the
        mean loss of the micro-batches, an fp64 scalar, on all of these ranks.

        Inside `part.no_sync()` gradients stay on their rank, and the next step outside adds to them.

        UserError if the ranks' first batches differ, or what ranks along "tensor" draw at random. ValueError
        if the micro-batches do not divide the batch, or if a stage became wholly frozen, or no longer is,
        since construction. RuntimeError for an error in a stage, with the stage's name, and if nobody called
        `parallelize` although other ranks have this part too.
        """
        self._check_wrapped()
        self._check_frozen()
        values = self._values(inputs, targets, begins)
        wrapper = self._wrapper
        reduces = wrapper is None or wrapper.require_backward_grad_sync
        self._shared.before_step()
        if wrapper is not None:
            wrapper()
            if reduces:
                wrapper.reducer.begin_several()
        if self._draws is not None:
            self._draws.begin()
        loss = self._run(values, targets, begins, train=True)
        if self._draws is not None:
            self._draws.end()
        if reduces:
            self._shared.sum()
            if wrapper is not None:
                wrapper.reducer.finish()
        return self._told(loss)

    def evaluate(
        self, inputs: Tensor | Sequence[Tensor], targets: Tensor, *, begins: Tensor | None = None
    ) -> Tensor:
        """Like `step`, without gradients."""
        values = self._values(inputs, targets, begins)
        with torch.no_grad():
            return self._told(self._run(values, targets, begins, train=False))

    @property
    def stages(self) -> list[range]:
        """The pieces of each stage, in the order of forward; rank r has stages r, r + ranks, ..."""
        return list(self._dealt)

    @property
    def spans(self) -> list[Span]:
        """When this rank was busy in the latest step or evaluation, by time.perf_counter(). On a GPU the host
        waits until it is over."""
        return [
            Span(each.what, each.stage, each.micro_batch, *self._times(each.start, each.end))
            for each in self.marks
        ]

    def _times(self, *moments: Moment) -> list[float]:
        began, began_s = self._began
        return [began_s + each.since(began) for each in moments]

    def __str__(self) -> str:
        stages = ", ".join(f"{at} ({ends_of(list(self._named[at]))})" for at in self._mine)
        return f"stage {stages} of {len(self._dealt)}, rank {self.mesh.rank}"

    def _before_last(self, stage: int) -> None:
        """The next backward of this stage is its last in this step: its gradients may leave, except those
        that other stages add to."""
        self._coming.discard(stage)
        if self._wrapper is not None:
            later = {id(each) for at in self._coming for each in self._parameters_of(at)}
            later |= {id(each) for each in self._shared.parameters}
            mine = self._parameters_of(stage)
            self._wrapper.reducer.expect_last(each for each in mine if id(each) not in later)

    def _parameters_of(self, stage: int) -> list[nn.Parameter]:
        return [each for module in self._named[stage].values() for each in module.parameters()]

    def _values(self, inputs: Tensor | Sequence[Tensor], targets: Tensor, begins: Tensor | None) -> Values:
        """The inputs. ValueError unless all can be split alike; UserError unless all ranks have the same."""
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        for each in (targets, *given):
            if not isinstance(each, Tensor) or not each.ndim:
                raise ValueError(
                    f"inputs and targets are tensors whose first dim is the batch, not {each!r:.80}"
                )
        values = tuple(each.contiguous() for each in given)  # torch 2.11 accepts only contiguous ones
        size = targets.shape[0]
        if not size or size % self.micro_batches:
            raise ValueError(
                f"a batch of {size} cannot be split into micro_batches={self.micro_batches}: take a multiple"
            )
        if others := [each.shape[0] for each in values if each.shape[0] != size]:
            raise ValueError(f"inputs of a batch of {others[0]}, and targets of one of {size}")
        if begins is not None and not self._pieces.takes_begins:
            raise ValueError("begins are for an imece Transformer, which this pipeline was not cut from")
        if begins is not None and begins.shape != targets.shape:
            raise ValueError(
                f"begins has shape {list(begins.shape)}; targets have {list(targets.shape)}, and so must it"
            )
        if not self._compared and self._group.size() > 1:
            self._compared = True
            content = content_of(plain_tensors((values, targets, begins)))
            check_alike(content, self._group, self.mesh.device, "pipeline")
        return values

    def _trained(self) -> list[bool]:
        """For each stage of this rank, whether it has anything to train."""
        return [any(each.requires_grad for each in self._parameters_of(at)) for at in self._mine]

    def _check_frozen(self) -> None:
        """ValueError if what is frozen changed: it decided at construction whether gradients travel between
        two stages, so one stage would wait for the other."""
        for at, was, now in zip(self._mine, self._began_trained, self._trained(), strict=True):
            if was != now:
                raise ValueError(
                    f"stage {at} ({ends_of(list(self._named[at]))}) "
                    + ("was frozen" if now else "had parameters to train")
                    + f" when imece.Pipeline was made, and {'has some' if now else 'is frozen'} now, which "
                    "other ranks do not know: freeze before that, or leave some of it unfrozen"
                )

    def _run(self, values: Values, targets: Tensor, begins: Tensor | None, *, train: bool) -> Tensor | None:
        """The mean loss, on the ranks that know it."""
        device = self.mesh.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        alike = tuple((each.shape[0] // self.micro_batches, *each.shape[1:]) for each in values)
        try:
            schedule = self._schedule_for(alike, tuple(each.dtype for each in values), cast, train)
        except StageError as error:  # what stages do before any of them runs is the same on all ranks
            raise RuntimeError(str(error)) from error.__cause__
        last = self._mine[-1] == len(self._dealt) - 1
        self._coming = set(self._mine)
        self._begins = begins.chunk(self.micro_batches) if begins is not None else None
        losses: list[Tensor] | None = [] if last else None
        self.marks.clear()
        self._began = Moment(self.mesh.device), time.perf_counter()
        try:
            run = schedule.step if train else schedule.eval
            with _without_tables():
                run(
                    *(values if self._mine[0] == 0 else ()),
                    target=targets if last else None,
                    losses=losses,
                    return_outputs=False,
                )
        except StageError as error:
            raise RuntimeError(f"{self}: {error}") from error.__cause__
        except Exception as error:  # the original is passed on, because its type says what to do
            error.add_note(str(self))
            raise
        if device == "cpu":  # on a GPU the stream waits, so the host cannot tell how long
            whole = time.perf_counter() - self._began[1]
            waited.count(whole - sum(each.seconds for each in self.marks))
        return torch.stack([each.detach() for each in losses]).double().sum() if losses else None

    def _make_schedule(
        self,
        alike: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype, ...],
        cast: torch.dtype | None,
        train: bool,
    ) -> Any:
        """The schedule for micro-batches of these shapes and dtypes, under this autocast.

        self: a proxy, so what is made here may not take a bound method.
        """
        from imece.model_parallel.stages import Run, schedule_of, shapes

        inputs = tuple(
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(alike, dtypes, strict=True)
        )
        schedule, dealt, mine = self.schedule, self._dealt, self._mine
        if self._group.size() == 1 and not train:  # torch expects gradients between stages of one rank
            schedule, dealt, mine = "gpipe", [range(dealt[0].start, dealt[-1].stop)], [0]
        stages = [self._pieces.stage(which, inputs) for which in dealt]
        self._cast_others()
        called = {
            f"stage {at} ({ends_of(list(self._pieces.named(which)))})": stage
            for at, (which, stage) in enumerate(zip(dealt, stages, strict=True))
        }
        run = Run(
            shapes(called, inputs, self.mesh.device),
            self.mesh.device,
            self._messages,
            self.marks,
            before_last=lambda stage: self._before_last(stage),
            beside=lambda micro_batch: self._beside(micro_batch),
        )
        return schedule_of(
            schedule,
            {at: stages[at] for at in mine},
            run,
            self.micro_batches,
            lambda output, targets: self._mean_loss(output, targets),
        )

    def _beside(self, micro_batch: int) -> dict[str, Tensor]:
        """What every stage is given of a micro-batch beside the output of the one before."""
        return {"begins": self._begins[micro_batch]} if self._begins is not None else {}

    def _mean_loss(self, output: Any, targets: Tensor) -> Tensor:
        """The loss of a micro-batch, divided so that all gradients add up to those of the mean."""
        loss = self._loss(output, targets)
        check_loss(loss, output)
        return loss / self.micro_batches

    def _told(self, loss: Tensor | None) -> Tensor:
        """Send the loss from the last stage to all others."""
        told = torch.zeros((), dtype=torch.float64, device=self.mesh.device) if loss is None else loss
        if self._group.size() > 1:
            ops.broadcast(told, self._group.size() - 1, group=self._group, label="loss of the last stage")
        return told

    def _take(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper
        self._schedule_for.cache_clear()  # of an evaluation before, in the dtypes before a MixedPrecision

    def _check_wrapped(self) -> None:
        if self._wrapper is None and self.mesh.data_group.size() > 1:
            raise RuntimeError(
                f"{self.mesh.data_group.size()} ranks have this part of the model, and nobody sums their "
                "gradients: call imece.parallelize(pipeline.part, ...) before pipeline.step"
            )

    def _place(self) -> Place:
        mine = {name for at in self._mine for name in names_in(self._named[at])}
        every = {name for named in self._named for name in names_in(named)}
        ranks = self.mesh.world_size // self._group.size()
        return Place(
            self._group,
            self.mesh.device,
            self.mesh.rank % ranks,  # pipeline is the mesh's slowest axis
            ranks,
            self.mesh.coordinate("tensor"),
            self.mesh.size("tensor"),
            frozenset(every - mine),
        )

    def _check_parts(self, size: int) -> None:
        trains: list[bool] = []
        for at in range(size):
            modules = [each for named in self._named[at::size] for each in named.values()]
            parameters = [each for module in modules for each in module.parameters()]
            if any(each.is_meta for each in parameters):
                raise ValueError(
                    "this model is on the meta device, or was cut before: make one with values, of which "
                    "each rank then keeps its part alone"
                )
            if not parameters:
                raise ValueError(
                    f"rank {at} of the pipeline would have no parameters, and nothing to train: cut "
                    f"otherwise, by cuts=, than at {[which.start for which in self._dealt[1:]]}"
                )
            trains.append(any(each.requires_grad for each in parameters))
        if self.mesh.batch_ranks > 1 and any(trains) and not all(trains):  # none: it is for evaluation
            raise ValueError(
                f"rank {trains.index(False)} of the pipeline would train nothing, and beside an axis "
                "replicate or shard each has to: cut otherwise, by cuts=, than at "
                f"{[which.start for which in self._dealt[1:]]}, or freeze less"
            )

    def _free_others(self) -> None:
        """Free the memory of what only other ranks have; the shapes stay."""
        mine = {id(each) for each in self.part.modules()}
        for named in self._named:
            for module in named.values():
                if id(module) not in mine:
                    module.to("meta")

    def _cast_others(self) -> None:
        """Cast what only other ranks have as this rank's part was since construction, by a MixedPrecision
        say: what their stages send has the dtype that follows."""
        mine = [dict(kind) for kind in _states(self.part)]
        for at, (began, now) in enumerate(zip(self._began_dtypes, mine, strict=True)):
            became = {dtype: now[name].dtype for name, dtype in began.items() if name in now}
            for module in (module for named in self._named for module in named.values()):
                for _, each in _states(module)[at]:
                    if each.is_meta and each.dtype in became:
                        each.data = each.data.to(became[each.dtype])


def _states(module: nn.Module) -> tuple[Iterable[tuple[str, Tensor]], Iterable[tuple[str, Tensor]]]:
    """Its parameters, and its buffers, with their names."""
    return module.named_parameters(), module.named_buffers()


def check_sends(mesh: Mesh) -> None:
    """ValueError, on all ranks, if stages could not send their outputs to each other."""
    if mesh.size("pipeline") > 1 and mesh.device.type == "cuda" and mesh.backend == "gloo":
        raise ValueError(
            "Gloo, on which ranks share a GPU, sends none of its tensors from stage to stage: start one rank "
            "for each GPU and leave out backend='gloo' (IMECE_BACKEND), for NCCL, or compute on device='cpu'"
        )


@contextlib.contextmanager
def _without_tables() -> Iterator[None]:
    """If a schedule fails, torch would print all of it on each rank."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
