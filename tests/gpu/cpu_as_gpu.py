"""The CPU taken for a GPU: each access to memory is looked at, whether it is behind what it has to be behind.

    lane      what has one order: the host, each stream, and NCCL's own stream of each group
    clock     of a lane: how far each lane is known to have come when it goes on
    access    of some bytes by a lane, at a place in its order
    race      two accesses of the same bytes, one of them a write, of which the later one is not known to come
              behind the earlier; or memory that others get while a lane may still be in it

All is computed at once, so values are right, and only the order is made up. Nobody knows of a lane that it
has come further than somebody has waited for: what would go well by luck is found as well. An operation on
tensors of two devices is refused, as CUDA does. All ranks of a group are taken to be as this one.

Not as on a GPU: backward is on the stream on which it is called, and no tensor is of two GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from imece.collectives import checks, execute, native, streams, wire
from imece.data_parallel import shard

CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_DEVICE, _RESIZE, _RUN = torch.Tensor.device, torch.UntypedStorage.resize_, threading.Thread.run
_TOLD_TO_HOST = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
_UNTOUCHED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}  # memory, unwritten
_COPIES = {"copy_", "_to_copy"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}  # whose second argument is the indices
Clock = dict[int, int]


class Race(AssertionError):
    """Nothing orders what has to be in order. All are kept: a thread that is late may raise one when nobody
    waits for it any more."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        gpu.races.append(self)


def _merge(into: Clock, other: Clock) -> None:
    for lane, at in other.items():
        into[lane] = max(into.get(lane, 0), at)


class Stream:
    """Stands for torch.cuda.Stream; the host is one too."""

    device = CUDA

    def __init__(self, device: object = None, priority: int = 0, name: str = "") -> None:
        self.number = len(gpu.lanes)
        self.name = name or f"stream {self.number}"
        self.clock: Clock = {}
        gpu.lanes.append(self)

    def go_on(self) -> int:
        """The place of what comes next, of which the host tells this one now."""
        _merge(self.clock, gpu.host.clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        gpu.look_for_what_went()
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, **_: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or gpu.current).clock)

    def query(self) -> bool:
        return all(gpu.host.clock.get(lane, 0) >= at for lane, at in self.clock.items())

    def synchronize(self) -> None:
        if not self.query():
            gpu.host_waits("Event.synchronize", self.clock)

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise Race("the host asks for the time between events that are not known to be over")
        return 0.0


@dataclass
class _Access:
    low: int  # bytes in the storage
    high: int
    lane: int
    at: int
    writes: bool
    what: str


@dataclass
class _Memory:
    """Of one storage."""

    known: StorageWeakRef
    on_gpu: bool
    pinned: bool
    taken_on: Stream
    accesses: list[_Access] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)  # by record_stream


class _Here(threading.local):
    stream: Stream | None = None
    device: torch.device | None = None  # of what is being made; None: of what it is made from
    pins = False


