"""Gradient ready -> bucket ready -> reduce, while backward goes on.

    slot      one parameter: its view into a bucket, and how far it is in this backward
    ready     the parameter's gradient is in the bucket, divided by what the average is over
    bucket    flat; leaves as one collective as soon as all its slots are ready and all buckets before it left
    fired     autograd has written this parameter's gradient in this backward
    touched   autograd has written it in an earlier backward that was not synchronised (no_sync)

A backward is synchronised if it comes through an output of a prepared forward, or if it is the first one
after such a forward and comes through no output (a loss of the model's gradients, say). torch.autograd.grad()
writes no `.grad`, and is left alone.

`begin` runs when the first gradient reaches such an output, `finish` when that backward is over. Parameters
that have not fired by then are unused on this rank; one more small collective tells whether any rank used
them. So the graph is walked no further than to its first leaf, and nobody has to say beforehand which
parameters stay unused. If a backward raises, everything it did is dropped, at the next forward or when its
graph runs again.

Several backwards may count as one synchronised backward, as for a pipeline's micro-batches, between which
stages wait for each other. Then `begin_several` and `finish` are called around them.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from imece.data_parallel.average import Average
from imece.data_parallel.reducing import in_backward, older, refusals, task
from imece.data_parallel.reducing.arrivals import Arrivals
from imece.data_parallel.reducing.buckets import Bucket, Gradients, Slot
from imece.data_parallel.reducing.finite import Finite
from imece.data_parallel.reducing.leaving import Leaving
from imece.data_parallel.reducing.line import Line, Suspicion
from imece.data_parallel.reducing.sharing import Sharing
from imece.data_parallel.reducing.used import Alike, Used


class Owner(Protocol):
    """The wrapped model whose gradients these are, as far as its reducer knows it: weakly."""

    def tell_backward(self) -> None:
        """A synchronised backward begins."""

    def to_compare(self) -> Alike:
        """What must be the same on all ranks."""

    def refuse_newcomers(self) -> None:
        """A backward is over: RuntimeError if it brought a gradient to a parameter that is in no bucket."""


class Reducer:
    """The gradients of one model's parameters, reduced over one group."""

    def __init__(
        self,
        gradients: Gradients,
        group: dist.ProcessGroup,
        average: Average,
        owner: Owner,
        *,
        overlap: bool,
        static_graph: bool = False,
        finite: Finite | None = None,
        suspicion: Suspicion | None = None,
    ) -> None:
        """overlap: a bucket leaves as soon as it is full; otherwise when backward is over.
        suspicion: what the first backward has to settle.
        """
        self.gradients, self.group, self.average = gradients, group, average
        self._owner = weakref.ref(owner)
        self.leaving = Leaving(gradients, group, overlap, finite)
        self.static_graph = static_graph
        self.sums = 0  # finished: after each, every rank has come at least as far as its backward
        self.stepping: list[torch.Tensor] = []  # parameters with optimizers that step in backward
        self.awaited: list[torch.futures.Future[Any]] = []  # of a hook on buffers
        self._line = Line.of(group)
        self._suspicion = suspicion
        self.used = Used(group, self.slots[0].parameter.device, len(self.slots))
        self._zeros = array("i", [0] * len(self.slots))
        self._fired = self._zeros[:]  # by parameter: gradients in this backward
        self._touched = self._zeros[:]  # the same: in one that was not synchronised
        self._closed = False
        self.armed = False  # a forward was prepared: the next gradient begins its backward, by outputs or not
        self.inside = False  # a prepared forward is running, and may have a backward of its own
        self._returned = False  # autograd.grad came through outputs since the last synchronised backward
        self._derived = False  # the same with create_graph=True, since the last forward
        self._local = False  # this backward comes through an output of a forward in no_sync
        self.is_reducing = False  # a synchronised backward has reached this reducer
        self._present = True  # this rank has inputs
        self._end: Callable[[], partial[None] | None] = lambda: None  # ends it unless it raised
        self._graphed = False
        self._left: Collection[int] = ()  # parameters that another model reduces in this backward
        self._early: set[int] = set()  # parameters that get gradients in a later backward of the same step
        self._careful = False  # some gradients are left, early or noted: not all simply go into buckets
        self._absent: list[Slot] = []  # slots of buckets that left before their turn
        self._learning = static_graph  # this rank's first backward counts how often each parameter fires
        self._first_is_over = False  # a backward of all ranks, some of which may have had no inputs
        self._arrivals = Arrivals(wanted=gradients.is_whole)
        self._weighs = gradients.is_whole and average.over != "ranks"  # whole gradients, by counts
        gradients.when_over(self._over)
        hooks = [self._on_gradient(slot.index) for slot in self.slots]
        if self.leaving.home.is_needed:
            hooks = [self._line.in_turn(hook) for hook in hooks]
        self._handles: list[RemovableHandle] = [
            slot.parameter.register_post_accumulate_grad_hook(hook)
            for slot, hook in zip(self.slots, hooks, strict=True)
        ]
        self._hooks = [handle.hooks_dict_ref() or {} for handle in self._handles]  # all on the parameter
        self.detach = weakref.finalize(self, _remove, self._handles)  # takes the hooks off the parameters
        self.detach.atexit = False
        self.sharing = Sharing(self)
        in_backward.refuse_early_steps()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in the order in which they leave."""
        return self.gradients.all

    @property
    def slots(self) -> list[Slot]:
        """One slot per parameter, in registration order."""
        return self.gradients.slots

    # Questions of others.

    @property
    def has_unsummed(self) -> bool:
        """Whether a synchronised backward is running and some of its gradients are not summed yet."""
        return self.is_reducing and not self.leaving.ending and task.is_running()

    @property
    def takes_plain_mean(self) -> bool:
        """Whether `.grad` becomes the whole mean over the ranks, whichever other model has the parameter."""
        return self.gradients.is_whole and self.average.over == "ranks"

    def unsummed(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """The name of one of these that has a gradient of this rank alone, if there are other ranks."""
        if (self._touched == self._zeros and not self._returned) or self.group.size() == 1:
            return None
        asked = {id(each) for each in parameters}
        for slot, touched in zip(self.slots, self._touched, strict=True):
            grad = slot.parameter.grad
            if grad is None or id(slot.parameter) not in asked:
                continue
            # What autograd.grad returned lies elsewhere, if a script has put it there.
            alone = touched or (self._returned and not slot.holds(grad))
            if alone and not self.sharing.has_reduced(slot.index, grad):  # nor by another model that has it
                return slot.name
        return None

    # Forward.

    def learn(self) -> None:
        """From now on the graph is static: the next backward counts how often each parameter fires."""
        self.static_graph = self._learning = True
        self._first_is_over = False

    def prepare(self) -> None:
        """Before a forward whose backward will be synchronised; a collective of all ranks."""
        self._arrivals.lay_anew(self.gradients, self.leaving.overlap)
        self.leaving.prepare()
        if self.leaving.watch is not None:
            self.leaving.watch.forward()

    def arm(self, synchronise: bool) -> None:
        """After a forward with gradients. synchronise: `prepare` was called before it."""
        self._derived = self._derived and self.armed and synchronise  # no backward has come since then
        self.armed, self.inside = synchronise, False
        if not synchronise:
            self.gradients.stay()

    @property
    def _awaits_any(self) -> bool:
        """Whether the next gradient begins a backward, by outputs or not: one of gradients may lead through
        none, and may come after one of the outputs they are of; one inside of forward has none yet."""
        return self.armed or self._derived or self.inside

    @task.uncompiled
    def on_output_gradient(self, behind: task.Edges, gradient: torch.Tensor) -> torch.Tensor | None:
        """A hook on an output of a prepared forward. behind: the graph's edges that its gradient goes
        on to."""
        if self._closed:
            raise RuntimeError("this backward is of a forward before regroup(): run that forward again")
        if not self.is_reducing or self._end() is None:
            if task.writes(behind):
                self.begin()
            else:
                self._returned, self._derived = True, self._derived or torch.is_grad_enabled()
        return self.average.cleaned(gradient)

    @task.uncompiled
    def on_local_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A hook on the outputs of a forward in no_sync."""
        if self._closed:
            return None
        if not self._local:
            self._local = True
            task.at_end(self._end_local)
            if self._weighs and self._touched == self._zeros:
                older.note(self.slots, self.sharing)
        return self.average.cleaned(gradient)

    @task.uncompiled
    def _end_local(self) -> None:
        self._local = False

    def begin(self) -> None:
        """The first gradient of a synchronised backward has come."""
        if self._take_up():
            self._end = task.at_end(partial(self.finish))

    def begin_several(self) -> None:
        """After `prepare`: the following backwards count as one, which `finish` ends.

        Buckets leave in the last of them, which `expect_last` announces, or else in `finish`. No backward
        waits for buckets, so ranks may exchange messages between them.
        """
        if self._take_up():
            self.gradients.stay()
            self._early, self._careful = set(range(len(self.slots))), True

    def expect_last(self, parameters: Iterable[torch.Tensor]) -> None:
        """After `begin_several`: the next backward is the last one that brings gradients to `parameters`."""
        ids = {id(each) for each in parameters}
        self._early -= {slot.index for slot in self.slots if id(slot.parameter) in ids}

    def _take_up(self) -> bool:
        """Get ready for gradients to be synchronised. False if somebody removed the hooks: then gradients
        stay on this rank."""
        if self.is_reducing:
            self._recover()  # that backward has raised
        if not self._handles:
            return False
        if (owner := self._owner()) is not None:
            owner.tell_backward()
        left = self.sharing.taken()
        self.is_reducing, self._returned = True, False
        self._come_last()
        self.start(left=left)
        return True

    def _come_last(self) -> None:
        """Put our hooks after those that others have added since, which may change gradients."""
        if max(map(len, self._hooks)) == 1:
            return
        for handle, hooks in zip(self._handles, self._hooks, strict=True):
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # torch, in C++, would not see move_to_end

    def _arrive(self, index: int) -> bool:
        """A gradient came before any backward began: whether it is to be reduced."""
        local, others_armed = self._local, False
        for other in self.sharing.with_parameter(index):
            if other.is_reducing:
                return False  # in the backward of another model, which reduces it
            local, others_armed = local or other._local, others_armed or other._awaits_any
        if self._awaits_any and not local:
            self.begin()
        elif local or not others_armed:
            self._touched[index] = 1
        return self.is_reducing

    def start(self, *, present: bool = True, left: Collection[int] = ()) -> None:
        """Reset everything for the beginning of a backward. left: parameters that another model reduces."""
        self.leaving.start()
        self._left, self._early = left, set()
        self._careful = self._arrivals.noting or self._learning or bool(left)
        self._absent = []
        self.used.begin()
        self._present = present
        self._line.stand(self)
        self._graphed = torch.is_grad_enabled() and task.is_running()  # create_graph=True
        for bucket in self.buckets:
            bucket.pending, bucket.scale = len(bucket.slots), None
        if self.average.over != "ranks":
            self._forget_what_was_dropped()  # gradients set to None between the forward and now
        if self._weighs:
            older.set_aside(self.slots, self._touched, self.sharing)
        self.gradients.start()
        for index in left:
            self._leave(self.slots[index])
        self.average.begin(present=present)
        if self._suspicion is not None:
            self.average.factor()  # or its collective would look like one of the module's own
            self._suspicion.begin()
        if self.leaving.watch is not None:
            self.leaving.watch.backward()

    def _leave(self, slot: Slot) -> None:
        """Leave a gradient to another model, which reduces it in this backward; this bucket gets zeros in
        its place."""
        slot.bucket.pending -= 1
        if slot.holds(slot.parameter.grad):
            slot.parameter.grad = slot.view.detach().clone()
        slot.view.zero_()

    # Backward.

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        """The hook that autograd calls after it has written a parameter's gradient. Every microsecond
        counts here.

        The hook must not refer to this reducer, which refers to the parameter: Python's garbage collector
        does not see a cycle through such a hook, and would free neither.
        """
        keep = self.gradients.is_whole
        multiply = torch.mul if keep else _multiply
        known = weakref.ref(self)

        @task.uncompiled
        def on_gradient(parameter: torch.Tensor) -> None:
            reducer = known()
            if reducer is None or (not reducer.is_reducing and not reducer._arrive(index)):
                return
            grad = parameter.grad
            if grad is None:
                return  # an undefined gradient: as if none had come
            slot = reducer.gradients.slots[index]
            if grad.layout is not torch.strided:
                raise refusals.sparse(slot)
            fired = reducer._fired[index] = reducer._fired[index] + 1
            if (reducer._careful or fired != slot.uses) and not reducer._complete(slot):
                return
            bucket = slot.bucket
            if not bucket.attached:
                reducer.leaving.attach(bucket)
            view, scale = slot.view, bucket.scale
            if scale is None or reducer._graphed:
                reducer._put(grad, slot)
            else:
                multiply(grad, scale, out=view)
            try:
                parameter.grad = view if keep else None
            except RuntimeError:
                reducer.gradients.check_kind(slot)
                raise
            bucket.pending -= 1
            if bucket.pending <= 0:
                if bucket.pending:
                    raise refusals.late(slot)
                reducer.leaving.full(bucket)
                reducer.let_go()

        return on_gradient

    def _complete(self, slot: Slot) -> bool:
        """Whether this was the parameter's last gradient in this backward. The first backward notes
        the order."""
        if slot.index in self._left:
            self._fired[slot.index] = 0
            return False
        if slot.index in self._early:
            self._fired[slot.index], self._touched[slot.index] = 0, 1
            return False
        fired = self._fired[slot.index]
        if fired > slot.uses and not self._learning:
            if self.static_graph:
                raise refusals.changed(slot, fired)
            raise refusals.second(slot, self.gradients.is_whole)
        if self._arrivals.noting:
            self._arrivals.came(slot)
        return fired == slot.uses and not self._learning

    def _put(self, grad: torch.Tensor | None, slot: Slot) -> None:
        """slot.view = grad * scale, or 0 without a gradient; grad may be the view itself."""
        if slot.bucket.scale is None:
            self._agree_on_scale()
        view, scale = slot.view, slot.bucket.scale
        assert scale is not None
        with torch.no_grad():
            if grad is None:
                view.zero_()
            else:
                _multiply(grad, scale, out=view)

    def _agree_on_scale(self) -> None:
        factor = self.average.factor()
        if self.leaving.hook is not None:
            factor *= self.group.size()  # hooks take the mean over ranks by themselves
        for bucket in self.buckets:
            bucket.scale = _factor(factor, bucket.flat.dtype)

    def let_go(self) -> None:
        """Let all ready buckets leave, in the same order on every rank."""
        if not self.leaving.may_leave(self._line) or not self._line.is_first(self):
            return  # backward is not over yet, or all have left, or it is another model's turn
        if self.leaving.all_ready_leave():
            if self.leaving.hook is None:
                self._exchange_used()
            self._line.leave(self)

    def _over(self, buckets: Sequence[Bucket]) -> None:
        """No more gradients come to these buckets in this backward: they leave, full or not."""
        if not self.is_reducing or not self._line.is_first(self):
            return
        self.leaving.before_their_turn(buckets, self._fill_up)

    def _fill_up(self, bucket: Bucket) -> None:
        if bucket.pending:
            with torch.no_grad():
                self._absent += self._fill_in(bucket.slots)

    # The end of backward.

    @task.uncompiled
    def finish(self) -> None:
        """No more gradients will come: reduce the rest, wait for all buckets, and set every .grad."""
        if not self.is_reducing:
            return  # the backward that this should end has raised, and its graph ran once more
        around = torch._C._current_autograd_node()
        ahead = self._line.ahead_of(self)
        if around is not None and (ahead or any(bucket.pending for bucket in self.buckets)):
            self._finish_after(around)
            return
        lost = self._left and any(other in self.sharing.others() for other in ahead)
        self._line.pass_over(ahead)  # they would have ended by now: their backward has raised
        with torch.no_grad():
            self._finish()
        self.is_reducing = self.armed = False
        if lost:
            raise refusals.lost(self.slots[min(self._left)])
        if (owner := self._owner()) is not None:
            owner.refuse_newcomers()

    def _finish_after(self, node: torch.autograd.graph.Node) -> None:
        """This backward ran inside of `node`, as re-entrant checkpoints do; the backward around it
        goes on."""
        end = self._end()
        assert end is not None

        @task.uncompiled
        def follow(*_gradients: Any) -> None:
            handle.remove()
            task.at_end(end)

        handle = node.register_hook(follow)

    def _finish(self) -> None:
        watch = self.leaving.watch
        if watch is not None:
            watch.backward_ended()
        if self._suspicion is not None:
            self._suspicion.end()
            self._suspicion = None
        left = self.leaving.gone
        absent = self._absent + self._fill_in(
            [slot for slot in self.slots if slot.bucket.index not in left] if left else self.slots
        )
        self.leaving.ending = True
        self.let_go()
        assert self.leaving.all_left, "a bucket is left behind"
        self._wait_for_all(read=bool(absent) or self._learning)
        self.gradients.finish(absent, self.used.anywhere)
        self._learning = False
        self._end_first()
        self._fired[:] = self._touched[:] = self._zeros
        while self.awaited:
            self.awaited.pop().wait()
        in_backward.step(self.stepping)
        if watch is not None:
            watch.ended()

    def _end_first(self) -> None:
        """All ranks that took part in the first backward, if only as shadows, rebuild the buckets, or
        none does."""
        self._first_is_over = True
        self._arrivals.end()

    def _fill_in(self, slots: Sequence[Slot]) -> list[Slot]:
        """Fill in what is not in the buckets yet; returns the slots whose parameters this rank did
        not use."""
        absent: list[Slot] = []
        if not any(bucket.pending for bucket in self.buckets):
            return absent
        for slot in slots:
            parameter, fired = slot.parameter, self._fired[slot.index]
            if (fired and fired == slot.uses and not self._learning) or slot.index in self._left:
                continue
            grad = parameter.grad
            if self._learning:
                if fired and self._first_is_over and not self.used.anywhere[slot.index]:
                    slot.uses = 0
                    raise refusals.changed(slot, fired)
                slot.uses = fired
            elif self.static_graph and fired != slot.uses:
                raise refusals.changed(slot, fired)
            used = bool(fired) or (bool(self._touched[slot.index]) and grad is not None)
            if not used:
                absent.append(slot)
                if slot.holds(grad):
                    slot.kept = slot.view.clone()
            if not slot.bucket.attached:
                self.leaving.attach(slot.bucket)
            self._put(grad, slot)
            if not self.gradients.is_whole:
                parameter.grad = None
            elif used:
                parameter.grad = slot.view
            slot.bucket.pending -= 1
        return absent

    def _wait_for_all(self, *, read: bool) -> None:
        """Wait for all buckets. read: also read which parameters any rank used."""
        # A hook's collectives may be issued from other threads: none of ours may come in between.
        self.leaving.wait_for_all()
        if self.leaving.hook is not None:
            self._exchange_used()
        self.sums += 1
        self.used.wait(read=read)
        if self.leaving.finite is not None:  # before a rank adds what it alone may have kept
            self.leaving.finite.judge(self.buckets)

    def _exchange_used(self) -> None:
        if not (self.static_graph and self._first_is_over):  # otherwise it is known
            owner = self._owner() if self._present else None
            alike = owner.to_compare() if owner is not None else Alike()
            self.used.exchange(self._fired, self._touched, alike, self.leaving.overlap)

    def recover(self) -> None:
        """Before a forward: if the last backward raised, wait for the buckets that had left and
        reset everything."""
        if task.is_running():
            return  # a checkpoint that holds this model runs it again in backward
        self._line.clear()
        self._forget_what_was_dropped()
        for reducer in (self, *self.sharing.others()):
            reducer._recover()

    def _recover(self) -> None:
        self._local = False
        if not self.is_reducing:
            return
        self.is_reducing = self.armed = False
        self._arrivals.again()
        self._fired[:] = self._zeros
        for slot in self.slots:
            slot.kept = slot.older = None
        self.leaving.drop()
        self.used.wait(read=False)  # the next collective uses the same memory

    def _forget_what_was_dropped(self) -> None:
        """Drop the counts of no_sync gradients that somebody set to None: they must not enter the mean."""
        touched = [slot for slot, was in zip(self.slots, self._touched, strict=True) if was]
        if touched and all(slot.parameter.grad is None for slot in touched):
            self._touched[:] = self._zeros
            self.average.forget()

    # A rank that has run out of inputs.

    def shadow(self) -> None:
        """Take part in the collectives of one backward, with nothing to give."""
        with torch.no_grad():
            self.start(present=False)
            self._agree_on_scale()
            for slot in self.slots:
                # With weights, micro-batches before the end count: their weights are in the sum already.
                left = self._touched[slot.index] and self.average.over != "ranks"
                if not slot.bucket.attached:
                    self.leaving.attach(slot.bucket)
                self._put(slot.parameter.grad if left else None, slot)
                if left and not self.gradients.is_whole:
                    slot.parameter.grad = None
            for bucket in self.buckets:
                bucket.pending = 0
            self.leaving.ending = True
            self.let_go()
            self._wait_for_all(read=self.static_graph or not self.gradients.is_whole)
            # An ended rank may keep its own whole gradients; but it still owns its part of a sharded model.
            self.gradients.finish([] if self.gradients.is_whole else self.slots, self.used.anywhere)
            self._touched[:] = self._zeros
            self._end_first()

    def close(self) -> None:
        """Let go of parameters and memory, whatever is under way, and wait for nobody: ranks may be gone."""
        self._closed = True
        self.is_reducing = self.armed = False
        self.detach()
        self._line.clear()
        self.average.give_up()
        # The graph of a failed forward may refer to this reducer for long; the group must not live that long.
        del self.group, self.average
        self._suspicion = None
        self.used.give_up()
        self.awaited, self.stepping = [], []
        self.leaving.give_up()
        self.gradients.let_go()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _factor(number: float, dtype: torch.dtype) -> torch.Tensor | float:
    """`number` as a factor that torch multiplies a tensor of `dtype` by to the same bits, in the least time.

    From a float, torch makes a tensor in each call, which takes as long as multiplying 8 elements, and then
    another one in `dtype`. For dtypes of fewer than 32 bits the factor stays a float, which it may not fit.
    """
    if dtype in (torch.float32, torch.float64):
        return torch.tensor(number, dtype=dtype, device="cpu")
    return number


def _multiply(grad: torch.Tensor, factor: torch.Tensor | float, *, out: torch.Tensor) -> torch.Tensor:
    """torch.mul, but rounded as `out` is, which may have more bits than the gradient."""
    if out.dtype.itemsize > grad.dtype.itemsize:
        return out.copy_(grad).mul_(factor)
    return torch.mul(grad, factor, out=out)
