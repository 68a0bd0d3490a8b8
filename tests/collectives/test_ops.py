"""The contract of the collectives: one set of cases for all backends, schedules, operations, dtypes, sizes.

All cases of a (backend, world size) share one start of ranks; a failing case is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import imece
from imece.collectives import execute, ops, recording, schedules
from imece.collectives.ops import Recv, Send
from imece.collectives.schedules import SCHEDULES, build, cost
from imece.errors import CollectiveTimeoutError
from tests.collectives.sent import sent_by
from tests.ranks import run_ranks

BACKENDS = ("gloo", "shm")
WORLD_SIZES = (1, 2, 3, 4, 7)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8,
    torch.bool,
)  # fmt: skip
REDUCTIONS = ("sum", "avg", "min", "max", "product")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (3, 0, 2), (5,), (7, 3), (2, 3, 5))
Maker = Callable[[int], torch.Tensor]  # a rank's tensor, from its number


CONTRACT = [
    pytest.param(backend, size, marks=() if size in (1, 2 if backend == "gloo" else 3) else pytest.mark.slow)
    for backend in BACKENDS
    for size in WORLD_SIZES
]


@pytest.mark.parametrize(("backend", "world_size"), CONTRACT)
def test_contract(backend: str, world_size: int) -> None:
    results = run_ranks(run_contract, world_size, backend=backend, timeout_s=240)
    assert results[0]["cases"] > 400
    assert all(result == results[0] for result in results), "ranks differ in cases or in bits"


def test_contract_catches_a_broken_schedule() -> None:
    """The negative control, on real ranks: a ring that stops one step early, on every rank."""
    run_ranks(run_broken_contract, 3, backend="gloo", expect=r"all_reduce .*schedule='ring'")


@pytest.mark.parametrize("backend", BACKENDS)
def test_mistakes_are_refused_before_anything_is_sent(backend: str) -> None:
    run_ranks(make_mistakes, 2, backend=backend)


def test_timeout_and_lost_peer_are_our_errors() -> None:
    run_ranks(wait_for_nobody, 2, backend="gloo")


# --- the body, run by each rank


def run_contract() -> dict[str, Any]:
    """Cases counted, and a hash of the bits of results that must be the same on all ranks."""
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    count = 0
    for group in groups():
        for case in (
            all_reduces, reduces, broadcasts, reduce_scatters, all_gathers, several_at_once, point_to_point,
            averages_of_complex, conjugates, moves,
        ):  # fmt: skip
            if group is not None and isinstance(group, dist.ProcessGroup):
                count += case(group)
        dist.barrier()
    with torch.inference_mode():
        made_inside = dist.new_group()  # and what it keeps
    for inside in (True, False):
        count += inference_tensors(made_inside, inside)
    ops.barrier()
    return {"cases": everywhere(count, world), "bits": big_messages(world)}


def run_broken_contract() -> None:
    whole = schedules.ring_all_reduce
    with mock.patch.dict(schedules._ALL_REDUCE, ring=lambda *args: whole(*args)[:-1]):
        run_contract()


def everywhere(count: int, group: dist.ProcessGroup) -> int:
    """The largest count of any rank: with sub-groups, ranks run different numbers of cases."""
    tensor = torch.tensor([count])
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def groups() -> Iterator[Any]:
    """All ranks; every other one; the reverse order of a few."""
    world_size = dist.get_world_size()
    yield dist.group.WORLD
    if world_size >= 3:
        evens = dist.new_group(list(range(0, world_size, 2)))
        rest = dist.new_group(list(range(1, world_size)))
        yield evens if dist.get_rank() % 2 == 0 else None
        yield rest if dist.get_rank() > 0 else None


def values(dtype: torch.dtype, shape: tuple[int, ...], op: str, salt: int = 0) -> Maker:
    """Small numbers that every dtype sums and multiplies exactly, also over 7 ranks."""

    def make(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * salt + rank + 1)
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if op == "product":
            exponents = torch.randint(0, 2, shape, generator=generator)
            sign = 1 if dtype == torch.uint8 else 1 - 2 * torch.randint(0, 2, shape, generator=generator)
            return (sign * 2**exponents).to(dtype)
        low = 0 if dtype == torch.uint8 else -9
        return torch.randint(low, 10, shape, generator=generator).to(dtype)

    return make


def reference(make: Maker, world_size: int, op: str) -> torch.Tensor:
    tensors = [make(rank) for rank in range(world_size)]
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op == "sum":
        result = wide.sum(0)
    elif op == "avg" and dtype.is_floating_point:
        result = wide.sum(0) / world_size
    elif op == "avg":
        result = wide.sum(0).div(world_size, rounding_mode="trunc")
    else:
        result = wide.prod(0) if op == "product" else wide.amin(0) if op == "min" else wide.amax(0)
    return result.to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor, op: str, what: str) -> None:
    """Bit-equal, but for averages of floating point numbers, whose division rounds."""
    step = torch.finfo(got.dtype).eps if op == "avg" and got.dtype.is_floating_point else 0.0
    try:
        torch.testing.assert_close(got, expected, rtol=4 * step, atol=16 * step)
    except AssertionError as error:
        raise AssertionError(
            f"{what} on rank {dist.get_rank()} of {dist.get_world_size()}: {error}"
        ) from None


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous (unless they are too few for that)."""
    if tensor.dim() == 0:
        return tensor.clone()
    wide = tensor.new_zeros((*tensor.shape, 2))
    narrow: torch.Tensor = wide[..., 0]
    narrow.copy_(tensor)
    return narrow