class _Gpu:
    def begin(self) -> None:
        self.lock, self.here = threading.RLock(), _Here()
        self.lanes: list[Stream] = []
        self.host, self.main = Stream(name="the host"), Stream(name="the default stream")
        self.memory: dict[int, _Memory] = {}
        self.nccl: dict[str, Stream] = {}  # by group
        self.waits: list[str] = []  # of the host for the GPU
        self.launchers: set[str] = set()  # threads that have begun a collective
        self.races: list[Race] = []
        self.over = False  # a thread may still be about to compute

    def end(self) -> None:
        """Nothing is computed any more, in memory that others may let go of now."""
        with self.lock:
            self.over = True

    @property
    def current(self) -> Stream:
        return self.here.stream or self.main

    def host_waits(self, what: str, clock: Clock) -> None:
        self.waits.append(what)
        _merge(self.host.clock, clock)

    def host_waits_for_all(self) -> None:
        for lane in self.lanes[1:]:
            self.host_waits("synchronize", lane.clock)

    def of(self, tensor: Tensor) -> _Memory | None:
        with torch._C.DisableTorchFunction():
            found = self.memory.get(tensor.untyped_storage()._cdata)
        return found if found is not None and not found.known.expired() else None

    def has(self, tensor: Tensor) -> bool:
        return (found := self.of(tensor)) is not None and found.on_gpu

    def made(self, tensor: Tensor, on_gpu: bool) -> None:
        self.look_for_what_went()
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        self.memory[storage._cdata] = _Memory(StorageWeakRef(storage), on_gpu, self.here.pins, self.current)

    def look_for_what_went(self) -> None:
        """What nobody has any more goes back to torch's allocator."""
        with self.lock:
            for key in [key for key, each in self.memory.items() if each.known.expired()]:
                self.goes_back(self.memory.pop(key))

    def goes_back(self, memory: _Memory) -> None:
        """Others get it in the order of the stream that took it, behind the streams that were recorded."""
        behind = [memory.taken_on, *memory.recorded, self.host]  # what is told next comes behind the host
        for each in memory.accesses if memory.on_gpu else ():  # pinned memory waits by itself
            known = any(lane.clock.get(each.lane, 0) >= each.at for lane in behind)
            if not known and each.lane != self.host.number:
                what = f"{self.lanes[each.lane].name} may still be in {each.what}"
                raise Race(f"memory that {memory.taken_on.name} took goes back while {what}")
        memory.accesses, memory.recorded, memory.taken_on = [], [], self.current

    def run(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], lane: Stream) -> None:
        with self.lock:
            at = lane.go_on()
            for writing, tensors in ((False, reads), (True, writes)):
                for tensor in tensors:
                    self._access(tensor, lane, at, writing, what)

    def _access(self, tensor: Tensor, lane: Stream, at: int, writes: bool, what: str) -> None:
        memory = self.of(tensor)
        if memory is None or not tensor.numel():
            return
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        low = int(tensor.storage_offset()) * tensor.itemsize
        high, left = low + (int(reach) + 1) * tensor.itemsize, []
        with torch._C.DisableTorchFunction():
            if high > tensor.untyped_storage().nbytes():
                raise Race(f"{lane.name} is in {what} in memory that went back")
        for old in memory.accesses:
            beside = old.high <= low or high <= old.low
            if not beside and (writes or old.writes) and lane.clock.get(old.lane, 0) < old.at:
                mine, its = ("writes" if each else "reads" for each in (writes, old.writes))
                other = f"{self.lanes[old.lane].name} {its} in {old.what}"
                raise Race(f"{lane.name} {mine} in {what} what {other}, and has not waited for it")
            inside = low <= old.low and old.high <= high
            if not inside or not (writes or (old.lane == lane.number and not old.writes)):
                left.append(old)  # what comes behind this one is not known to be behind that
        memory.accesses = [*left, _Access(low, high, lane.number, at, writes, what)]

    def collective(
        self, what: str, group: dist.ProcessGroup, reads: list[Tensor], writes: list[Tensor],
        compute: Callable[[], object],
    ) -> Any:  # fmt: skip
        """Begins behind the current stream, on NCCL's; its work keeps the tensors until a stream waits."""
        tensors = [*reads, *writes]
        there = sum(map(self.has, tensors))
        if 0 < there < len(tensors):
            raise Race(f"{what} of tensors of two devices")
        with self.lock:
            lane = self.host
            if there:
                if group.group_name not in self.nccl:
                    self.nccl[group.group_name] = Stream(name="NCCL")
                lane = self.nccl[group.group_name]
                self.launchers.add(threading.current_thread().name)
                lane.wait_stream(self.current)
            self.run(what, reads, writes, lane)
            event = lane.record_event()
        with self.lock, torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            if not self.over:
                compute()

        def wait(*_: object) -> bool:
            self.current.wait_event(event)
            tensors.clear()
            return True

        return SimpleNamespace(wait=wait, is_completed=lambda: not there or event.query())


