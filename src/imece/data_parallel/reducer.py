"""Gradient ready -> bucket ready -> reduce, while backward goes on.

The words:
    slot      one parameter: its view into a bucket, and how far it is in this backward
    ready     its gradient is in the bucket, divided by what the average is over
    bucket    flat; leaves as one collective as soon as all its slots are ready and all buckets before it left
    fired     autograd has written this parameter's gradient in this backward
    touched   it did so in a backward before, that was not synchronised (no_sync)

A backward is synchronised if it comes through an output of a forward that was prepared for it. `begin` runs
when the first gradient reaches such an output, `finish` when that backward is over: parameters that have not
fired then are unused here, and whether any rank used them is told by one more small collective. Nobody walks
the graph, and nobody has to say beforehand that parameters will stay unused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from imece import layout
from imece.collectives import ops
from imece.collectives.auto import links_of
from imece.collectives.choice import predict
from imece.collectives.pending import Pending
from imece.collectives.shared_memory import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.average import Average
from imece.data_parallel.cap import best_cap
from imece.data_parallel.finite import Finite
from imece.data_parallel.grad_bucket import GradBucket, Hook
from imece.data_parallel.trace import BucketTrace
from imece.data_parallel.watch import Watch

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter on its way."""

    index: int  # in registration order
    name: str
    parameter: torch.Tensor
    bucket: Bucket
    view: torch.Tensor  # shaped and strided as the parameter, in the bucket's memory
    uses: int = 1  # gradients that autograd writes in one backward
    fired: int = 0
    touched: bool = False
    kept: torch.Tensor | None = None  # the gradient of an unused parameter, until it is known to be so


@dataclass(eq=False, slots=True)
class Bucket:
    """A flat buffer that travels as one message."""

    index: int
    flat: torch.Tensor  # 1D, padded
    used_numel: int
    label: str  # for errors of the collective
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0  # slots that are not ready
    work: Pending | torch.futures.Future[Any] | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """Without the padding."""
        return self.flat[: self.used_numel]


@dataclass(frozen=True)
class Way:
    """How a bucket is reduced where no hook does it: as for ops.all_reduce."""

    schedule: str | None = None
    wire: str | None = None