def variants(
    op_of: str, group: dist.ProcessGroup
) -> Iterator[tuple[str | None, torch.dtype, str, tuple[int, ...]]]:
    """(schedule, dtype, reduction, shape): dtypes and reductions of each schedule, then all shapes.

    All dtypes with all reductions on up to three ranks. More ranks add no arithmetic, only partners and
    smaller parts, and groups of some ranks differ from the whole only in who is in it: less on both.
    """
    whole = group is dist.group.WORLD
    everything = whole and dist.get_world_size() <= 3
    names = [None, *(name for name in SCHEDULES[op_of] if name != "hierarchical")]
    reductions = REDUCTIONS if "reduce" in op_of else ("",)
    for name in names:
        for dtype in DTYPES:
            for op in reductions:
                if everything or dtype in DTYPES[3:5] or (whole and op == reductions[0]):
                    yield name, dtype, op, (13,)
        for shape in SHAPES:
            for op in reductions[: 2 if everything else 1]:
                yield name, torch.float32, op, shape
                yield name, torch.int64, op, shape


def finish(result: torch.Tensor | ops.Pending, async_op: bool) -> torch.Tensor:
    """The tensor, whether the call was asynchronous or not."""
    if not async_op:
        assert isinstance(result, torch.Tensor)
        return result
    assert isinstance(result, ops.Pending)
    tensor = result.wait(timeout_s=60)
    assert isinstance(tensor, torch.Tensor)
    assert result.done() and result.wait() is tensor
    return tensor


def layouts(case: int, make: torch.Tensor) -> tuple[torch.Tensor, bool, str]:
    """Contiguous and synchronous, strided and synchronous, both asynchronous, in turn: each rank another."""
    case += dist.get_rank()
    tensor = strided(make) if case & 1 else make
    return (
        tensor,
        bool(case & 2),
        f"{'strided' if case & 1 else 'contiguous'} {'async' if case & 2 else 'sync'}",
    )


def all_reduces(group: dist.ProcessGroup) -> int:
    count = 0
    for name, dtype, op, shape in variants("all_reduce", group):
        for case in range(4) if dtype == torch.float32 and op == "sum" else (count % 4,):
            make = values(dtype, shape, op, salt=count)
            tensor, async_op, how = layouts(case, make(group.rank()))
            result = ops.all_reduce(tensor, op, group=group, async_op=async_op, schedule=name)
            assert finish(result, async_op) is tensor
            what = f"all_reduce {op} {dtype} {list(shape)} {how} schedule={name!r}"
            same(tensor, reference(make, group.size(), op), op, what)
            count += 1
    return count


