"""Every collective of torch on the backend "shm", compared with references that each rank computes itself.

What rank r holds depends only on r, so a reference needs no communication. All checks of one world size share
one start of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import imece
from imece.collectives.fingerprint import describe
from imece.collectives.shared_memory import board, reducing, shared_empty
from imece.collectives.shared_memory.board import RING_PIECE_BYTES, RING_SLOTS
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.small import EXCHANGED_BYTES, REDUCED_BYTES
from imece.errors import CollectiveTimeoutError
from tests.ranks import run_ranks

WORLD_SIZES = (1, 2, 3, 4, 7)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
PLACES = ("ordinary", "shared", "mixed", "strided")
# torch 2.13 renamed two calls, and warns about the older names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def holds(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What rank `rank` holds: small numbers, so that sums are exact in every dtype; never all zero."""
    steps = torch.arange(numel, dtype=torch.int32).add_(31 * seed + 5 * rank)
    return steps.mul_(2 * rank + 7).remainder_(11).remainder_(3).add_(1).to(dtype)


def put(value: Tensor, place: str) -> Tensor:
    """The same values as an ordinary tensor, one in shared memory, or one with gaps.

    "mixed": shared on all ranks but the last, so that all must agree to go the other way.
    """
    if place == "mixed":
        place = "ordinary" if dist.get_rank() == dist.get_world_size() - 1 else "shared"
    if place == "shared":
        target = shared_empty(tuple(value.shape), value.dtype)
    elif place == "strided":
        target = torch.empty((*value.shape, 2), dtype=value.dtype).select(-1, 1)
    else:
        target = torch.empty_like(value)
    target.copy_(value)
    return target


def places() -> tuple[str, ...]:
    """Where tensors lie in the long loops: seven ranks on two cores take their time, so fewer there."""
    return PLACES if dist.get_world_size() < 7 else ("mixed", "strided")


def reduced(op: str, held: Sequence[Tensor]) -> Tensor:
    """The reference: in float64, int64 or complex128, rounded once (to fp32 and then to half precision)."""
    dtype = held[0].dtype
    floating, complex_ = dtype.is_floating_point, dtype.is_complex
    wide = torch.complex128 if complex_ else torch.float64 if floating else torch.int64
    stack = torch.stack([each.to(wide) for each in held])
    if op in BITWISE:
        result = stack[0]
        for each in stack[1:]:
            result = BITWISE[op](result, each)
    elif op in ("sum", "avg"):
        result = stack.sum(0)
        if op == "avg":
            count = len(held)
            result = result / count if floating or complex_ else result.div(count, rounding_mode="trunc")
    elif op == "product":
        result = stack.prod(0)
    else:
        result = stack.amin(0) if op == "min" else stack.amax(0)
    if dtype in (torch.float16, torch.bfloat16):
        result = result.float()
    return result.to(dtype)


def same(found: Tensor, wanted: Tensor, *what: object) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (what, found.shape, wanted.shape)
    wrong = (found != wanted).flatten().nonzero().flatten()
    first = wrong[:5].tolist()
    assert not len(wrong), (
        f"rank {dist.get_rank()}: {what}: {len(wrong)} of {found.numel()} elements differ, first at {first}: "
        f"{found.flatten()[first].tolist()} instead of {wanted.flatten()[first].tolist()}"
    )