class Reducer:
    """The gradients of one model's parameters, reduced over one group."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        group: dist.ProcessGroup,
        average: Average,
        *,
        cap_bytes: int | Sequence[int],
        first_bytes: int | None,
        choose_cap: bool = False,
        way: Way,
        static_graph: bool = False,
        finite: Finite | None = None,
    ) -> None:
        """named_parameters: those that want a gradient, in registration order, the same on all ranks.

        choose_cap: cap_bytes is for the first backward only; after that it is what cap.py finds.
        """
        self.group, self.average, self.way, self.finite = group, average, way, finite
        self.static_graph = static_graph
        self.hook: Hook | None = None
        self.hook_state: Any = None
        self.rebuilt = False
        self.may_rebuild = True
        self.watch: Watch | None = None
        self._cap_bytes, self._first_bytes, self._choose_cap = cap_bytes, first_bytes, choose_cap
        self._named = list(named_parameters)
        self.buckets: list[Bucket] = []
        self.slots: list[Slot] = []
        self._lay(None)
        self.armed = False  # the forward returned nothing to hang on to: the first gradient begins
        self._syncing = False
        self._next = 0  # bucket to leave next
        self._scale: float | None = None  # of gradients on their way into buckets; None: not known yet
        self._learning = static_graph  # the first backward counts how often each parameter fires
        self._order: list[int] | None = []  # slots as they fired in the first backward; None: no more wanted
        self._used_anywhere: list[int] = []  # by parameter, in the last backward that asked
        self._arrivals: list[tuple[int, float]] = []  # bytes and time of each, in that order
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._on_gradient(position))
            for position, slot in enumerate(self.slots)
        ]

    # Forward.

    def prepare(self) -> None:
        """Before a forward whose backward is to be synchronised; a collective of all ranks."""
        if self._syncing:
            self._recover()
        if self._order and not self.rebuilt and self.may_rebuild:
            self._rebuild()
        if self.watch is not None:
            self.watch.forward()

    def begin(self) -> None:
        """The first gradient has come to an output of a prepared forward."""
        if self._syncing:
            return
        self._syncing = True
        _queue_callback(self.finish)
        self.start()

    def start(self, *, present: bool = True) -> None:
        """Everything back to the beginning of a backward."""
        self._next = 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)
        self.average.begin(present=present)
        self._scale = None
        if self.watch is not None:
            self.watch.backward()

    # Backward.

    def _on_gradient(self, position: int) -> Callable[[torch.Tensor], None]:
        """What autograd calls after it has written a parameter's gradient."""

        def on_gradient(parameter: torch.Tensor) -> None:
            slot = self.slots[position]
            if not self._syncing:
                if not self.armed:
                    slot.touched = True
                    return
                self.begin()
            if parameter.grad is None:
                return  # an undefined gradient came: as if nothing had
            slot.fired += 1
            if self._learning or slot.fired < slot.uses:
                return
            if slot.fired > slot.uses:
                self._refuse_change(slot) if self.static_graph else self._refuse_second(slot)
            if self._order is not None:
                self._order.append(position)
                self._arrivals.append((parameter.nbytes, time.perf_counter()))
            self._ready(slot, parameter.grad)
            parameter.grad = slot.view

        return on_gradient

    def _ready(self, slot: Slot, grad: torch.Tensor | None) -> None:
        """`grad`, scaled, into the bucket; and the bucket goes if it was the last one."""
        scale, view, bucket = self._scale, slot.view, slot.bucket
        if scale is None:
            scale = self._scale = self._agreed_scale()
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                _put(grad, view, scale)
        else:
            _put(grad, view, scale)
        bucket.pending -= 1
        if not bucket.pending:
            self._let_go()

    def _agreed_scale(self) -> float:
        factor = self.average.factor()
        if self.hook is None:
            return factor
        return factor * self.group.size()  # hooks take the mean over ranks by themselves

    def _let_go(self) -> None:
        """All buckets that are ready, in order: the same order on every rank."""
        now = time.perf_counter() if self.watch is not None else 0.0
        while self._next < len(self.buckets) and not self.buckets[self._next].pending:
            bucket = self.buckets[self._next]
            self._next += 1
            if self.finite is not None:
                self.finite.look(bucket)
            with torch.no_grad():
                bucket.work = self._reduce(bucket)
            if self.watch is not None:
                trace = BucketTrace(bucket.index, bucket.flat.nbytes, now, time.perf_counter())
                self.watch.left(trace, bucket)

    def _reduce(self, bucket: Bucket) -> Pending | torch.futures.Future[Any]:
        if self.hook is None:
            return cast(
                Pending,
                ops.all_reduce(
                    bucket.flat, group=self.group, async_op=True, schedule=self.way.schedule,
                    wire=self.way.wire, label=bucket.label,
                ),
            )  # fmt: skip
        return self.hook(
            self.hook_state,
            GradBucket(
                bucket.index, bucket.buffer, [slot.view for slot in bucket.slots],
                [slot.parameter for slot in bucket.slots], bucket.index == len(self.buckets) - 1,
            ),
        )  # fmt: skip

    # The end of backward.

    def finish(self) -> None:
        """All gradients that will come are there: reduce the rest, wait for all, leave .grad right."""
        try:
            with torch.no_grad():
                self._finish()
        finally:
            self._syncing = self.armed = False

    def _finish(self) -> None:
        watch = self.watch
        if watch is not None:
            watch.backward_ended()
        absent = self._fill_in()
        self._let_go()
        assert self._next == len(self.buckets), "a bucket is left behind"
        used = self._wait_for_all()
        if used is not None:
            self._note_used(used, read=bool(absent) or self._learning)
        for slot in absent:
            self._settle(slot)
        if self._order is not None and not self._order:
            self._order = None
        self._learning = False
        for slot in self.slots:
            slot.fired, slot.touched = 0, False
        if self.finite is not None:
            self.finite.judge(self.buckets)
        if watch is not None:
            watch.ended()

    def _fill_in(self) -> list[Slot]:
        """What is not in the buckets yet; the slots whose parameter this rank did not use."""
        absent = []
        for position, slot in enumerate(self.slots):
            parameter, fired = slot.parameter, slot.fired
            if fired and fired == slot.uses and not self._learning:
                continue
            grad = parameter.grad
            if self._learning:
                slot.uses = fired
                if fired and self._order is not None:
                    self._order.append(position)
            elif self.static_graph and fired != slot.uses:
                self._refuse_change(slot)
            if fired or (slot.touched and grad is not None):
                self._ready(slot, grad)
                parameter.grad = slot.view
                continue
            absent.append(slot)
            if grad is slot.view:
                slot.kept = grad.clone()
            self._ready(slot, grad)
        return absent

    def _wait_for_all(self) -> Pending | None:
        """All buckets end. Returns which parameters were used anywhere, under way."""
        # A hook's collectives may follow each other from other threads: none of ours may come between.
        used = self._exchange_used() if self.hook is None else None
        for bucket in self.buckets:
            self._wait(bucket)
        return used if self.hook is None else self._exchange_used()

    def _exchange_used(self) -> Pending | None:
        """Which parameters some rank used; None if that is known already."""
        if self.static_graph and not self._learning:
            return None
        flags = bytes(bool(slot.fired or slot.touched) for slot in self.slots)
        used = torch.frombuffer(bytearray(flags), dtype=torch.uint8).to(self.buckets[0].flat.device)
        return cast(
            Pending, ops.all_reduce(used, "max", group=self.group, async_op=True, label="used parameters")
        )

    def _note_used(self, used: Pending, *, read: bool) -> None:
        flags = used.wait()
        if read:  # on a GPU reading waits for it, which only ranks with an unused parameter need to do
            assert flags is not None
            self._used_anywhere = flags.tolist()

    def _settle(self, slot: Slot) -> None:
        """A parameter that this rank did not use: another's gradient, or what was there before."""
        if self._used_anywhere[slot.index]:
            slot.parameter.grad = slot.view
        elif slot.kept is not None:
            slot.view.copy_(slot.kept)
        slot.kept = None

    def _wait(self, bucket: Bucket) -> None:
        work, bucket.work = bucket.work, None
        assert work is not None
        result = work.wait()
        if isinstance(work, Pending):
            return
        if isinstance(result, list | tuple):
            (result,) = result
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the communication hook's future gave {type(result).__name__}, not a tensor")
        buffer = bucket.buffer
        if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
            buffer.copy_(result.view(-1))

    def _recover(self) -> None:
        """The last backward raised: buckets that had left end, and all starts anew."""
        self._syncing = False
        for bucket in self.buckets:
            if bucket.work is not None:
                self._wait(bucket)
        for slot in self.slots:
            slot.fired, slot.kept = 0, None

    def _refuse_second(self, slot: Slot) -> None:
        raise RuntimeError(
            f"parameter {slot.name} got a second gradient in one backward, after its first was on its way: "
            f"it is used by several checkpointed blocks. Pass use_reentrant=False to checkpoint(), or "
            f"static_graph=True to DistributedDataParallel"
        )

    def _refuse_change(self, slot: Slot) -> None:
        raise RuntimeError(
            f"static_graph=True, but parameter {slot.name} got {slot.fired} gradients in this backward and "
            f"{slot.uses} in the first one. Leave static_graph away: unused parameters need no flag"
        )

    # A rank that has run out of inputs.

    def shadow(self) -> None:
        """The collectives of one backward, with nothing to give."""
        with torch.no_grad():
            self.start(present=False)
            for bucket in self.buckets:
                bucket.flat.zero_()
                bucket.pending = 0
            self._scale = self._agreed_scale()
            self._let_go()
            used = self._wait_for_all()
            if used is not None:
                used.wait()
            self._learning = False

    # Buckets.

    def _lay(self, order: Sequence[int] | None) -> None:
        """Buckets and views for this order of parameters; gradients that lie in old buckets move over."""
        items = [
            layout.Item(
                name,
                tuple(each.shape),
                str(each.dtype).removeprefix("torch."),
                each.itemsize,
                str(each.device),
            )
            for name, each in self._named
        ]
        self.layout = layout.build(
            items, cap_bytes=self._cap_bytes, first_bytes=self._first_bytes, order=order
        )
        moving = [
            (position, slot.parameter.grad.clone())
            for position, slot in enumerate(self.slots)
            if slot.parameter.grad is slot.view
        ]
        old, self.slots, self.buckets = self.slots, [], []
        for position, _ in moving:
            old[position].parameter.grad = None
        uses = [slot.uses for slot in old] or [1] * len(items)
        touched = [slot.touched for slot in old] or [False] * len(items)
        del old
        slots: list[Slot | None] = [None] * len(items)
        for plan in self.layout.buckets:
            names = [items[place.item].name for place in plan.places]
            label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            flat = self._memory(plan.numel, self._named[plan.places[0].item][1])
            bucket = Bucket(plan.index, flat, plan.used_numel, label)
            for place in plan.places:
                name, parameter = self._named[place.item]
                view = _view(flat[place.start : place.stop], parameter)
                slot = Slot(place.item, name, parameter, bucket, view, uses[place.item])
                slot.touched = touched[place.item]
                slots[place.item] = slot
                bucket.slots.append(slot)
            self.buckets.append(bucket)
        self.slots = [slot for slot in slots if slot is not None]
        for position, grad in moving:
            slot = self.slots[position]
            slot.view.copy_(grad)
            slot.parameter.grad = slot.view

    def _memory(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros for a bucket; where ranks of this host reduce it in place, in shared memory."""
        in_host = isinstance(self.group, SharedMemoryGroup) or self.way.schedule == "hierarchical"
        if in_host and like.device.type == "cpu":
            return shared_empty((numel,), like.dtype).zero_()
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def _rebuild(self) -> None:
        """Once: the order in which gradients really came on rank 0; those that did not come go last."""
        assert self._order is not None
        self.rebuilt = True
        seen = set(self._order)
        order = [*self._order, *(at for at in reversed(range(len(self.slots))) if at not in seen)]
        cap = self._best_cap() if self._choose_cap else 0
        agreed = torch.tensor([cap, *order], dtype=torch.int64, device=self.buckets[0].flat.device)
        ops.broadcast(agreed, 0, group=self.group, label="order of gradients")
        cap, *order = agreed.tolist()
        if cap:
            self._cap_bytes = cap
        self._order, self._arrivals = None, []
        with torch.no_grad():
            self._lay(order)

    def _best_cap(self) -> int:
        links = links_of(self.group, self.buckets[0].flat.device)
        schedule = self.way.schedule or "native"

        def seconds(nbytes: int) -> float:
            times = predict("all_reduce", nbytes, links)
            return times.get(schedule, min(times.values()))

        return best_cap(self._arrivals, seconds, self._first_bytes)[0]

    @property
    def cap_bytes(self) -> int | Sequence[int]:
        """What a bucket holds before it is closed."""
        return self._cap_bytes

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _put(grad: torch.Tensor | None, view: torch.Tensor, scale: float) -> None:
    """view = grad * scale; grad may be the view itself."""
    if grad is None:
        view.zero_()
    elif grad is not view:
        if scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
    elif scale != 1.0:
        view.mul_(scale)


def _view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`flat`, [numel], shaped and strided as the parameter if that leaves no gaps."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