gpu = _Gpu()


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if func.namespace not in ("aten", "imece"):
            return func(*args, **kwargs)
        name, given = schema.name.partition("::")[2], _tensors((args, kwargs))
        there = [each for each in given if gpu.has(each)]
        apart = [each for each in given if each.dim() and not gpu.has(each)] if there else []
        indices = _tensors(args[1]) if name in _INDEXES else []  # those on the host are copied
        if name not in _COPIES and {id(each) for each in apart} - {id(each) for each in indices}:
            raise Race(f"{name} of tensors of two devices")
        written: list[Tensor] = []
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _tensors(args[at] if at < len(args) else kwargs.get(argument.name))
        found = func(*args, **kwargs)
        results, into = _tensors(found), {id(each) for each in written}
        for each in results:
            if gpu.of(each) is None:
                gpu.made(each, gpu.here.device.type == "cuda" if gpu.here.device else bool(there))
        if name in _UNTOUCHED or any(_is_view(each) for each in schema.returns):
            return found
        written += [each for each in results if id(each) not in into]
        on_gpu = any(map(gpu.has, (*there, *results)))
        # A number on the host goes with the launch.
        passed = on_gpu and name not in _COPIES
        numbers = [each for each in given if passed and not each.dim() and not gpu.has(each)]
        gpu.run(name, numbers, [], gpu.host)
        read = [each for each in given if id(each) not in into | {id(number) for number in numbers}]
        lane = gpu.current if on_gpu else gpu.host
        gpu.run(name, read, written, lane)
        across = [gpu.of(each) for each in (*read, *written) if on_gpu and not gpu.has(each)]
        goes_on = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        blocks = not (goes_on and all(each is not None and each.pinned for each in across))
        counts = any(each.dtype in (torch.bool, torch.uint8) or not gpu.has(each) for each in indices)
        if (there and (name in _TOLD_TO_HOST or counts)) or (across and blocks and not indices):
            gpu.host_waits(name, lane.clock)
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in _pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def _is_device(given: object) -> bool:
    return isinstance(given, torch.device) or (isinstance(given, str) and given in ("cpu", "cuda"))


def _is_view(result: Any) -> bool:
    return result.alias_info is not None and not result.alias_info.is_write


