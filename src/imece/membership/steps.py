"""`imece.steps`: a user's own loop goes on when ranks die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.data_parallel.replicate import DistributedDataParallel
from imece.membership.arguments import check_also, check_model, check_optimizers, check_range
from imece.membership.beating import show
from imece.membership.carried import Carried, Stateful
from imece.membership.draws import begin_draws
from imece.membership.kept_gradients import KeptGradients
from imece.membership.member import Member, keeps_roster
from imece.membership.modes import Modes
from imece.membership.recovery import Recovered, Recovery
from imece.membership.states import packed
from imece.membership.unwatched import say_not_carried, say_unwatched
from imece.membership.where import Where
from imece.mesh import Mesh

_NOTHING = -1
_looped: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Step:
    """One step: a context that is left when another rank dies, and comes again in the loop's next turn."""

    def __init__(self, loop: _Plain | _Loop, begin: Callable[[int], None]) -> None:
        self.index = loop.done
        """The number of steps made before this one."""
        self.made = False
        """Whether this rank has made the step. False: another rank's death has left the block before
        its end."""
        self._loop, self._begin = loop, begin
        self.entered = False

    def __enter__(self) -> int:
        """The number of the step, `index`."""
        self.entered = True
        self._begin(self.index)
        return self.index

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, RuntimeError):
            self._loop.explain(error)
            return False
        try:
            self.made = self._loop.finish(error)
        except RuntimeError as failed:
            if failed is not error:
                raise
            error.__traceback__ = trace  # the block's own traceback: the way through here is of no interest
            return False
        return True


def steps(
    total: int,
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    also: Sequence[Stateful] = (),
    start: int = 0,
    seed: int | None = None,
    recovered: Callable[[Recovered], None] | None = None,
) -> Iterator[Step]:
    """The steps from `start` to `total`, each a context to make an optimizer's update in.

        for step in imece.steps(1_000, model, optimizer):
            with step as number:
                inputs, targets = batch(number, mesh.rank, mesh.world_size)
                loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    If another rank dies inside of the block, the block is left, the survivors take the state of the rank that
    is furthest, and the same step comes again (or the next one, if some rank had finished it). So the block
    must depend only on the step's number and on this rank and world. It may make several updates: those
    already made are skipped. Buffers are set back, as are the training modes of modules and which parameters
    want gradients; gradients are not kept from one step to the next. After the block `step.made` says whether
    this rank has made the step.

    model, optimizer: as returned by `imece.DistributedDataParallel` or `imece.parallelize`; several
    optimizers as a list. recovered: called on every rank that has come into a generation. Its collectives are
    as well protected as the block: if another rank dies meanwhile, it is called again. also: learning-rate
    schedulers, a GradScaler and the like, whose state_dict is JSON and small, since each step notes it: a
    rank that was behind gets that of the rank that was furthest.

    seed: of random draws in the steps from torch's generators, of the CPU and of this rank's device; by
    default the one that the script gave to torch.manual_seed. Each step seeds them anew, from the seed, the
    step's number and the rank: so a step that is made again, and a run that begins at `start`, draw the same.
    Ranks along the axis "tensor" draw what the first of them does.

    Under `imece launch` dead ranks are replaced. Under other launchers (torchrun, srun) the loop is a plain
    one: a rank that dies ends the job, and rank 0 says so at the beginning. The mesh of imece.init(), the
    model and the optimizer stay the same objects; the mesh's rank, world_size and groups change. A program
    has one such loop.

    RuntimeError if the block was not entered, `with step:`, for a second loop, and if a state was changed
    after the block. TypeError and ValueError for wrong arguments, and for a state that is no JSON, or too
    large.
    """
    mesh = meshes.current()
    check_range(total, start)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is around it
    check_model(model, mesh.can_change)
    optimizers = check_optimizers(optimizer)
    check_also(also)
    carried = Carried(model, optimizers, also)
    packed(carried.state())  # raise TypeError now, not when a rank has died
    first = torch.initial_seed() if seed is None else seed

    def begin(index: int) -> None:
        # The ranks of a tensor group, which are neighbours, compute the same, and have to drop the same.
        begin_draws(first, index, mesh.rank - mesh.coordinate("tensor"), mesh.device)

    if not keeps_roster(mesh):
        say_unwatched(mesh)
        plain = _Plain(start)
        plain.where = show(mesh, lambda: plain.done, model, optimizers)
        yield from _until(total, plain, begin)
        return
    if mesh in _looped:
        raise RuntimeError(
            "imece.steps: a second loop, where a rank that joins could not know which of them it is in: have "
            "one for the whole script, with the steps of both in its total; step.index says where it is"
        )
    _looped.add(mesh)
    say_not_carried(mesh, model)
    recovery = Recovery(Member(mesh, start), model, optimizers, state=carried.state, take=carried.take)
    kept = KeptGradients(model, optimizers)
    try:
        loop = _Loop(recovery, carried.modes, kept, start, total, recovered or (lambda _: None))
        yield from _until(total, loop, begin)
    finally:  # even if the loop was left with `break`
        recovery.end()