def reduces(group: dist.ProcessGroup) -> int:
    count = 0
    for name, dtype, op, shape in variants("reduce", group):
        make, dst = values(dtype, shape, op, salt=count), count % group.size()
        tensor, async_op, how = layouts(count, make(group.rank()))
        result = ops.reduce(tensor, dst, op, group=group, async_op=async_op, schedule=name)
        assert finish(result, async_op) is tensor
        here = group.rank() == dst
        expected = reference(make, group.size(), op) if here else make(group.rank())
        what = f"reduce {op} to {dst} {dtype} {list(shape)} {how} schedule={name!r}"
        same(tensor, expected, op if here else "", what)
        count += 1
    return count


def broadcasts(group: dist.ProcessGroup) -> int:
    count = 0
    for name, dtype, _, shape in variants("broadcast", group):
        make, src = values(dtype, shape, "", salt=count), count % group.size()
        tensor, async_op, how = layouts(count, make(group.rank()))
        result = ops.broadcast(
            tensor, src, group=group, async_op=async_op, schedule=name, parts=1 + count % 4
        )
        assert finish(result, async_op) is tensor
        same(tensor, make(src), "", f"broadcast from {src} {dtype} {list(shape)} {how} schedule={name!r}")
        count += 1
    return count


def reduce_scatters(group: dist.ProcessGroup) -> int:
    count, rank, world_size = 0, group.rank(), group.size()
    for name, dtype, op, shape in variants("reduce_scatter", group):
        make = values(dtype, (world_size, *shape), op, salt=count)
        given, async_op, how = layouts(count, make(rank))
        output = strided(torch.zeros(shape, dtype=dtype)) if count & 1 else torch.zeros(shape, dtype=dtype)
        result = ops.reduce_scatter(output, given, op, group=group, async_op=async_op, schedule=name)
        assert finish(result, async_op) is output
        what = f"reduce_scatter {op} {dtype} {list(shape)} {how} schedule={name!r}"
        same(output, reference(make, world_size, op)[rank], op, what)
        same(given, make(rank), "", f"{what}: the input")
        in_place = make(rank)  # the output is its own slice of the input
        ops.reduce_scatter(in_place[rank], in_place, op, group=group, schedule=name)
        same(in_place[rank], reference(make, world_size, op)[rank], op, f"{what} in place")
        count += 1
    return count


def all_gathers(group: dist.ProcessGroup) -> int:
    count, rank, world_size = 0, group.rank(), group.size()
    for name, dtype, _, shape in variants("all_gather", group):
        make = values(dtype, shape, "", salt=count)
        expected = torch.stack([make(each) for each in range(world_size)])
        given, async_op, how = layouts(count, make(rank))
        output = torch.zeros((world_size, *shape), dtype=dtype)
        output = strided(output) if count & 1 else output
        result = ops.all_gather(output, given, group=group, async_op=async_op, schedule=name)
        assert finish(result, async_op) is output
        what = f"all_gather {dtype} {list(shape)} {how} schedule={name!r}"
        same(output, expected, "", what)
        in_place = torch.zeros((world_size, *shape), dtype=dtype)
        in_place[rank] = make(rank)
        ops.all_gather(in_place, in_place[rank], group=group, schedule=name)
        same(in_place, expected, "", f"{what} in place")
        count += 1
    return count


def several_at_once(group: dist.ProcessGroup) -> int:
    """Asynchronous calls of all kinds under way together, waited for backwards; a synchronous one between."""
    names: list[str | None] = [None, "ring", None, "tree", "recursive_doubling", "root", None]
    makes = [values(torch.float32, (50 + i,), "sum", salt=i) for i in range(len(names))]
    tensors = [make(group.rank()) for make in makes]
    calls = [
        ops.all_reduce(tensor, group=group, async_op=True, schedule=name)
        for tensor, name in zip(tensors, names, strict=True)
    ]
    between = values(torch.float32, (9,), "sum", salt=99)
    sync = ops.all_reduce(between(group.rank()), group=group)
    for call in reversed(calls):
        call.wait()
    for tensor, make, name in zip(tensors, makes, names, strict=True):
        same(tensor, reference(make, group.size(), "sum"), "sum", f"one of several, schedule={name!r}")
    same(sync, reference(between, group.size(), "sum"), "sum", "synchronous between asynchronous")
    return len(names) + 1