def everybody(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [holds(rank, numel, dtype, seed) for rank in range(dist.get_world_size())]


def sums_on(dtype: torch.dtype) -> Iterator[str]:
    """The reductions that exist for a dtype. torch refuses averages and orders of complex numbers."""
    for op in OPS:
        if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
            continue
        if dtype.is_complex and op not in ("sum", "avg"):
            continue
        yield op


# The checks; each runs on every rank.


def check_dtypes_and_ops() -> None:
    """All dtypes and operations, through the small, the direct and the staged way."""
    rank = dist.get_rank()
    for dtype, nbytes in itertools.product(DTYPES, (320, REDUCED_BYTES + 720)):
        numel = nbytes // dtype.itemsize
        held = everybody(numel, dtype)
        for op in sums_on(dtype):
            wanted = reduced(op, held)
            for place in PLACES[:2]:
                tensor = put(held[rank], place)
                dist.all_reduce(tensor, OPS[op])
                same(tensor, wanted, "all_reduce", op, dtype, numel, place)
        for place in PLACES[:2]:
            tensor = put(held[rank], place)
            dist.broadcast(tensor, dist.get_world_size() - 1)
            same(tensor, held[-1], "broadcast", dtype, numel, place)


def slot_bytes() -> int:
    return int(dist.group.WORLD._board.slot_bytes)  # type: ignore[union-attr]


def reduce_sizes() -> list[int]:
    """float32 elements around every border of the reductions."""
    world_size = dist.get_world_size()
    small = REDUCED_BYTES // 4
    width = slot_bytes() // 4 // world_size // 64 * 64
    chunk = reducing.CHUNK_BYTES // 4
    borders = [small, width * world_size, chunk, chunk * world_size]
    return [0, 1, 63, 65, small, *(b + d for b in borders for d in (-1, 1)), 3 * width * world_size + 1017]


def check_reductions_of_all_sizes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for at, numel in enumerate(reduce_sizes()):
        held, root, part = everybody(numel, seed=at), at % world_size, numel // world_size
        total, largest = reduced("sum", held), reduced("max", held)
        for place in places():
            tensor = put(held[rank], place)
            dist.all_reduce(tensor)
            same(tensor, total, "all_reduce", numel, place)
            tensor = put(held[rank], place)
            dist.reduce(tensor, root, dist.ReduceOp.MAX)
            same(tensor, largest if rank == root else held[rank], "reduce", numel, place)
            output, source = put(torch.zeros(part), place), put(held[rank][: part * world_size], place)
            REDUCE_SCATTER(output, source)
            same(output, total[rank * part : (rank + 1) * part], "reduce_scatter", part, place)
            same(source, held[rank][: part * world_size], "input of reduce_scatter", part, place)


def exchange_sizes() -> list[int]:
    """Bytes around every border of the exchanges."""
    borders = (EXCHANGED_BYTES, slot_bytes())
    return [0, 1, EXCHANGED_BYTES, *(b + d for b in borders for d in (-1, 1)), 2 * slot_bytes() + 4097]


def check_exchanges_of_all_sizes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for at, (numel, place) in enumerate(itertools.product(exchange_sizes(), places())):
        held, root = everybody(numel, torch.uint8, at), at % world_size
        tensor = put(held[rank], place)
        output = put(torch.zeros(world_size * numel, dtype=torch.uint8), place)
        ALL_GATHER(output, tensor)
        same(output, torch.cat(held), "all_gather_into_tensor", numel, place)
        outputs = [put(torch.zeros(numel, dtype=torch.uint8), place) for _ in held]
        dist.all_gather(outputs, tensor)
        for other, each in enumerate(outputs):
            same(each, held[other], "all_gather", numel, place, other)
        outputs = [put(torch.zeros(numel, dtype=torch.uint8), place) for _ in held]
        dist.gather(tensor, outputs if rank == root else None, root)
        for other, each in enumerate(outputs):
            same(each, held[other] if rank == root else torch.zeros_like(each), "gather", numel, place, other)
        dist.scatter(tensor, [put(each, place) for each in held] if rank == root else None, root)
        same(tensor, held[rank], "scatter", numel, place)
        parts = [holds(rank * 10 + to, numel, torch.uint8) for to in range(world_size)]
        source = put(torch.cat(parts), place)
        dist.all_to_all_single(output, source)
        wanted = [holds(other * 10 + rank, numel, torch.uint8) for other in range(world_size)]
        same(output, torch.cat(wanted), "all_to_all_single", numel, place)
        outputs = [put(torch.zeros(numel, dtype=torch.uint8), place) for _ in held]
        dist.all_to_all(outputs, list(source.split(max(1, numel))) if numel else outputs)
        for other, each in enumerate(outputs):
            same(each, wanted[other], "all_to_all", numel, place, other)
        tensor = put(held[rank], place)
        dist.broadcast(tensor, root)
        same(tensor, held[root], "broadcast", numel, place)


def check_uneven() -> None:
    """Splits and parts of different lengths, some of them empty."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for scale in (1, 3000, 90_000):  # small, direct or staged, several pieces
        for place in PLACES:
            given = [scale * ((rank + to) % 3) for to in range(world_size)]
            taken = [scale * ((other + rank) % 3) for other in range(world_size)]
            blocks = [holds(10 * rank + to, 2 * rows).view(rows, 2) for to, rows in enumerate(given)]
            wanted = [holds(10 * other + rank, 2 * rows).view(rows, 2) for other, rows in enumerate(taken)]
            output = put(torch.zeros(sum(taken), 2), place)
            dist.all_to_all_single(output, put(torch.cat(blocks), place), taken, given)
            same(output, torch.cat(wanted), "all_to_all_single", scale, place)
            outputs = [put(torch.zeros(rows, 2), place) for rows in taken]
            dist.all_to_all(outputs, [put(block, place) for block in blocks])
            for other, each in enumerate(outputs):
                same(each, wanted[other], "all_to_all", scale, place, other)
            lengths = [scale * (to % 3) for to in range(world_size)]
            parts = [put(holds(10 * rank + to, length), place) for to, length in enumerate(lengths)]
            output = put(torch.zeros(lengths[rank]), place)
            dist.reduce_scatter(output, parts)
            held = [holds(10 * other + rank, lengths[rank]) for other in range(world_size)]
            same(output, reduced("sum", held), "reduce_scatter of uneven parts", scale, place)
            outputs = [put(torch.zeros(length), place) for length in lengths]
            dist.all_gather(outputs, put(holds(rank, lengths[rank]), place))
            for other, each in enumerate(outputs):
                same(each, holds(other, lengths[other]), "all_gather of uneven parts", scale, place, other)


def check_shapes() -> None:
    """Tensors of any dimension: a scalar, a transposed matrix, a slice of another tensor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    same(scalar, torch.tensor(float(sum(range(world_size)))), "scalar")
    for rows, columns in ((3, 5), (400, 300)):
        held = everybody(rows * columns)
        matrix = put(held[rank].view(rows, columns), "shared").t()
        dist.all_reduce(matrix)
        same(matrix, reduced("sum", held).view(rows, columns).t(), "transposed", rows)
        whole = put(torch.full((rows, columns + 4), -1.0), "shared")
        whole[:, 2:-2].copy_(held[rank].view(rows, columns))
        dist.all_reduce(whole[:, 2:-2])
        same(whole[:, 2:-2], reduced("sum", held).view(rows, columns), "slice", rows)
        edges = torch.cat([whole[:, :2], whole[:, -2:]], 1)
        same(edges, torch.full((rows, 4), -1.0), "beside the slice", rows)
    parameter = torch.nn.Parameter(holds(rank, 10))
    with torch.no_grad():
        dist.all_reduce(parameter)
    same(parameter.detach(), reduced("sum", everybody(10)), "a parameter")


def check_in_place_halves() -> None:
    """reduce_scatter into, and all_gather out of, the own part of the same tensor; as sharding does it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for part, place in itertools.product((10, 5000, 200_003), ("ordinary", "shared")):
        held = everybody(part * world_size)
        whole = put(held[rank], place)
        own = whole[rank * part : (rank + 1) * part]
        REDUCE_SCATTER(own, whole)
        total = reduced("sum", held)
        same(own, total[rank * part : (rank + 1) * part], "reduce_scatter in place", part, place)
        ALL_GATHER(whole, own)
        same(whole, total, "all_gather in place", part, place)


def check_overlaps() -> None:
    """What others still have to read lies where a result is to be written, and not in the own part of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gathers, scatters = (ALL_GATHER, imece.all_gather), (REDUCE_SCATTER, imece.reduce_scatter)
    for part, place in itertools.product((10, 100_003), ("ordinary", "shared")):
        held = everybody(part * world_size)
        starts = {0, part // 2 * (world_size > 1)}  # a part, no part
        for gather, at, threads in itertools.product(gathers, starts, (2, 1)):  # torch's copy, and memcpy
            whole = put(held[rank], place)
            torch.set_num_threads(threads)
            gather(whole, whole[at : at + part])
            wanted = torch.cat([each[at : at + part] for each in held])
            same(whole, wanted, "all_gather of a part of the output", part, place, at)
        total = reduced("sum", held)[rank * part : (rank + 1) * part]
        for scatter, other in itertools.product(scatters, (0, (rank + 1) % world_size)):
            whole = put(held[rank], place)
            output = whole[other * part : (other + 1) * part]
            scatter(output, whole)
            same(output, total, "reduce_scatter into a part of the input", part, place, other)
        whole = put(held[rank], place)
        dist.all_to_all_single(whole, whole)
        wanted = torch.cat([each[rank * part : (rank + 1) * part] for each in held])
        same(whole, wanted, "all_to_all in place", part, place)


def check_lazy_views() -> None:
    """Views that torch conjugates or negates when they are read: their bytes are not their values.

    torch itself refuses conjugated ones in most of its calls, ours take them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for numel, place in itertools.product((4, 30_000), ("ordinary", "shared")):
        held = [torch.complex(-each, each) for each in everybody(numel)]

        def conj(place: str = place, own: Tensor = held[rank]) -> Tensor:
            view = put(own.conj_physical(), place).conj()
            assert view.is_conj()
            return view

        def neg(place: str = place, own: Tensor = held[rank]) -> Tensor:
            view = torch._neg_view(put(-own.real, place))
            assert view.is_neg() and view.is_contiguous()
            return view

        for make, calls, values in (
            (conj, (imece,), held),
            (neg, (imece, dist), [each.real for each in held]),
        ):
            for call in calls:
                tensor = make()
                call.all_reduce(tensor)
                same(tensor.clone(), reduced("sum", values), "all_reduce", call, make, numel, place)
                tensor = make()
                call.broadcast(tensor, world_size - 1)
                same(tensor.clone(), values[-1], "broadcast", call, make, numel, place)
                gather = ALL_GATHER if call is dist else imece.all_gather
                gathered = make().repeat(world_size)
                gather(gathered, make())
                same(gathered, torch.cat(values), "all_gather", call, make, numel, place)
                scatter = REDUCE_SCATTER if call is dist else imece.reduce_scatter
                tensor = make()
                scatter(tensor, gathered)
                same(tensor.clone(), values[rank] * world_size, "reduce_scatter", call, make, numel, place)
        parts = [torch.zeros(numel) for _ in held]
        dist.all_gather(parts, neg())
        same(torch.stack(parts), torch.stack(held).real, "all_gather of a list", numel, place)
        target = neg()
        works = [dist.isend(neg(), (rank + 1) % world_size)] if world_size > 1 else []
        if works:
            dist.recv(target, (rank - 1) % world_size)
            assert works[0] is not None and works[0].wait()
        same(target.clone(), held[(rank - (world_size > 1)) % world_size].real, "a message", numel, place)


def check_mistakes() -> None:
    """Refused before anything is sent, so that the group goes on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    for numel in (4, 30_000):
        tensor = torch.full((numel,), float(rank))
        one, few = torch.ones(1).expand(numel), torch.ones(numel).to(torch.uint16)
        ones = [torch.ones(numel)] * world_size
        expanded = rf"float32\[{numel}\] is expanded: .* a result cannot be written to it; pass its clone"
        summed = (
            "cannot reduce torch.uint16 with 'sum': torch has no such operation on CPUs; convert the tensor"
        )
        mistakes: list[tuple[Callable[[], object], str]] = [
            (lambda: dist.all_reduce(one), expanded),  # noqa: B023
            (lambda: dist.all_reduce(one, async_op=True), expanded),  # noqa: B023
            (lambda: imece.all_reduce(one), expanded),  # noqa: B023
            (lambda: dist.all_to_all([one] * world_size, ones), expanded),  # noqa: B023
            (lambda: dist.all_reduce(few), summed),  # noqa: B023
            (lambda: dist.all_reduce(few, async_op=True), summed),  # noqa: B023
            (lambda: imece.all_reduce(few), summed),  # noqa: B023
        ]
        sparse = torch.eye(2).to_sparse()
        back, forth = [numel + 1, -1] + [0] * (world_size - 2), [numel] + [0] * (world_size - 1)
        whole = dist._make_nccl_premul_sum(2.0)
        mistakes += [
            (
                lambda: dist.all_to_all_single(torch.empty(numel), tensor, back, forth),  # noqa: B023
                r"splits \[\d+, -1",
            ),
            (lambda: dist.all_gather(ones, tensor[1:]), r"all_gather: tensor 0 of the list"),  # noqa: B023
            (
                lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), whole),  # noqa: B023
                "premul_sum multiplies by a fraction, which torch.int32",
            ),
            (lambda: dist.all_reduce(sparse), "is sparse, .* pass its to_dense"),  # noqa: B023
            (lambda: dist.broadcast(sparse, 0), "is sparse"),  # noqa: B023
        ]
        mistakes += [
            (lambda: dist.send(tensor, group_dst=1 - rank % 2, tag=2**63), "a tag is a whole number"),  # noqa: B023
            (lambda: dist.irecv(tensor, tag=2**63), "a tag is a whole number"),  # noqa: B023
        ]
        for wrong in (-1, world_size):
            there = f"rank {wrong}: the group has ranks 0 to {world_size - 1}"
            mistakes += [
                (lambda: dist.broadcast(tensor, group_src=wrong), f"broadcast from {there}"),  # noqa: B023
                (lambda: dist.reduce(tensor, group_dst=wrong), f"reduce to {there}"),  # noqa: B023
                (lambda: dist.gather(tensor, group_dst=wrong), f"gather to {there}"),  # noqa: B023
                (lambda: dist.scatter(tensor, group_src=wrong), f"scatter from {there}"),  # noqa: B023
                (lambda: dist.send(tensor, group_dst=wrong), f"send to {there}"),  # noqa: B023
                (lambda: dist.isend(tensor, group_dst=wrong), f"send to {there}"),  # noqa: B023
                (lambda: dist.recv(tensor, group_src=wrong), f"recv from {there}"),  # noqa: B023
            ]
            for call, words in mistakes:
                with pytest.raises(ValueError, match=words):
                    call()
            mistakes.clear()
        same(tensor, torch.full((numel,), float(rank)), "after mistakes", numel)
        dist.all_reduce(tensor)
        same(tensor, torch.full((numel,), float(sum(range(world_size)))), "all_reduce after mistakes", numel)