def _until(total: int, loop: _Plain | _Loop, begin: Callable[[int], None]) -> Iterator[Step]:
    while loop.done < total:
        step = Step(loop, begin)
        yield step
        if not step.entered:
            raise RuntimeError("imece.steps: enter each step, `with step:`, and make its update inside")
        loop.look()


class _Plain:
    """How far this rank is, if dead ranks are not replaced."""

    def __init__(self, start: int) -> None:
        self.done = start
        self.where: Where | None = None

    def finish(self, error: BaseException | None) -> bool:
        """The block was left."""
        if error is not None:
            raise error
        self.done += 1
        if self.where is not None:
            self.where.note("between steps")
        return True

    def explain(self, error: BaseException) -> None:
        """Nothing to add: the error goes on to the caller."""

    def look(self) -> None:
        """The loop's body is over."""


class _Loop:
    """How far this rank is, through the deaths of others."""

    def __init__(
        self,
        recovery: Recovery,
        modes: Modes,
        kept: KeptGradients,
        start: int,
        total: int,
        recovered: Callable[[Recovered], None],
    ) -> None:
        self._recovery, self._recovered = recovery, recovered
        self._modes, self._kept = modes, kept
        self.done, self._total = start, total
        self._noted = False  # by this rank, since the turn began
        self._left = ""  # why, in words, until a step has been made
        if recovery.member.is_joining:
            self.done = _NOTHING
            self._recover(None)
        else:
            recovery.begin(start)
            recovery.go_on()

    def finish(self, error: BaseException | None) -> bool:
        """The block was left: with an update made, or by an error. Raises an error that no death explains.

        Returns whether this rank has made the step.
        """
        made = False
        try:
            if error is not None:
                raise error
            if not self._kept.look(self.done, self._recovery.member.mesh.rank):
                # An `except` in the block may have passed over a death, and this step would be lost.
                self._recovery.meet(self.done, anyway=True)
            self.done += 1
            self._modes.note()
            self._recovery.finished(self.done)
            made = self._noted = True
            self._left = ""
            self._recovery.meet(self.done, self.done == self._total)
        except RuntimeError as failed:
            self._recover(failed)
        return made

    def explain(self, error: BaseException) -> None:
        """Add to an error of the block's own what happened before it."""
        if self._left:
            error.add_note(
                f"(imece: in the first step after {self._left}. A block that is left for that is entered "
                "again, and what it has changed beside the model, optimizers and `also` is not taken back)"
            )

    def look(self) -> None:
        """The loop's body is over. RuntimeError if it changed, after the block, a state that joining ranks
        get as of the block's end: they would begin the next block without the change."""
        if not self._noted:
            return
        self._noted = False
        if not self._recovery.is_as_noted(self.done):
            raise RuntimeError(
                "imece.steps: a state in `also`, or an option of an optimizer (its learning rate?), was "
                "changed after the block, where a rank that joins has not been: change it inside of "
                "`with step:`"
            )
        if self._modes.note():  # after the block they may change, for a validation without collectives
            self._recovery.note_state(self.done)

    def _recover(self, error: BaseException | None) -> None:
        self._modes.restore(self._modes.noted)  # before the model is divided anew, as at first
        try:
            found = self._recovery.recover(error, self.done)
        except RuntimeError as failed:
            if failed is error:
                self.explain(failed)
            raise
        self.done, self._noted = found.step, False
        self._left = " and ".join(found.generation.lost)
        try:
            self._recovered(found)
        except RuntimeError as another:  # all ranks call it together, so it may well have collectives
            self._recover(another)
