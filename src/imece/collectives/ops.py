"""The collectives of imece, on any torch group: what moves between ranks, and how many bytes.

Common to all of them. group: a torch ProcessGroup that holds this rank, None for all ranks; ranks in
arguments (src, dst) count within the group, and every rank of the group makes the call. op: "sum", "avg",
"min", "max", "product", or torch's ReduceOp. dtypes: fp64, fp32, fp16, bf16, int64, int32, uint8, bool (for
bools, sum and max mean "any", the others "all"). An average of integers is that of their sum in int64,
truncated toward zero; it is exact unless the sum overflows.
Tensors may have any shape, be empty, and need not be contiguous; tensors that are written to must not be
expanded. label: what the tensor is, for errors and the recorder.

A synchronous call returns its tensor. With async_op=True the call returns a `Pending`: `wait(timeout_s)`
gives the tensor, `done()` asks. schedule: None for the backend's own way, a name of schedules.py, or "auto"
(links.py).

M is the bytes of the whole tensor and N the number of ranks. Errors: ValueError for arguments that make no
sense and TypeError if there is no tensor, both before anything is sent; CollectiveError and its kinds for
calls that fail.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, TypeGuard, Unpack, overload

import torch
import torch.distributed as dist

from imece import mesh
from imece.collectives import auto, hierarchical, native, over_hosts, pending
from imece.collectives.calls import (
    Call,
    copy_back,
    flat_place,
    group_or_default,
    in_shared_memory,
)
from imece.collectives.execute import run_schedule
from imece.collectives.messages import Recv, Send, exchange, recv, send
from imece.collectives.pending import Pending, wait_for
from imece.collectives.reduction import TORCH_OPS, flattened, landed, op_name, prepared, shares_memory
from imece.collectives.schedules import build
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.tensors import check_rank, check_tensor, overlap
from imece.collectives.wire import all_reduce_packed, check_sum, reduce_scatter_packed

__all__ = [
    "Pending",
    "Recv",
    "Send",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "exchange",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
    "sum_of_rows",
]

Tensor = torch.Tensor
Group = dist.ProcessGroup


class Options(TypedDict, total=False):
    """What the overloads below, which type checkers read, have in common."""

    group: Group | None
    schedule: str | None
    label: str


class Wired(Options, total=False):
    wire: str | None


class Parted(Options, total=False):
    parts: int | None


@overload
def all_reduce(
    tensor: Tensor, op: object = "sum", *, async_op: Literal[False] = False, **options: Unpack[Wired]
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor, op: object = "sum", *, async_op: Literal[True], **options: Unpack[Wired]
) -> Pending: ...
@overload
def all_reduce(
    tensor: Tensor, op: object = "sum", *, async_op: bool, **options: Unpack[Wired]
) -> Tensor | Pending: ...
def all_reduce(
    tensor: Tensor,
    op: object = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    schedule: str | None = None,
    wire: str | None = None,
    label: str = "",
) -> Any:
    """Reduce over all ranks, in place on every rank; all get the same bits.

    tensor: the same shape and dtype on every rank. Bytes sent a rank: 2(N−1)/N · M natively and with schedule
    "ring"; log2 N · M with "recursive_doubling"; "tree" and "root" lead through rank 0; "hierarchical" needs
    the mesh's hosts. wire="bf16" or "int8": floating point, sum and avg only, a half or a quarter of a ring's
    bytes, sums in fp32 (wire.py, wire_formats.py); with schedule "hierarchical", between hosts only.

    op: "sum", "avg", "min", "max", "product", or torch's ReduceOp. schedule: one of these names, "auto" for
    the fastest by the links, None for the backend's own way.
    group: a ProcessGroup that holds this rank; None for all ranks, and each of them makes the call. async_op:
    return a `Pending` at once, whose wait() gives the tensor. label: the tensor's name in errors.
    MismatchError if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one
    comes too late; more in help("imece.collectives.ops").
    """
    check_tensor("all_reduce", tensor)
    group = group if group is not None else group_or_default(None)
    if type(op) is str and op in TORCH_OPS and wire is None and _runs_now(group, async_op, schedule, tensor):
        group.run_now("all_reduce", tensor, tensor, op, label=label)
        return tensor
    group, name = group_or_default(group), op_name(op)
    if wire is not None:
        _check_wire(tensor, name, schedule, wire)
    schedule = auto.schedule_for("all_reduce", schedule, tensor, group)
    call = Call("all_reduce", group, tensor, name, label=label, way=_way(schedule, wire))
    hosts = over_hosts.hosts_of(call) if schedule == "hierarchical" else None
    if hosts is not None:
        return over_hosts.start(
            call, hosts, lambda groups: hierarchical.all_reduce(tensor, groups, name, wire), tensor, async_op,
            shared=tensor,
        )  # fmt: skip
    if wire is not None:
        return call.scheduled(
            lambda: all_reduce_packed(tensor, group, name, wire, collective=not async_op), tensor, async_op
        )
    schedule = "ring" if schedule == "hierarchical" else schedule
    world_size = group.size()
    if schedule is None:
        flat, base, back = _ready(tensor, name, group)
        return call.native(
            lambda: native.all_reduce(flat, base, group),
            tensor,
            lambda: landed(flat, tensor, back, world_size),
            async_op,
        )

    def run() -> None:
        flat, base = prepared(tensor, name, world_size)
        run_schedule(build("all_reduce", schedule, group.rank(), world_size, flat.numel()), flat, group, base)
        landed(flat, tensor, name, world_size)

    return call.scheduled(run, tensor, async_op)


@overload
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: object = "sum",
    *,
    async_op: Literal[False] = False,
    **options: Unpack[Wired],
) -> Tensor: ...
@overload
def reduce_scatter(
    output: Tensor, input: Tensor, op: object = "sum", *, async_op: Literal[True], **options: Unpack[Wired]
) -> Pending: ...
@overload
def reduce_scatter(
    output: Tensor, input: Tensor, op: object = "sum", *, async_op: bool, **options: Unpack[Wired]
) -> Tensor | Pending: ...
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: object = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    schedule: str | None = None,
    wire: str | None = None,
    label: str = "",
) -> Any:
    """Reduce `input` over all ranks, and put slice `rank` of it, in flat order, into `output`;
    returns output.

    input: N times as many elements as output, of its dtype. Bytes sent a rank: (N−1)/N · M, M being the
    input's; with schedule "hierarchical" (K−1)/K · M/H of them between K hosts of H ranks. output may be its
    own slice of a contiguous input: then nothing is copied, and the other slices of the input are scratch.
    wire: as for all_reduce, but the sum is not rounded. ValueError if the sizes or dtypes do not fit.

    op, schedule: as for all_reduce.
    group: a ProcessGroup that holds this rank; None for all ranks, and each of them makes the call. async_op:
    return a `Pending` at once, whose wait() gives output. label: the tensor's name in errors. MismatchError
    if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one comes too late;
    more in help("imece.collectives.ops").
    """
    group, name = group_or_default(group), op_name(op)
    world_size = group.size()
    _check_sizes("reduce_scatter", "input", input, "output", output, world_size)
    if wire is None and _runs_now(group, async_op, schedule, input, output):
        group.run_now("reduce_scatter", input, output, name, label=label)
        return output
    if wire is not None:
        _check_wire(input, name, schedule, wire)
    schedule = auto.schedule_for("reduce_scatter", schedule, input, group)
    call = Call("reduce_scatter", group, input, name, label=label, way=_way(schedule, wire))
    hosts = over_hosts.hosts_of(call) if schedule == "hierarchical" else None
    if hosts is not None:
        return over_hosts.start(
            call,
            hosts,
            lambda groups: hierarchical.reduce_scatter(output, input, groups, name, wire),
            output,
            async_op,
            shared=input,
        )
    if wire is not None:

        def run_packed() -> None:
            place = flat_place(output)
            reduce_scatter_packed(place, flattened(input), group, name, wire, collective=not async_op)
            copy_back(place, output)

        return call.scheduled(run_packed, output, async_op)
    schedule = "ring" if schedule == "hierarchical" else schedule
    if schedule is None:
        flat, base, back = _ready(input, name, group)
        direct = flat.dtype == output.dtype and output.is_contiguous()
        place = flattened(output) if direct else flat.new_empty(output.numel())
        return call.native(
            lambda: native.reduce_scatter(place, flat, base, group),
            output,
            lambda: landed(place, output, back, world_size),
            async_op,
        )

    def run() -> None:
        flat, base = prepared(input, name, world_size)
        mine = slice(group.rank() * output.numel(), (group.rank() + 1) * output.numel())
        if shares_memory(flat, input) and not shares_memory(flat[mine], output):
            flat = flat.clone()
        run_schedule(
            build("reduce_scatter", schedule, group.rank(), world_size, flat.numel()), flat, group, base
        )
        landed(flat[mine], output, name, world_size)

    return call.scheduled(run, output, async_op)


def sum_of_rows(
    output: Tensor,
    input: Tensor,
    *,
    group: Group,
    replicas: Group,
    async_op: bool = False,
    wire: str | None = None,
    label: str = "",
) -> Any:
    """Sum `input` over the ranks of both groups, and put slice `rank` of `group`, in flat order, into
    `output` on all `replicas`; returns output.

    group: the ranks that divide a model; replicas: the ranks with the same place in all such groups. input:
    contiguous, of output's dtype, and G times as long, G being the ranks of `group`. output may be its own
    slice; the other slices are scratch. wire: as for all_reduce, between the replicas. Bytes sent a
    rank: (G−1)/G · M in its group, 2(K−1)/K · M/G among K replicas. On CPUs, if the groups are the mesh's
    hosts and the ranks between them, asynchronous calls run side by side, as with schedule "hierarchical".

    async_op: return a `Pending` at once, whose wait() gives output. label: the tensor's name in errors.
    MismatchError if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one
    comes too late; ValueError if the sizes or dtypes do not fit.
    """
    _check_sizes("sum_of_rows", "input", input, "output", output, group.size())
    if wire is not None:
        _check_wire(input, "sum", None, wire)
    hosts = over_hosts.between(group, replicas)
    if hosts is not None:
        way = f"{_way('hierarchical', wire)}, on every host"
        call = Call("reduce_scatter", mesh.current().world_group, input, "sum", label=label, way=way)
        return over_hosts.start(
            call, hosts, lambda groups: hierarchical.sum_of_rows(output, input, groups, "sum", wire), output,
            async_op, shared=input,
        )  # fmt: skip

    def both() -> None:
        if in_shared_memory(group, input):
            reduce_scatter(output, input, group=group, label=label)
        else:  # checked as `call`: a second check would get its number while the next call gets one
            wait_for(native.reduce_scatter(output, flattened(input), "sum", group), "the sum in the group")
        all_reduce(output, group=replicas, wire=wire, label=label)

    call = Call("reduce_scatter", group, input, "sum", label=label)
    return call.scheduled(both, output, async_op, replicas)


@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: Literal[True], **options: Unpack[Options]
) -> Pending: ...
@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: bool, **options: Unpack[Options]
) -> Tensor | Pending: ...
def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    schedule: str | None = None,
    label: str = "",
) -> Any:
    """Put every rank's `input`, one after the other in flat order, into `output` on every rank;
    returns output.

    output: N times as many elements as input, of its dtype. Bytes sent a rank: (N−1)/N · M, M being the
    output's; with schedule "hierarchical" (K−1)/K · M/H of them between K hosts of H ranks. input may be its
    own slice of a contiguous output. ValueError if the sizes or dtypes do not fit.

    schedule: as for all_reduce.
    group: a ProcessGroup that holds this rank; None for all ranks, and each of them makes the call. async_op:
    return a `Pending` at once, whose wait() gives output. label: the tensor's name in errors. MismatchError
    if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one comes too late;
    more in help("imece.collectives.ops").
    """
    group = group_or_default(group)
    world_size = group.size()
    _check_sizes("all_gather", "output", output, "input", input, world_size)
    if _runs_now(group, async_op, schedule, input, output):
        group.run_now("all_gather", input, output, label=label)
        return output
    schedule = auto.schedule_for("all_gather", schedule, output, group)
    call = Call("all_gather", group, input, label=label, way=_way(schedule))
    hosts = over_hosts.hosts_of(call) if schedule == "hierarchical" else None
    if hosts is not None:
        at_home = input.data_ptr() == output.data_ptr() + group.rank() * input.nbytes
        # Made here, so that the ranks of a host tell each other where it is when they agree to make the call.
        offered = hierarchical.offered_for(output, hosts)
        # Others may write to what is offered before this rank has read it.
        safe = offered is None or at_home or not overlap(input, offered)
        return over_hosts.start(
            call, hosts, lambda groups: hierarchical.all_gather(output, input, groups, offered=offered),
            output, async_op, shared=offered if safe else None,
        )  # fmt: skip
    schedule = "ring" if schedule == "hierarchical" else schedule
    place = flat_place(output)
    if schedule is None:
        mine = _in_shape(flattened(input), input, group)
        return call.native(
            lambda: native.all_gather(place, mine, group), output, lambda: copy_back(place, output), async_op
        )

    def run() -> None:
        own = place[group.rank() * input.numel() : (group.rank() + 1) * input.numel()]
        if not shares_memory(own, input):
            own.copy_(input.detach().reshape(-1))
        run_schedule(build("all_gather", schedule, group.rank(), world_size, place.numel()), place, group)
        copy_back(place, output)

    return call.scheduled(run, output, async_op)


@overload
def broadcast(
    tensor: Tensor, src: int = 0, *, async_op: Literal[False] = False, **options: Unpack[Parted]
) -> Tensor: ...
@overload
def broadcast(
    tensor: Tensor, src: int = 0, *, async_op: Literal[True], **options: Unpack[Parted]
) -> Pending: ...
@overload
def broadcast(
    tensor: Tensor, src: int = 0, *, async_op: bool, **options: Unpack[Parted]
) -> Tensor | Pending: ...
def broadcast(
    tensor: Tensor,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    schedule: str | None = None,
    parts: int | None = None,
    label: str = "",
) -> Any:
    """Give every rank the tensor of rank src, in place.

    tensor: the same shape and dtype on every rank. Every rank but src receives M bytes. With schedule
    "pipelined_ring" no rank sends more than M, in `parts` parts (None: the fastest number by the links, if
    they were measured, or 8); with "root", src sends (N−1) · M; with "tree", ceil(log2 N) · M. ValueError if
    src is not in the group.

    src counts within the group. schedule: as for all_reduce.
    group: a ProcessGroup that holds this rank; None for all ranks, and each of them makes the call. async_op:
    return a `Pending` at once, whose wait() gives the tensor. label: the tensor's name in errors.
    MismatchError if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one
    comes too late; more in help("imece.collectives.ops").
    """
    check_tensor("broadcast", tensor)
    group = group_or_default(group)
    check_rank("broadcast from", src, group)
    if _runs_now(group, async_op, schedule, tensor):
        group.run_now("broadcast", tensor, tensor, root=src, label=label)
        return tensor
    schedule = auto.schedule_for("broadcast", schedule, tensor, group)
    cut = parts if parts is not None else auto.parts_of(tensor.nbytes, group, tensor.device)
    way = _way(schedule, parts=cut if schedule == "pipelined_ring" else None)
    call = Call("broadcast", group, tensor, root=src, label=label, way=way)
    flat = flattened(tensor)
    if schedule is None:
        sent = _in_shape(flat, tensor, group)
        return call.native(
            lambda: native.broadcast(sent, src, group), tensor, lambda: copy_back(flat, tensor), async_op
        )

    def run() -> None:
        steps = build("broadcast", schedule, group.rank(), group.size(), flat.numel(), root=src, parts=cut)
        run_schedule(steps, flat, group)
        copy_back(flat, tensor)

    return call.scheduled(run, tensor, async_op)


@overload
def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: object = "sum",
    *,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def reduce(
    tensor: Tensor, dst: int = 0, op: object = "sum", *, async_op: Literal[True], **options: Unpack[Options]
) -> Pending: ...
@overload
def reduce(
    tensor: Tensor, dst: int = 0, op: object = "sum", *, async_op: bool, **options: Unpack[Options]
) -> Tensor | Pending: ...
def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: object = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    schedule: str | None = None,
    label: str = "",
) -> Any:
    """Reduce over all ranks, in place on rank dst; the others' tensors stay as they are.

    tensor: the same shape and dtype on every rank. Every rank but dst sends M bytes; rank dst receives (N−1)
    · M with schedule "root", ceil(log2 N) · M with "tree". ValueError if dst is not in the group.

    dst counts within the group. op, schedule: as for all_reduce.
    group: a ProcessGroup that holds this rank; None for all ranks, and each of them makes the call. async_op:
    return a `Pending` at once, whose wait() gives the tensor. label: the tensor's name in errors.
    MismatchError if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if one
    comes too late; more in help("imece.collectives.ops").
    """
    check_tensor("reduce", tensor)
    group, name = group_or_default(group), op_name(op)
    check_rank("reduce to", dst, group)
    if _runs_now(group, async_op, schedule, tensor):
        group.run_now("reduce", tensor, tensor, name, dst, label)
        return tensor
    schedule = auto.schedule_for("reduce", schedule, tensor, group)
    call = Call("reduce", group, tensor, name, dst, label, way=_way(schedule))
    world_size, here = group.size(), group.rank() == dst
    flat, base, back = _ready(tensor, name, group, native=schedule is None)
    if (
        not here
        and shares_memory(flat, tensor)
        and not (schedule is None and in_shared_memory(group, tensor))
    ):
        flat = flat.clone()  # partial sums pass through it

    def finish() -> None:
        if here:
            landed(flat, tensor, back, world_size)

    if schedule is None:
        return call.native(lambda: native.reduce(flat, dst, base, group), tensor, finish, async_op)

    def run() -> None:
        run_schedule(
            build("reduce", schedule, group.rank(), world_size, flat.numel(), root=dst), flat, group, base
        )
        finish()

    return call.scheduled(run, tensor, async_op)


@overload
def barrier(*, group: Group | None = None, async_op: Literal[False] = False) -> None: ...
@overload
def barrier(*, group: Group | None = None, async_op: Literal[True]) -> Pending[None]: ...
@overload
def barrier(*, group: Group | None = None, async_op: bool) -> Pending[None] | None: ...
def barrier(*, group: Group | None = None, async_op: bool = False) -> Any:
    """No rank goes on before every rank of the group has come. Returns None.

    group: a ProcessGroup that holds this rank; None for all ranks. async_op: return a `Pending` of None at
    once. MismatchError if ranks make different calls, PeerLostError if one is gone, CollectiveTimeoutError if
    one comes too late.
    """
    group = group_or_default(group)
    if _runs_now(group, async_op, None):
        group.barrier_now()
        return None
    call = Call("barrier", group, None)
    return call.native(lambda: native.barrier(group), None, None, async_op)


# --- helpers


def _runs_now(
    group: Group, async_op: bool, schedule: str | None, *tensors: Tensor
) -> TypeGuard[SharedMemoryGroup]:
    """Whether imece's own engine does the call at once. 1 KiB then takes 8 us, so every check here counts."""
    if async_op or schedule is not None or auto.FORCED or type(group) is not SharedMemoryGroup:
        return False
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return False
    if pending.unfinished:
        pending.drain(group)
    return True