def check_coalesced() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = (5, 30_000, 1)
    held = [everybody(numel, seed=at) for at, numel in enumerate(sizes)]
    for asynchronous in (False, True):
        tensors = [each[rank].clone() for each in held]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        outputs = [torch.zeros(numel * world_size) for numel in sizes]
        if asynchronous:
            manager.wait()
        for each, tensor in zip(held, tensors, strict=True):
            same(tensor, reduced("sum", each), "all_reduce coalesced", asynchronous)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for output, each in zip(outputs, held, strict=True):
                dist.all_gather_into_tensor(output, each[rank].clone())
        if asynchronous:
            manager.wait()
        for each, output in zip(held, outputs, strict=True):
            same(output, torch.cat(each), "all_gather_into_tensor coalesced", asynchronous)
        shards = [torch.zeros(numel) for numel in sizes]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for shard, output in zip(shards, outputs, strict=True):
                dist.reduce_scatter_tensor(shard, output)
        if asynchronous:
            manager.wait()
        for each, shard in zip(held, shards, strict=True):
            same(shard, each[rank] * world_size, "reduce_scatter_tensor coalesced", asynchronous)
    tensors = [each[rank].clone() for each in held]
    dist.all_reduce_coalesced(tensors)
    same(tensors[1], reduced("sum", held[1]), "all_reduce_coalesced")
    # One list of outputs a tensor here, unlike torch's C++ side (one list a rank).
    lists = [[torch.zeros(numel) for numel in sizes] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, [each[rank] for each in held])
    for other, outputs in enumerate(lists):
        for each, output in zip(held, outputs, strict=True):
            same(output, each[other], "all_gather_coalesced", other)
    output = torch.zeros(7)
    dist.reduce_scatter(output, [holds(10 * rank + to, 7) for to in range(world_size)])
    wanted = reduced("sum", [holds(10 * other + rank, 7) for other in range(world_size)])
    same(output, wanted, "reduce_scatter of a list")