def point_to_point(group: dist.ProcessGroup) -> int:
    rank, world_size = group.rank(), group.size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    count = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            for async_op in (False, True):
                make = values(dtype, shape, "", salt=count)
                received = [strided(torch.zeros(shape, dtype=dtype)), torch.zeros(shape, dtype=dtype)]
                # Everybody receives first, from both sides: one after the other, these calls would never end.
                messages: list[Send | Recv] = [
                    Recv(received[0], left, tag=1), Send(strided(make(rank)), left, tag=2),
                    Send(make(rank), right, tag=1), Recv(received[1], right, tag=2),
                ]  # fmt: skip
                result: Any = ops.exchange(messages, group=group, async_op=async_op)
                assert (result.wait() if async_op else result) is None
                same(received[0], make(left), "", f"exchange from the left {dtype} {list(shape)}")
                same(received[1], make(right), "", f"exchange from the right {dtype} {list(shape)}")
                count += 1
    to_itself = torch.zeros(6)
    ops.exchange([Send(torch.arange(6.0).view(2, 3).t(), rank), Recv(to_itself, rank)], group=group)
    same(to_itself, torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]), "", "a strided message to itself")
    for peer in range(1, world_size):  # rank 0 sends two messages of a tag, which arrive in order
        both = [torch.full((3,), float(peer)), torch.full((3,), peer + 0.5)]
        got = [strided(torch.zeros(3)), torch.zeros(3)]
        for sent, place in zip(both, got, strict=True):
            if rank == 0:
                assert ops.send(sent, peer, group=group) is sent
            elif rank == peer:
                assert ops.recv(place, 0, group=group) is place
        if rank == peer:
            same(torch.stack(got), torch.stack(both), "", f"send to {peer}")
        count += 1
    return count


def averages_of_complex(group: dist.ProcessGroup) -> int:
    """They are no integers, to be truncated."""
    mean, world_size = torch.full((8,), 0.5 + 0.25j), group.size()
    for name in (None, "ring"):
        tensor, waits = mean.clone(), dist.get_rank() % 2 == 0
        part, whole = torch.zeros_like(mean), mean.repeat(world_size)
        finish(ops.all_reduce(tensor, "avg", group=group, schedule=name, async_op=waits), waits)
        call = ops.reduce_scatter(part, whole, "avg", group=group, schedule=name, async_op=waits)
        finish(call, waits)
        same(torch.stack((tensor, part)), torch.stack((mean, mean)), "", f"complex avg schedule={name!r}")
    return 4


def conjugates(group: dist.ProcessGroup) -> int:
    """Values that differ from the bytes in memory, on one rank alone."""
    count, last, plain = 0, group.size() - 1, torch.complex(torch.arange(6.0), -torch.arange(6.0) - 1)

    def lazy() -> torch.Tensor:
        return plain.conj_physical().conj() if group.rank() == last else plain.clone()

    for name, async_op in (("ring", False), (None, False), (None, True)):
        given: dict[str, Any] = {"group": group, "schedule": name, "async_op": async_op}
        gathered, part = plain.new_zeros(group.size(), 6), plain.new_zeros(6)
        total, sent, rooted = lazy(), lazy(), lazy()
        finish(ops.all_gather(gathered, lazy(), **given), async_op)
        finish(ops.all_reduce(total, **given), async_op)
        whole = torch.cat([plain.conj_physical()] * group.size()).conj()
        finish(ops.reduce_scatter(part, whole, **given), async_op)
        finish(ops.broadcast(sent, last, **given | {"schedule": name and "tree"}), async_op)
        finish(ops.reduce(rooted, last, **given | {"schedule": name and "tree"}), async_op)
        expected = {
            "gathered": (gathered, plain.expand(group.size(), 6)),
            "summed": (total, plain * group.size()),
            "scattered": (part, plain * group.size()),
            "sent": (sent, plain),
            "rooted": (rooted, plain * (group.size() if group.rank() == last else 1)),
        }
        for what, (got, wanted) in expected.items():
            same(got.resolve_conj(), wanted.clone(), "", f"{what} conjugate {given}")
            count += 1
    return count