def _ready(tensor: Tensor, op: str, group: Group, native: bool = True) -> tuple[Tensor, str, str]:
    """(buffer, the reduction to ask of the backend, the reduction to tell `landed`)."""
    if native and in_shared_memory(group, tensor):
        return _in_shape(flattened(tensor), tensor, group), op, "sum"
    return *prepared(tensor, op, group.size()), op


def _in_shape(flat: Tensor, tensor: Tensor, group: Group) -> Tensor:
    """`flat`, for "shm" in the tensor's shape: that is compared between ranks, some of which may make the
    call at once with the tensor itself."""
    return flat.view(tensor.shape) if in_shared_memory(group, tensor) else flat


def _check_wire(tensor: Tensor, op: str, schedule: str | None, wire: str) -> None:
    """ValueError unless this tensor can travel in fewer bits, in the way that was asked for."""
    check_sum(tensor, op, wire)
    if schedule not in (None, "auto", "hierarchical"):
        raise ValueError(f"wire={wire!r} has its own schedule, or 'hierarchical', but not {schedule!r}")


def _way(schedule: str | None, wire: str | None = None, parts: int | None = None) -> str:
    """What all ranks must agree on besides the call itself, in words; "" for the backend's own way."""
    if wire is not None and schedule != "hierarchical":  # hierarchical has its own schedule
        return f"wire {wire}"
    words = [f"schedule {schedule}"] if schedule is not None else []
    words += [f"wire {wire}"] if wire is not None else []
    words += [f"parts {parts}"] if parts is not None else []
    return ", ".join(words)


def _check_sizes(op: str, long: str, whole: Tensor, short: str, part: Tensor, world_size: int) -> None:
    check_tensor(op, whole, long)
    check_tensor(op, part, short)
    if whole.numel() != world_size * part.numel():
        raise ValueError(
            f"{op}: {long} has {whole.numel()} elements, but {short} x {world_size} ranks is "
            f"{part.numel()} x {world_size} = "
            f"{world_size * part.numel()}"
        )
    if whole.dtype != part.dtype:
        raise ValueError(f"{op}: {long} is {whole.dtype}, but {short} is {part.dtype}")