def check_async() -> None:
    """Many under way at once, waited for in reverse, a synchronous call in their midst; futures."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    works, tensors, wanted = [], [], []
    for at, (numel, place) in enumerate(itertools.product((3, 6000, 300_001), PLACES)):
        held = everybody(numel, seed=at)
        tensor = put(held[rank], place)
        tensors += [tensor, torch.zeros(world_size * numel)]
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(ALL_GATHER(tensors[-1], held[rank], async_op=True))
        wanted += [reduced("sum", held), torch.cat(held)]
        if at == 7:
            flag = torch.ones(1)
            dist.all_reduce(flag)
            assert flag.item() == world_size
            assert all(work.is_completed() for work in works), "a synchronous call ends after those before it"
    for work, tensor, expected in reversed(list(zip(works, tensors, wanted, strict=True))):
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        same(tensor, expected, "async")
    for numel in (3, 300_001):
        held = everybody(numel)
        tensor = held[rank].clone()
        future = dist.all_reduce(tensor, async_op=True).get_future()
        half = future.then(lambda done: done.value()[0] / 2)
        same(half.wait(), reduced("sum", held) / 2, "then")
        assert future.done() and future.value()[0].data_ptr() == tensor.data_ptr()
    work = dist.barrier(async_op=True)
    assert work.wait() and work.get_future().done()
    # Two on the same tensor: the second begins when the first has ended.
    tensor = torch.ones(20_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    works[-1].wait()
    same(tensor, torch.full((20_000,), float(world_size**3)), "three on one tensor")


def check_messages() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    many_pieces = RING_PIECE_BYTES * (RING_SLOTS + 2) + 13
    sizes_bytes = (0, 1, RING_PIECE_BYTES, RING_PIECE_BYTES + 1, many_pieces)
    for numel, place in itertools.product(sizes_bytes, places()):
        source = put(holds(rank, numel, torch.uint8), place)
        target = put(torch.zeros(numel, dtype=torch.uint8), place)
        if rank == 0:  # blocking, in a ring: somebody has to begin
            dist.send(source, right)
            dist.recv(target, left)
        else:
            assert dist.recv(target, left) == left
            dist.send(source, right)
        same(target, holds(left, numel, torch.uint8), "send and recv", numel, place)
        # Tags in another order than that of the sends, large ones in front of small ones.
        sizes = [numel, 10, numel, 3]
        works = [
            dist.isend(put(holds(rank, size, torch.uint8, tag), place), right, tag=tag)
            for tag, size in enumerate(sizes)
        ]
        for tag in (3, 0, 2, 1):
            target = put(torch.zeros(sizes[tag], dtype=torch.uint8), place)
            received = dist.irecv(target, left, tag=tag)
            assert received is not None and received.wait()
            same(target, holds(left, sizes[tag], torch.uint8, tag), "tag", tag, numel, place)
        assert all(work is not None and work.wait() for work in works)
        # All at once, both directions, receives last: torch's exchange of neighbours.
        targets = {peer: put(torch.zeros(numel, dtype=torch.uint8), place) for peer in (left, right)}
        calls = [dist.P2POp(dist.isend, source, peer) for peer in (right, left)]
        calls += [dist.P2POp(dist.irecv, targets[peer], peer) for peer in targets]
        if world_size == 2:
            calls = [calls[0], calls[2]]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for peer, target in targets.items():
            same(target, holds(peer, numel, torch.uint8), "batch_isend_irecv", numel, place)


def check_any_source() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    for numel in (4, 300_000):
        if rank == 0:
            seen = []
            for _ in range(world_size - 1):
                target = torch.zeros(numel)
                source = dist.recv(target, tag=5)
                same(target, holds(source, numel), "recv from any source", source)
                seen.append(source)
            assert sorted(seen) == list(range(1, world_size))
        else:
            dist.send(holds(rank, numel), 0, tag=5)
        dist.barrier()


def check_objects() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "text": "x" * (10 + 50_000 * (rank == world_size - 1))}
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, own)
    assert [each["rank"] for each in gathered] == list(range(world_size))  # type: ignore[index]
    shared: list[object] = [own, rank]
    dist.broadcast_object_list(shared, src=world_size - 1)
    assert shared == [gathered[-1], world_size - 1]
    collected: list[object] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(own, collected, dst=0)
    assert collected is None or collected == gathered
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(world_size)) if rank == 0 else None, src=0)
    assert mine == [rank]


def check_functional() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 3:
        return  # the first functional call imports for seconds, in every rank
    group = dist.group.WORLD
    assert group is not None
    for numel in (4, 30_000):
        held = everybody(numel * world_size)
        own = held[rank]
        total = functional.all_reduce(own, "sum", group) + 0
        same(total, reduced("sum", held), "functional all_reduce", numel)
        same(own, holds(rank, numel * world_size), "a functional collective leaves its input alone", numel)
        gathered = functional.all_gather_tensor(own, 0, group) + 0
        same(gathered, torch.cat(held), "functional all_gather_tensor", numel)
        part = functional.reduce_scatter_tensor(own, "sum", 0, group) + 0
        wanted = reduced("sum", held)[rank * numel : (rank + 1) * numel]
        same(part, wanted, "functional reduce_scatter_tensor", numel)
        moved = functional.all_to_all_single(own, None, None, group) + 0
        wanted = torch.cat([each[rank * numel : (rank + 1) * numel] for each in held])
        same(moved, wanted, "functional all_to_all_single", numel)
        same(functional.broadcast(own, 0, group) + 0, held[0], "functional broadcast", numel)
        pair = functional.all_reduce_coalesced([own, own * 2], "sum", group)
        same(pair[0] + 0, reduced("sum", held), "functional all_reduce_coalesced", numel)
        same(pair[1] + 0, reduced("sum", held) * 2, "functional all_reduce_coalesced", numel)


def check_groups() -> None:
    """Groups of some of the ranks, several at once, their asynchronous work interleaved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    members = [list(range(0, world_size, 2)), list(range(world_size)), [world_size - 1, 0], [0]]
    groups = [dist.new_group(sorted(ranks), backend="shm") for ranks in members]
    mine = [(sorted(ranks), group) for ranks, group in zip(members, groups, strict=True) if rank in ranks]
    for round_ in range(6):
        works, tensors = [], []
        numel = (3, 5000, 300_001)[round_ % 3]
        for ranks, group in mine if round_ % 2 else mine[::-1]:
            tensor = put(holds(rank, numel), ("ordinary", "shared")[round_ % 2])
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            tensors.append((tensor, reduced("sum", [holds(other, numel) for other in ranks])))
            root = holds(rank, 9, seed=round_)
            works.append(dist.broadcast(root, src=ranks[-1], group=group, async_op=True))
            tensors.append((root, holds(ranks[-1], 9, seed=round_)))
        for work in works:
            work.wait()
        for tensor, wanted in tensors:
            same(tensor, wanted, "groups", round_)
    with_last = dist.new_group([0, world_size - 1], backend="shm")
    if rank in (0, world_size - 1):
        peer = world_size - 1 - rank
        target, source = torch.zeros(5), holds(rank, 5)
        works = [dist.irecv(target, peer, group=with_last), dist.isend(source, peer, group=with_last)]
        for work in works:
            work.wait()
        same(target, holds(peer, 5), "a message in a group: the peer is named by its rank in the world")