def moves(group: dist.ProcessGroup) -> int:
    """What is not summed has any dtype, whether the backend knows it or not."""
    rank, world_size, count = group.rank(), group.size(), 0
    for dtype in (torch.complex64, torch.int16, torch.uint64, torch.float8_e4m3fn):
        mine = (torch.arange(5) + rank).float().to(dtype)
        everybody = torch.stack([(torch.arange(5) + each).float() for each in range(world_size)])
        for async_op in (False, True):
            output = torch.zeros((world_size, 5), dtype=torch.float32).to(dtype)
            finish(ops.all_gather(output, mine, group=group, async_op=async_op), async_op)
            moved, waits = mine.clone(), async_op and rank % 2 == 0  # ranks may call in different ways
            finish(ops.broadcast(moved, world_size - 1, group=group, async_op=waits), waits)
            got = torch.cat([output, moved.view(1, 5)]).to(torch.complex64).real
            same(got, torch.cat([everybody, everybody[-1:]]), "", f"{dtype} gathered and broadcast")
            count += 2
    return count


def inference_tensors(group: dist.ProcessGroup, inside: bool) -> int:
    """Calls in torch.inference_mode(), or not `inside`, on tensors that were made there and on others.

    Outside of the mode, which is a thread's own, torch lets nobody write to what was made in it.
    """
    count, rank, world_size = 0, group.rank(), group.size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for made_inside, (op, dtype), (name, numel), asynchronous in itertools.product(
        (True, False),
        [("sum", torch.bfloat16), ("avg", torch.float32)],
        [(None, 20_000), ("ring", 13), (None, 13)],
        (0, 2),
    ):
        case = asynchronous + count // 2 % 2
        make = values(dtype, (numel,), op, salt=count)
        each = torch.stack([make(other) for other in range(world_size)])
        with torch.inference_mode(made_inside):
            source, rows = make(rank), each.view(-1).clone()
            tensor, async_op, how = layouts(case, source.clone())
            root, (part, got, own) = source.clone(), (torch.zeros_like(source) for _ in range(3))
            if case & 1:
                part, got = strided(part), strided(got)
            whole, _, _ = layouts(case, torch.zeros_like(each))
        assert all(place.is_inference() == made_inside for place in (tensor, whole, root, part, got, own))
        how += f" {dtype} {numel} schedule={name!r}, made inside: {made_inside}, called inside: {inside}"
        way: dict[str, Any] = {"group": group, "async_op": async_op, "schedule": name}
        with torch.inference_mode() if inside else contextlib.nullcontext():
            finish(ops.all_reduce(tensor, op, **way), async_op)
            finish(ops.all_gather(whole, source, **way), async_op)
            finish(ops.reduce_scatter(part, rows, op, **way), async_op)
            finish(ops.broadcast(root, **{**way, "schedule": name and "tree"}), async_op)
            messages: list[Send | Recv] = [Send(each[rank], rank), Recv(own, rank)]
            if world_size > 1:
                messages += [Send(source, right), Recv(got, left)]
            result: Any = ops.exchange(messages, group=group, async_op=async_op)
            assert (result.wait() if async_op else result) is None
        same(tensor, reference(make, world_size, op), op, f"all_reduce {how}")
        same(whole, each, "", f"all_gather {how}")
        same(part, reference(lambda _: each, world_size, op)[rank], op, f"reduce_scatter {how}")  # noqa: B023
        same(root, each[0], "", f"broadcast {how}")
        same(own, source, "", f"a message to itself {how}")
        if world_size > 1:
            same(got, each[left], "", f"a message {how}")
        count += 1
    return count


