"""`imece.steps`: a user's own loop goes on when ranks die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.data_parallel.grad_scaler import forget_stage
from imece.data_parallel.optimizer import numbers_of, set_numbers
from imece.data_parallel.replicate import DistributedDataParallel
from imece.membership.draws import begin_draws
from imece.membership.member import Member, keeps_roster
from imece.membership.recovery import Recovered, Recovery
from imece.membership.states import packed
from imece.membership.unwatched import say_unwatched
from imece.mesh import Mesh

_NOTHING = -1
_looped: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Stateful(Protocol):
    """A learning-rate scheduler, say: what has a state of JSON, whose keys may be numbers too."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Step:
    """One step: a context that another rank's death leaves, to be entered again by the loop's next turn."""

    def __init__(
        self, index: int, begin: Callable[[int], None], finish: Callable[[BaseException | None], bool]
    ) -> None:
        self.index = index
        """From 0: how many steps were made before."""
        self.made = False
        """Whether this rank has made it. False: another's death has left the block before its end."""
        self._begin, self._finish = begin, finish
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
            return False
        self.made = self._finish(error)
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

    When another rank dies inside of the block, the block is left, the ranks that are there take the state of
    the one that is furthest, and the same step comes again (or the next one, if somebody had finished it).
    What is in the block must therefore depend on the step's number and on this rank and world alone. It may
    make several updates: those that were made are passed over. `step.made` says after the block whether this
    rank has made the step.

    model, optimizer: as `imece.DistributedDataParallel` or `imece.parallelize` gave them; several optimizers
    as a list. recovered: called on every rank that has come into a generation. also: learning-rate
    schedulers, a GradScaler and the like, whose state_dict is JSON, and small, for each step notes it anew:
    a rank that was behind gets that of the rank that was furthest.

    seed: of what is drawn in the steps from torch's generators, of the CPU and of this rank's device; by
    default the one that the script gave to torch.manual_seed. Each step begins them anew, from the seed, the
    step's number and the rank: so a step that is made again, and a run that begins at `start`, draw the same.

    Ranks are replaced under `imece launch`. Under other launchers (torchrun, srun) the loop is a plain one:
    a rank that dies ends all, and rank 0 says so at first. imece.init()'s mesh, the model and the optimizer
    stay the same objects; of the mesh rank, world_size and groups change. A program has one such loop.

    RuntimeError if the block was not entered, `with step:`, for a second loop, and for a state that is
    changed after the block. TypeError for a state that is no JSON.
    """
    mesh = meshes.current()
    first = torch.initial_seed() if seed is None else seed

    def begin(index: int) -> None:
        begin_draws(first, index, mesh.rank, mesh.device)

    if not keeps_roster(mesh):
        say_unwatched(mesh)
        yield from _until(total, _Plain(start), begin)
        return
    if mesh in _looped:
        raise RuntimeError(
            "imece.steps: a second loop, where a rank that joins could not know which of them it is in: "
            "make one of both"
        )
    _looped.add(mesh)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def state() -> dict[str, Any]:
        return {
            "numbers": [numbers_of(each) for each in optimizers],
            "also": [each.state_dict() for each in also],
        }

    def take(said: dict[str, Any]) -> None:
        for each, numbers in zip(optimizers, said["numbers"], strict=True):
            set_numbers(each, numbers)
        for thing, found in zip(also, said["also"], strict=True):
            thing.load_state_dict(found)
            if isinstance(thing, torch.amp.GradScaler):
                forget_stage(thing)

    packed(state())  # TypeError now, and not when a rank has died
    recovery = Recovery(Member(mesh), model, optimizers, state=state, take=take)
    try:
        yield from _until(total, _Loop(recovery, start, total, recovered or (lambda _: None)), begin)
    finally:  # also where the loop was left with `break`
        recovery.end()


def _until(total: int, loop: _Plain | _Loop, begin: Callable[[int], None]) -> Iterator[Step]:
    while loop.done < total:
        step = Step(loop.done, begin, loop.finish)
        yield step
        if not step.entered:
            raise RuntimeError("imece.steps: enter each step, `with step:`, and make its update inside")
        loop.look()


class _Plain:
    """How far this rank is, where nobody is replaced."""

    def __init__(self, start: int) -> None:
        self.done = start

    def finish(self, error: BaseException | None) -> bool:
        """The block was left."""
        if error is not None:
            raise error
        self.done += 1
        return True

    def look(self) -> None:
        """The loop's body is over."""


class _Loop:
    """How far this rank is, through the deaths of others."""

    def __init__(
        self, recovery: Recovery, start: int, total: int, recovered: Callable[[Recovered], None]
    ) -> None:
        self._recovery, self._recovered = recovery, recovered
        self.done, self._total = start, total
        self._noted = False  # by this rank, since the turn began
        if recovery.member.is_joining:
            self.done = _NOTHING
            self._recover(None)
        else:
            recovery.begin(start)
            recovery.go_on()

    def finish(self, error: BaseException | None) -> bool:
        """The block was left: with an update made, or by an error. Raises an error that no death explains.

        Whether the step is made by this rank.
        """
        made = False
        try:
            if error is not None:
                raise error
            self.done += 1
            self._recovery.finished(self.done)
            made = self._noted = True
            self._recovery.meet(self.done, self.done == self._total)
        except RuntimeError as failed:
            self._recover(failed)
        return made

    def look(self) -> None:
        """The loop's body is over. RuntimeError if it changed after the block what ranks that join get from
        there: they would begin with the next block, without the change."""
        if self._noted and not self._recovery.is_as_noted(self.done):
            raise RuntimeError(
                "imece.steps: a state in `also`, or an option of an optimizer (its learning rate?), was "
                "changed after the block, where a rank that joins has not been: change it inside of "
                "`with step:`"
            )
        self._noted = False

    def _recover(self, error: BaseException | None) -> None:
        found = self._recovery.recover(error, self.done)
        self.done, self._noted = found.step, False
        self._recovered(found)