def check_bits() -> None:
    """Random numbers: every element is ((x0 + x1) + x2) + ..., on every rank, whichever way it went."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    different = 0
    for dtype, numel in itertools.product((torch.float32, torch.bfloat16), (1000, 270_001)):
        held = [
            torch.randn(numel, generator=torch.Generator().manual_seed(other)).to(dtype)
            for other in range(world_size)
        ]
        total = held[0].float()
        backwards = held[-1].float()
        for each in held[1:]:
            total = total + each.float()
        for each in held[-2::-1]:
            backwards = backwards + each.float()
        wanted, kind = total.to(dtype), (dtype, numel)
        different += int((wanted != backwards.to(dtype)).sum())
        for place in PLACES:
            tensor = put(held[rank], place)
            dist.all_reduce(tensor)
            same(tensor, wanted, "bits of all_reduce", kind, place)
            for root in (0, world_size - 1):
                tensor = put(held[rank], place)
                dist.reduce(tensor, root)
                same(tensor, wanted if rank == root else held[rank], "bits of reduce", kind, place, root)
            part = numel // world_size
            output = torch.zeros(part, dtype=dtype)
            REDUCE_SCATTER(output, put(held[rank][: part * world_size], place))
            same(output, wanted[rank * part : (rank + 1) * part], "bits of reduce_scatter", kind, place)
    assert world_size < 3 or different > 100, "these numbers would not show another order"


def check_premultiplied() -> None:
    """PREMUL_SUM, with which fully_shard sums under a divide factor: each rank multiplies by its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(rank + 0.5)  # for any backend
    for numel, dtype, place in itertools.product((8, 30_000), (torch.float32, torch.bfloat16), PLACES):
        held = everybody(numel * world_size, dtype)
        wanted = reduced("sum", [each * (other + 0.5) for other, each in enumerate(held)])
        tensor = put(held[rank], place)
        dist.all_reduce(tensor, op)
        same(tensor, wanted, "all_reduce", numel, dtype, place)
        tensor = put(held[rank], place)
        dist.reduce(tensor, 0, op)
        same(tensor, wanted if rank == 0 else held[rank], "reduce", numel, dtype, place)
        source, output = put(held[rank], place), put(torch.zeros(numel, dtype=dtype), place)
        REDUCE_SCATTER(output, source, op)
        same(output, wanted.chunk(world_size)[rank], "reduce_scatter", numel, dtype, place)
        same(source, held[rank], "what was scattered", numel, dtype, place)