def big_messages(group: dist.ProcessGroup) -> str:
    """Cut into pieces: near the exact sum, bytes as counted beforehand, a hash to compare ranks' bits."""
    rank, world_size = group.rank(), group.size()
    numel = 300_007
    exact = torch.stack([noise(each, numel) for each in range(world_size)]).double().sum(0)
    bits = hashlib.sha256()
    for name in SCHEDULES["all_reduce"][:-1]:
        plan = build("all_reduce", name, rank, world_size, numel)
        tensor = noise(rank, numel)
        with sent_by("execute") as sent, mock.patch.object(execute, "CHUNK_BYTES", 100_000):
            execute.run_schedule(plan, tensor, group)
        assert (tensor.double() - exact).abs().max() < 1e-5, f"all_reduce of {numel}, schedule={name!r}"
        bits.update(tensor.numpy().tobytes())
        assert sum(sent) == 4 * sum(each.stop - each.start for step in plan for each in step.sends), name
        if name == "ring":
            assert abs(sum(sent) - cost("all_reduce", name, world_size, 4 * numel).nbytes) < 8
    for schedule in ("pipelined_ring", "tree", None):
        tensor = noise(rank, numel)
        ops.broadcast(tensor, world_size - 1, group=group, schedule=schedule, parts=5)
        assert torch.equal(tensor, noise(world_size - 1, numel)), f"broadcast of {numel}, {schedule=}"
    return bits.hexdigest()