class _Functions(TorchFunctionMode):
    """What would look for a GPU before any operation is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, here = dict(kwargs or {}), getattr(func, "__name__", ""), gpu.here
        if name == "tolist" and gpu.has(args[0]):  # it copies, and no operation is called
            with self:
                return args[0].cpu().tolist()
        if func is torch.Tensor.backward:
            (loss,) = args
            with self:  # for what hooks do
                torch.autograd.graph._engine_run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
                    accumulate_grad=True,
                )  # fmt: skip
            return None
        named = kwargs.get("device") or (next(filter(_is_device, args), None) if name == "to" else None)
        if isinstance(func, torch._ops.OpOverload) or not (
            named or kwargs.get("pin_memory") or name == "cpu"
        ):
            return func(*args, **kwargs)
        before = here.device, here.pins
        here.device, here.pins = torch.device(named or "cpu"), bool(kwargs.pop("pin_memory", False))
        try:
            args = tuple(_CPU if _is_device(each) else each for each in args)
            kwargs |= {"device": _CPU} if kwargs.get("device") else {}
            moves = name in ("to", "cpu") and gpu.has(args[0]) != (here.device.type == "cuda")
            if moves:
                blocking = not kwargs.pop("non_blocking", False)
                like = func(*args, **kwargs).detach()
                return torch.empty_like(like).copy_(args[0].detach(), non_blocking=not blocking)
            found = func(*args, **kwargs)
            if isinstance(found, Tensor) and gpu.of(found) is None:  # torch.tensor is no operation
                gpu.made(found, here.device.type == "cuda")
            if func in (torch.tensor, torch.as_tensor) and here.device.type == "cuda":
                gpu.host_waits(name, gpu.current.clock)  # a copy of memory that is not pinned
            return found
        finally:
            here.device, here.pins = before


@contextlib.contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before, gpu.here.stream = gpu.here.stream, stream or gpu.here.stream
    try:
        yield
    finally:
        gpu.here.stream = before


def _device(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return CUDA if gpu.has(tensor) else _DEVICE.__get__(tensor)


def _resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    with gpu.lock:
        memory = gpu.memory.get(storage._cdata)
        if memory is not None and storage.nbytes() != nbytes:
            gpu.look_for_what_went()
            gpu.goes_back(memory)
        return _RESIZE(storage, nbytes)


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    if (memory := gpu.of(tensor)) is not None:
        memory.recorded.append(stream)


def _run(thread: threading.Thread) -> None:
    with _Functions(), _Operations():  # type: ignore[no-untyped-call]
        _RUN(thread)


def _all_reduce(flat: Tensor, op: str, group: dist.ProcessGroup) -> Any:
    return gpu.collective(
        "all_reduce", group, [], [flat], lambda: flat.mul_(group.size()) if op == "sum" else None
    )


def _reduce_scatter(output: Tensor, flat: Tensor, op: str, group: dist.ProcessGroup) -> Any:
    times = group.size() if op == "sum" else 1
    own = flat.view(group.size(), -1)[group.rank()]
    return gpu.collective("reduce_scatter", group, [flat], [output], lambda: output.copy_(own * times))


def _all_gather(output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Any:
    rows = output.view(group.size(), -1)
    others = [each for each in rows if each.data_ptr() != flat.data_ptr()]  # in place the own one stays
    return gpu.collective(
        "all_gather", group, [flat], others, lambda: rows.copy_(flat.reshape(-1).clone().expand_as(rows))
    )


def _broadcast(flat: Tensor, src: int, group: dist.ProcessGroup) -> Any:
    return gpu.collective("broadcast", group, [], [flat], lambda: None)


def _all_to_all(output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Any:
    rows, own = output.view(group.size(), -1), flat.view(group.size(), -1)[group.rank()]
    return gpu.collective("all_to_all", group, [flat], [output], lambda: rows.copy_(own.expand_as(rows)))


def _post(sends: Sequence[Any], receives: Sequence[Any], group: dist.ProcessGroup, **_: object) -> list[Any]:
    reads, writes = [each.tensor for each in sends], [each.tensor for each in receives]
    pairs = list(zip(writes, reads, strict=True))
    copied = lambda: [here.copy_(there) for here, there in pairs]  # noqa: E731
    return [gpu.collective("messages", group, reads, writes, copied)]


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[_Gpu]:
    """Inside, tensors made on "cuda" are taken for a GPU's, and NCCL moves them. A Race is raised where it is
    seen, and at the end of the block in the place of what came of it if nobody has heard of it there.

    In a process of its own: threads that are there already know nothing of it.
    """
    gpu.begin()
    stand_ins: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
            "current_device": lambda: 0, "set_device": lambda _: None, "Stream": Stream, "Event": Event,
            "stream": _on, "current_stream": lambda _=None: gpu.current,
            "is_current_stream_capturing": lambda: False, "manual_seed": lambda _: None,
            "synchronize": lambda _=None: gpu.host_waits_for_all(),
        }),
        # An optimizer's step asks whether a graph is captured: torch 2.11 the module above, later ones the
        # build's accelerator, and a CUDA build then the driver.
        (torch.accelerator, {"current_accelerator": lambda check_available=False: None}),
        (torch.Tensor, {
            "device": property(_device), "is_cuda": property(gpu.has), "record_stream": _record_stream,
            "is_cpu": property(lambda each: not gpu.has(each)),
            "is_pinned": lambda each: (memory := gpu.of(each)) is not None and memory.pinned,
        }),
        (native, {
            "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather,
            "broadcast": _broadcast, "all_to_all": _all_to_all,
        }),
        (execute, {"post": _post}),
        (wire, {"post": _post}),
        (checks.Checker, {"is_nccls": lambda _, device: device is not None and device.type == "cuda"}),
        (streams, {"_here": streams._Here()}),
        (shard, {"_has_others": lambda _: True}),
        (torch.UntypedStorage, {"resize_": _resize}),
        (threading.Thread, {"run": _run}),
    ]  # fmt: skip
    with contextlib.ExitStack() as inside:
        for owner, names in stand_ins:
            for name, stand_in in names.items():
                inside.enter_context(mock.patch.object(owner, name, stand_in))
        inside.enter_context(_Functions())
        inside.enter_context(_Operations())  # type: ignore[no-untyped-call]
        inside.callback(gpu.end)
        try:
            yield gpu
        finally:
            if gpu.races:
                raise gpu.races[0]