def check_integer_average() -> None:
    """Exact in int64, also where the sum does not fit the dtype; truncated toward zero."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for numel in (10, 30_000):
        tensor = torch.full((numel,), 250, dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((numel,), 250, dtype=torch.uint8), "avg of uint8")
        tensor = torch.full((numel,), -7 if rank == 0 else 0, dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((numel,), -(7 // world_size), dtype=torch.int32), "avg of int32")
        tensor = torch.full((numel,), 2**31 - 1, dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((numel,), 2**31 - 1, dtype=torch.int32), "avg of large int32")


CHECKS: tuple[Callable[[], None], ...] = (
    check_dtypes_and_ops,
    check_reductions_of_all_sizes,
    check_exchanges_of_all_sizes,
    check_uneven,
    check_shapes,
    check_in_place_halves,
    check_overlaps,
    check_lazy_views,
    check_mistakes,
    check_coalesced,
    check_async,
    check_messages,
    check_any_source,
    check_objects,
    check_functional,
    check_groups,
    check_bits,
    check_premultiplied,
    check_integer_average,
)


def run_checks(small_slots: bool) -> int:
    if small_slots:  # every border at small sizes; a slot takes a chunk at least
        board.SLOT_BYTES = board.CROWDED_SLOT_BYTES = reducing.CHUNK_BYTES
    dist.init_process_group("shm")
    assert slot_bytes() <= reducing.CHUNK_BYTES or not small_slots
    anchor = shared_empty(1)  # keeps its arena: a new one for each tensor would cost more than the checks
    for check in CHECKS:
        check()
    del anchor
    dist.destroy_process_group()
    return len(CHECKS)


def test_nothing_with_a_stride_is_sent_and_a_message_is_known_by_its_tag() -> None:
    alone = SharedMemoryGroup(dist.HashStore(), 0, 1, timedelta(seconds=10))
    nothing = torch.zeros(4)[0:0:2]  # contiguous, of stride 2, which a view as bytes does not take
    with alone.inline():
        alone.send([nothing], 0, 7)
        alone.recv([torch.empty(0)], 0, 7)
        alone.allgather([[torch.empty(0)]], [nothing])
        alone.all_to_all_single(torch.empty(0), nothing, [], [])
    receiving, _ = alone._receiving([0], torch.ones(3), 516816897)
    sending = alone._sending(0, torch.ones(3), 7)
    said = [f"{describe(each.fingerprint)}, {each.which()}" for each in (receiving, sending)]
    assert said == ["recv from 0 of float32[3], tag 516816897", "send of float32[3], tag 7"]
    alone.shutdown()


def test_a_group_that_is_not_split() -> None:
    alone = SharedMemoryGroup(dist.HashStore(), 0, 1, timedelta(seconds=10))
    with pytest.raises(RuntimeError, match="new_group"):  # where torch's would end the process
        alone.split_group([0])
    alone.shutdown()


def test_a_group_has_another_timeout_from_then_on() -> None:
    alone = SharedMemoryGroup(dist.HashStore(), 0, 1, timedelta(seconds=600))
    alone.set_timeout(timedelta(seconds=0.1))
    assert alone.timeout == timedelta(seconds=0.1)
    with pytest.raises(CollectiveTimeoutError, match="rank 0 waited 0 s"), alone.inline():
        alone.recv([torch.empty(3)], 0, 7)
    alone.shutdown()


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=pytest.mark.slow if size != 3 else ()) for size in WORLD_SIZES],
)
def test_every_call_of_torch(world_size: int) -> None:
    small_slots = world_size != 2  # and once as they are
    assert run_ranks(run_checks, world_size, args=(small_slots,), backend=None) == [len(CHECKS)] * world_size