def noise(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def make_mistakes() -> None:
    imece.init()
    x = torch.ones(6)
    half = torch.ones(3, dtype=torch.float64)
    one, sparse = torch.ones(1).expand(6), torch.eye(2).to_sparse()  # the former may be sent
    alone = [dist.new_group([rank]) for rank in range(2)]
    foreign: Any = alone[1 - dist.get_rank()]
    wrong: Any = "a"
    two: Any = [x, x]
    message: Any = Send(x, 1 - dist.get_rank())
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.all_reduce(x, "summ"), "unknown reduction 'summ': did you mean 'sum'?"),
        (lambda: ops.all_reduce(x, dist.ReduceOp.BAND), "unknown reduction .*BAND.*: one of sum, avg"),
        (lambda: ops.all_reduce(x, schedule="rings"), "schedule 'rings' of all_reduce: did you mean 'ring'"),
        (lambda: ops.broadcast(x, schedule="ring"), "'ring' of broadcast: one of root, pipelined_ring"),
        (lambda: ops.all_reduce(x, wire="fp8"), "unknown wire 'fp8'"),
        (lambda: ops.all_reduce(x, wire="bf16", schedule="tree"), "wire='bf16' has its own schedule"),
        (lambda: ops.all_reduce(x, "max", wire="bf16"), "for sum and avg, not 'max'"),
        (lambda: ops.all_reduce(x.int(), wire="bf16"), "floating point numbers, not torch.int32"),
        (lambda: ops.broadcast(x, 2), "broadcast from rank 2: the group has ranks 0 to 1"),
        (lambda: ops.reduce(x, -1), "reduce to rank -1: the group has ranks 0 to 1"),
        (lambda: ops.reduce(x, wrong), "reduce to rank 'a': a number is expected"),
        (lambda: ops.send(x, 7), "send to rank 7"),
        (lambda: ops.send(x, 1 - dist.get_rank(), tag=2**63), "tag 9223372036854775808: a tag is a whole"),
        (lambda: ops.exchange([Recv(x, 1 - dist.get_rank(), wrong)]), "tag 'a': a tag is a whole number"),
        (lambda: ops.recv(x, dist.get_rank()), "this rank itself"),
        (lambda: ops.exchange([Recv(x, 3)]), "recv from rank 3"),
        (lambda: ops.exchange([Send(x, dist.get_rank())]), "1 messages that it does not receive"),
        (lambda: ops.exchange([Recv(x, dist.get_rank(), 4)]), "itself nothing with tag 4 and receives 6"),
        (lambda: ops.reduce_scatter(torch.ones(2), x), "input has 6 .* output .* is 2 x 2 = 4"),
        (lambda: ops.all_gather(x, torch.ones(4)), "output has 6 .* input .* is 4 x 2 = 8"),
        (lambda: ops.all_gather(x, half), "output is torch.float32, but input is torch.float64"),
        (lambda: ops.reduce_scatter(half, x), "input is torch.float32, but output is torch.float64"),
        (lambda: ops.all_reduce(x, group=foreign), "this rank is not in the group"),
        (lambda: ops.all_reduce(x, group=two), "^a list is no group: give one of torch's"),
        (lambda: ops.all_reduce(one), r"float32\[6\] is expanded: .* pass its clone"),
        (lambda: ops.all_reduce(one, schedule="ring"), r"float32\[6\] is expanded"),
        (lambda: ops.broadcast(one, async_op=True), r"float32\[6\] is expanded"),
        (lambda: ops.all_gather(one, torch.ones(3)), r"float32\[6\] is expanded"),
        (lambda: ops.recv(one, 1 - dist.get_rank()), r"float32\[6\] is expanded"),
        (lambda: ops.exchange([Recv(one, dist.get_rank())]), r"float32\[6\] is expanded"),
        (lambda: ops.all_reduce(sparse), r"float32\[2, 2\] is sparse, .* pass its to_dense"),
        (lambda: ops.all_gather(torch.ones(4, 2), sparse), r"float32\[2, 2\] is sparse"),
        (lambda: ops.send(sparse, 1 - dist.get_rank()), r"float32\[2, 2\] is sparse"),
        (lambda: ops.all_reduce(two), "all_reduce: a tensor is expected, not list; call it for each"),
        (lambda: ops.broadcast(wrong), "broadcast: a tensor is expected, not str; torch.as_tensor makes"),
        (lambda: ops.reduce(two), "reduce: a tensor is expected"),
        (lambda: ops.all_gather(two, x), "all_gather, output: a tensor .* list; make one by torch.cat"),
        (lambda: ops.reduce_scatter(x, two), "reduce_scatter, input: a tensor is expected"),
        (lambda: ops.send(two, 1 - dist.get_rank()), "send: a tensor is expected"),
        (lambda: ops.recv(two, 1 - dist.get_rank()), "recv: a tensor is expected"),
        (lambda: ops.exchange([Send(two, 1 - dist.get_rank())]), "Send: a tensor is expected"),
        (lambda: ops.exchange(message), "exchange: a list of imece.Send and imece.Recv .*, not a Send"),
        (lambda: ops.exchange(two), "exchange: imece.Send or imece.Recv is expected, not Tensor"),
    ]  # fmt: skip
    for make, words in mistakes:
        with pytest.raises((ValueError, TypeError), match=words):
            make()
    itself = torch.zeros(2, 3)
    ops.exchange([Recv(itself, dist.get_rank(), 1), Send(x, dist.get_rank(), 1)])
    assert torch.equal(itself, torch.ones(2, 3))
    assert torch.equal(ops.all_reduce(x), torch.full((6,), 2.0)), "the group still works after mistakes"


def last_call() -> recording.Call:
    """Of this rank, as another process reads it. What checks a call is none."""
    return recording.attach(os.getpid()).calls[-1]


def wait_for_nobody() -> None:
    """Rank 1 stays away; when all that is over it leaves."""
    store = dist.distributed_c10d._get_default_store()
    never_met = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    ops.barrier()  # both meet once, so that what follows is about a rank that stays away
    if dist.get_rank() == 1:
        store.wait(["over"])
        return
    call = ops.all_reduce(torch.ones(3), async_op=True)
    assert call is not None and last_call().state == "started"
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="all_reduce number 2: not all ranks came in time"):
        call.wait(timeout_s=0.3)
    assert time.monotonic() - start < 20  # and not the 60 of the group
    assert last_call().state == "failed"
    late = r"^all_reduce number 1: not all ranks came in time\. .*rank 1 is not in it \(pid \d+\): its last"
    with pytest.raises(CollectiveTimeoutError, match=late):
        ops.all_reduce(torch.ones(3), group=never_met)
    with pytest.raises(CollectiveTimeoutError, match="exchange with rank 1"):
        execute.run_schedule(build("all_reduce", "ring", 0, 2, 8), torch.ones(8), never_met)
    store.set("over", "")
