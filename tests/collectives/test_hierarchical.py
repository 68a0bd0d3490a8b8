"""Collectives over hosts: exact, with the same bits in both halves, and as few bytes as the formula says."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import imece
from imece.collectives import auto, hierarchical, ops
from imece.collectives.hierarchical_chunk import HostGroups
from imece.collectives.schedules import cost
from imece.collectives.shared_memory.arena import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.errors import MismatchError
from imece.mesh import Mesh
from tests.collectives.sent import sent_by
from tests.collectives.test_wire import HALF_UNIT, bits, noise
from tests.ranks import run_ranks

INTERLEAVED = {4: "abab", 6: "abcbca"}  # by rank the host; of six, torch's groups have hosts in two orders


def small(call: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Makes a call in chunks of 8 KiB, so that a little has many."""
    with mock.patch.multiple(hierarchical, CHUNK_BYTES=8 * 1024, LEAST_BYTES=0):
        return call(*arguments)


def on_hosts(world_size: int, each: int) -> Callable[[int], dict[str, str]]:
    """Environment of ranks of one host that are not neighbours."""
    names = INTERLEAVED.get(world_size, "a" * world_size) if each > 1 else "abcdef"[:world_size]
    return lambda rank: {"IMECE_HOST": names[rank], "LOCAL_RANK": str(names[:rank].count(names[rank]))}


@pytest.mark.parametrize(
    ("hosts", "each"),
    [(1, 2), (2, 1), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 3), (3, 2)))],
)
def test_all_reduce(hosts: int, each: int) -> None:
    """Emulated hosts: shm inside, Gloo between."""
    results = run_ranks(
        reduce_over_hosts, hosts * each, args=(hosts,), backend=None, ranks_per_host=each, timeout_s=200
    )
    assert results[0]["cases"] > 40
    assert all(result == results[0] for result in results), "ranks differ in bits"


@pytest.mark.parametrize(
    ("hosts", "each"),
    [(1, 1), (2, 1), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 3), (3, 2)))],
)
def test_halves(hosts: int, each: int) -> None:
    """Reduce-scatter and all-gather, with ranks of a host that are not neighbours."""
    results = run_ranks(
        halves_over_hosts, hosts * each, args=(hosts,), backend=None, ranks_per_host=each,
        env=on_hosts(hosts * each, each), timeout_s=200,
    )  # fmt: skip
    assert results == [results[0]] * len(results) and results[0] > 80


def test_uneven_hosts_fall_back_to_a_ring() -> None:
    run_ranks(reduce_over_uneven_hosts, 3, backend=None, ranks_per_host=2)


def test_asynchronous_calls_go_side_by_side() -> None:
    """What is held up in one lane holds up neither another one nor a call that waits."""
    results = run_ranks(side_by_side, 4, backend=None, ranks_per_host=2, env=on_hosts(4, 2), timeout_s=200)
    assert results == [[1, 2, 0, 1, 2]] * 4


def test_asynchronous_calls_meet_once_in_the_host() -> None:
    """Where tensors lie is told with the check; what is not worked on where it lies meets once more."""
    results = run_ranks(meeting, 4, backend=None, ranks_per_host=2, env=on_hosts(4, 2), timeout_s=200)
    for rank, found in enumerate(results):  # rank 0 has the ordinary one, and rank 2 is beside it
        expected = {"shared": 0, "half averaged": 1, "one ordinary": int(rank in (0, 2)), "strided": 1}
        assert found == expected, rank


def test_who_waits_in_its_host_leaves_its_core() -> None:
    """Others compute there, and what it waits for takes milliseconds anyway."""
    run_ranks(waiting_in_the_host, 4, backend=None, ranks_per_host=2, env=on_hosts(4, 2), timeout_s=100)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_first_call_over_hosts_that_others_do_not_make(async_op: bool, made: bool) -> None:
    """What differs is said on every rank, though one has nothing to offer to those of its host, and has not
    asked for the groups that the others need. made: those groups are there, as on CPUs."""
    env = on_hosts(4, 2)
    run_ranks(differing, 4, args=[async_op, made], backend=None, ranks_per_host=2, env=env, timeout_s=20)


def test_groups_of_hosts_that_are_made_on_first_use() -> None:
    """As on GPUs."""
    run_ranks(late_groups, 4, backend=None, ranks_per_host=2, env=on_hosts(4, 2), timeout_s=100)


# --- run by each rank


def arranged(hosts: int) -> tuple[Mesh, HostGroups]:
    mesh = imece.init(backend="cpu:gloo" if hosts > 1 else None)
    assert len(mesh.hosts) == hosts
    cross = mesh.cross_group
    assert cross is not None
    return mesh, HostGroups(mesh.host_group, cross, mesh.hosts)


def exact_of(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """fp64, or int64."""
    floating = parts[0].dtype.is_floating_point
    stack = torch.stack(parts).to(torch.float64 if floating else torch.int64)
    exact = stack.amax(0) if op == "max" else stack.prod(0) if op == "product" else stack.sum(0)
    return exact.div(len(parts), rounding_mode=None if floating else "trunc") if op == "avg" else exact


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor] * 2, -1)[..., 0]


def reduce_over_hosts(hosts: int) -> dict[str, Any]:
    """Against the exact result, for tensors in no, one and many chunks, with a tail or without."""
    mesh, groups = arranged(hosts)
    rank, world_size = mesh.rank, mesh.world_size
    hashes, cases = [], 0
    for numel in (0, 1, 6, 4096, 9_011):
        for op in ("sum", "avg", "max", "product"):
            for dtype in (torch.float32, torch.int64):
                parts = [(3 * noise(each, numel)).to(dtype) for each in range(world_size)]
                exact = exact_of(parts, op)
                got = strided(parts[rank])
                small(hierarchical.all_reduce, got, groups, op)
                what = f"{op} of {dtype}[{numel}]"
                torch.testing.assert_close(got.double(), exact.double(), rtol=1e-5, atol=1e-5, msg=what)
                whole = parts[rank].clone()
                pending = ops.all_reduce(whole, op, schedule="hierarchical", async_op=True)
                assert pending.wait(30) is whole
                torch.testing.assert_close(whole.double(), exact.double(), rtol=1e-5, atol=1e-5, msg=what)
                shared = imece.shared_empty(numel, dtype).copy_(parts[rank])
                small(hierarchical.all_reduce, shared, groups, op)
                assert torch.equal(shared, got), f"{what}: shared memory changes the bits"
                mixed = parts[rank].clone() if rank == 0 else shared.copy_(parts[rank])
                small(hierarchical.all_reduce, mixed, groups, op)
                assert torch.equal(mixed, got), f"{what}: one rank's ordinary memory changes the bits"
                hashes += [bits(got), bits(whole)]
                cases += 4
        for op in ("sum", "avg"):
            exact = torch.stack([noise(each, numel) for each in range(world_size)]).double().sum(0)
            size = torch.stack([noise(each, numel) for each in range(world_size)]).double().abs().sum(0)
            scale = world_size if op == "avg" else 1
            got = noise(rank, numel)
            small(hierarchical.all_reduce, got, groups, op, "bf16")
            error = (got.double() * scale - exact).abs()
            assert bool((error <= 2.02 * HALF_UNIT * size + 1e-6).all()), f"bf16 {op} of [{numel}]"
            shared = imece.shared_empty(numel).copy_(noise(rank, numel))
            small(hierarchical.all_reduce, shared, groups, op, "bf16")
            assert torch.equal(shared, got), f"bf16 {op} of [{numel}]: shared memory changes the bits"
            again = ops.all_reduce(noise(rank, numel), op, schedule="hierarchical", wire="bf16")
            in_bytes = ops.all_reduce(noise(rank, numel), op, schedule="hierarchical", wire="int8")
            # Of blocks that may be as large as the largest number; of the sums of a host, and of all.
            error, most = (in_bytes.double() * scale - exact).abs(), size.max() if numel else 0.0
            assert bool((error <= (groups.cross.size() + 1) / 254 * most).all()), f"int8 {op} of [{numel}]"
            hashes += [bits(got), bits(again), bits(in_bytes)]
            cases += 3
    exact_wire(groups)
    return {"cases": cases, "hashes": hashes}


def exact_wire(groups: HostGroups) -> None:
    """The negative control of the wires: numbers that they cannot hold survive only without them."""
    one_host = groups.cross.size() == 1
    for wire, expected in ((None, True), ("bf16", one_host), ("int8", one_host)):
        tensor = torch.full((64,), 1.0 + 2.0**-12)
        tensor[::8] = 2.0
        hierarchical.all_reduce(tensor, groups, "avg", wire=wire)
        assert bool((tensor[1:8] == 1.0 + 2.0**-12).all()) is expected


def halves_over_hosts(hosts: int) -> int:
    """Of every memory, dtype and reduction: a reduce-scatter has the bits of the all-reduce."""
    mesh, groups = arranged(hosts)
    cases = 0
    for numel in (0, 1, 3001):  # of one rank's slice
        cases += gathers(mesh, groups, numel, torch.float32)
        for op in ("sum", "avg"):
            cases += scatters(mesh, groups, numel, torch.float32, op)
            cases += sums_rows(mesh, groups, numel, torch.float32, op)
        cases += scatters(mesh, groups, numel, torch.float32, "sum", "bf16")
        cases += sums_rows(mesh, groups, numel, torch.float32, "sum", "bf16")
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool):
        cases += gathers(mesh, groups, 13, dtype)
        for op in ("avg", "product") if dtype in (torch.float64, torch.int64) else ("avg",):
            cases += scatters(mesh, groups, 13, dtype, op)
            cases += sums_rows(mesh, groups, 13, dtype, op)
    cases += scatters(mesh, groups, 13, torch.bfloat16, "sum", "bf16")
    cases += sums_rows(mesh, groups, 13, torch.bfloat16, "sum", "bf16")
    counts_bytes(mesh, groups)
    if hosts > 1 and groups.host.size() > 1:
        forced(mesh, groups)
    return cases


def memories(tensor: torch.Tensor, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values where all ranks, one of them, or none reaches them."""
    shared = imece.shared_empty(tensor.numel(), tensor.dtype)
    yield "shared", shared.copy_(tensor)
    yield "ordinary", tensor.clone()
    yield "mixed", tensor.clone() if rank == 0 else shared.copy_(tensor)
    yield "strided", strided(tensor)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return noise(rank, numel) > 0 if dtype == torch.bool else (3 * noise(rank, numel)).to(dtype)


def scatters(
    mesh: Mesh, groups: HostGroups, numel: int, dtype: torch.dtype, op: str, wire: str | None = None
) -> int:
    rank, world_size = mesh.rank, mesh.world_size
    given = values(rank, world_size * numel, dtype)
    own = slice(rank * numel, (rank + 1) * numel)
    what = f"{op} of {dtype}[{world_size} x {numel}], wire {wire}"
    whole = given.clone()
    small(hierarchical.all_reduce, whole, groups, op, wire)
    expected = whole[own]
    if dtype in (torch.float64, torch.int64):
        exact = exact_of([values(each, world_size * numel, dtype) for each in range(world_size)], op)
        torch.testing.assert_close(expected, exact[own], rtol=1e-12, atol=1e-12, msg=what)
    elif dtype == torch.bool:
        stack = torch.stack([values(each, world_size * numel, dtype) for each in range(world_size)])
        assert torch.equal(expected, (stack.any(0) if op in ("sum", "max") else stack.all(0))[own]), what
    rounded, cases = wire is not None and groups.cross.size() > 2, 0  # the sum too, in an all_reduce

    def as_expected(tensor: torch.Tensor) -> bool:
        return torch.equal(tensor.bfloat16().to(dtype) if rounded else tensor, expected)

    for where, tensor in memories(given, rank):
        got = strided(torch.zeros(numel, dtype=dtype)) if where == "ordinary" else tensor.new_empty(numel)
        small(hierarchical.reduce_scatter, got, tensor, groups, op, wire)
        assert as_expected(got), f"{what}: not the bits of all_reduce in {where} memory"
        assert torch.equal(tensor, given), f"{what}: the input has changed in {where} memory"
        if where in ("shared", "mixed"):
            result = small(hierarchical.reduce_scatter, tensor[own], tensor, groups, op, wire)
            assert torch.equal(result, got), f"{what}: in place it differs in {where} memory"
        cases += 1
    pending = ops.reduce_scatter(got, tensor, op, schedule="hierarchical", wire=wire, async_op=True)
    assert pending.wait(30) is got
    assert as_expected(got), f"{what}: chunks of another length differ"
    return cases


def sums_rows(
    mesh: Mesh, groups: HostGroups, numel: int, dtype: torch.dtype, op: str, wire: str | None = None
) -> int:
    """The bits of an all_reduce, of which a rank keeps what its place in the host is for."""
    rank, size, place, cases = mesh.rank, groups.host.size(), groups.host.rank(), 0
    given, own = values(rank, size * numel, dtype), slice(place * numel, (place + 1) * numel)
    what = f"{op} of {dtype}[{size} x {numel}], wire {wire}"
    expected = small(hierarchical.all_reduce, given.clone(), groups, op, wire)[own]
    for where, tensor in memories(given, rank):
        got = strided(torch.zeros(numel, dtype=dtype)) if where == "ordinary" else tensor.new_empty(numel)
        assert small(hierarchical.sum_of_rows, got, tensor, groups, op, wire) is got
        assert torch.equal(got, expected), f"{what}: not the bits of all_reduce in {where} memory"
        assert torch.equal(tensor, given), f"{what}: the input has changed in {where} memory"
        if where in ("shared", "mixed"):
            result = small(hierarchical.sum_of_rows, tensor[own], tensor, groups, op, wire)
            assert torch.equal(result, expected), f"{what}: in place it differs in {where} memory"
            tensor[own] = given[own]
            assert torch.equal(tensor, given), f"{what}: other slices have changed in {where} memory"
        cases += 1
    if op == "sum":
        for async_op in (False, True):
            found = ops.sum_of_rows(
                got.zero_(), tensor, group=groups.host, replicas=groups.cross, wire=wire, async_op=async_op
            )
            assert (found.wait(30) if async_op else found) is got
            assert torch.equal(got, expected), f"{what}: chunks of another length differ"
    return cases


def gathers(mesh: Mesh, groups: HostGroups, numel: int, dtype: torch.dtype) -> int:
    rank, world_size = mesh.rank, mesh.world_size
    parts = [values(each, numel, dtype) for each in range(world_size)]
    expected, what, cases = torch.cat(parts), f"{dtype}[{numel}]", 0
    own = slice(rank * numel, (rank + 1) * numel)
    memory = memories(torch.zeros(world_size * numel, dtype=dtype), rank)
    for (where, place), beside in itertools.product(memory, (0, hierarchical.BESIDE_BYTES)):
        with mock.patch.object(hierarchical, "BESIDE_BYTES", beside):
            assert small(hierarchical.all_gather, place.zero_(), parts[rank], groups) is place
            assert torch.equal(place, expected), f"{what} in {where} memory"
            mine = place[own].clone()
            place.zero_()
            place[own].copy_(mine)
            small(hierarchical.all_gather, place, place[own], groups)
            assert torch.equal(place, expected), f"{what}: in place it differs in {where} memory"
        cases += 1
    out = torch.zeros(world_size, numel, dtype=dtype)
    assert ops.all_gather(out, parts[rank], schedule="hierarchical", async_op=True).wait(30) is out
    assert torch.equal(out.view(-1), expected), what
    return cases


def counts_bytes(mesh: Mesh, groups: HostGroups) -> None:
    """What one rank really sends to other hosts, against the formula."""
    numel = 1200 * mesh.world_size
    per_host, hosts = groups.host.size(), groups.cross.size()
    whole, own, row = torch.ones(numel), torch.ones(1200), torch.ones(numel // per_host)
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("all_reduce", 1, lambda: hierarchical.all_reduce(whole, groups)),
        ("all_reduce", 0.5, lambda: hierarchical.all_reduce(whole, groups, wire="bf16")),
        ("reduce_scatter", 1, lambda: hierarchical.reduce_scatter(own, whole, groups)),
        ("reduce_scatter", 0.5, lambda: hierarchical.reduce_scatter(own, whole, groups, wire="bf16")),
        ("all_gather", 1, lambda: hierarchical.all_gather(whole, own, groups)),
        ("all_reduce", 1, lambda: hierarchical.sum_of_rows(row, whole, groups)),
        ("all_reduce", 0.5, lambda: hierarchical.sum_of_rows(row, whole, groups, wire="bf16")),
    ]
    for op, share, call in calls:
        with sent_by("hierarchical_chunk") as sent:
            call()
        between = cost(op, "ring", hosts, whole.nbytes / per_host)
        assert sum(sent) == share * between.nbytes, f"{op}: {sum(sent)} bytes sent"
        messages = 1 if op != "all_reduce" or hosts == 2 else 2
        assert len(sent) == messages * (hosts - 1), f"{op}: {len(sent)} messages sent"


def forced(mesh: Mesh, groups: HostGroups) -> None:
    """IMECE_SCHEDULE=hierarchical is for the group of all ranks; others go their own way."""
    calls: list[object] = []

    def noted(*args: Any, **_more: Any) -> object:
        calls.append(args)
        return args[0]

    whole, own = torch.ones(4 * mesh.world_size), torch.ones(4)
    with (
        mock.patch.object(auto, "FORCED", "hierarchical"),
        mock.patch.object(hierarchical, "reduce_scatter", noted),
        mock.patch.object(hierarchical, "all_gather", noted),
    ):
        ops.reduce_scatter(own, whole)
        ops.all_gather(whole, own)
        assert len(calls) == 2
        for group in (groups.host, groups.cross):
            assert torch.equal(
                ops.all_reduce(torch.ones(3), group=group), torch.full((3,), 1.0 * group.size())
            )
            ops.all_gather(torch.empty(4 * group.size()), own, group=group)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="for the group of all ranks, not for some"):
        ops.all_gather(torch.empty(4 * groups.host.size()), own, group=groups.host, schedule="hierarchical")


def reduce_over_uneven_hosts() -> None:
    mesh = imece.init()
    assert mesh.cross_group is None
    tensor, own = torch.arange(9.0) * (mesh.rank + 1), torch.empty(3)
    sums = torch.arange(9.0) * 6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops.reduce_scatter(own, tensor.clone(), schedule="hierarchical")
        assert torch.equal(own, sums[3 * mesh.rank : 3 * mesh.rank + 3])
        ops.all_reduce(tensor, schedule="hierarchical")
        assert torch.equal(tensor, sums)
        ops.all_gather(tensor.zero_(), own, schedule="hierarchical")
        assert torch.equal(tensor, sums)
    words = "becomes a ring: hosts hold different numbers of ranks, 1 to 2"
    assert sum(words in str(each.message) for each in caught) == 3


def side_by_side() -> list[int]:
    """The lanes of three calls, of which the first goes on when the others have ended; and of two sums of
    rows after them."""
    _, groups = arranged(2)
    go_on, lanes, whole = threading.Event(), [0, 0, 0], hierarchical.all_reduce

    def held(tensor: torch.Tensor, hosts: HostGroups, *args: Any) -> torch.Tensor:
        lanes[int(tensor[0])] = hosts.lane
        if tensor[0] == 0:
            assert go_on.wait(60), "the other calls have not ended beside this one"
        return whole(tensor, hosts, *args)

    tensors = [torch.full((1000,), float(each)) for each in range(3)]
    with mock.patch.object(hierarchical, "all_reduce", held):
        works = [ops.all_reduce(each, schedule="hierarchical", async_op=True) for each in tensors[:2]]
        works[1].wait(60)
        ops.all_reduce(tensors[2], schedule="hierarchical")
        assert not works[0].done()
        go_on.set()
        works[0].wait(60)
    assert [int(each[0]) for each in tensors] == [0, 4, 8]
    rows = hierarchical.sum_of_rows

    def noted(out: torch.Tensor, tensor: torch.Tensor, hosts: HostGroups, *args: Any) -> torch.Tensor:
        lanes.append(hosts.lane)
        return rows(out, tensor, hosts, *args)

    with mock.patch.object(hierarchical, "sum_of_rows", noted):
        for each in tensors[1:]:
            work = ops.sum_of_rows(each[:500], each, group=groups.host, replicas=groups.cross, async_op=True)
            work.wait(60)
    return lanes


def meeting() -> dict[str, int]:
    """How often a call met in its lane before data moved, by what its tensor is."""
    mesh = imece.init(device="cpu")
    assert isinstance(mesh.host_group, SharedMemoryGroup) and len(mesh.hosts) == 2
    numel = 4 * 1001
    met: list[object] = []
    opens = SharedMemoryGroup._open

    def noted(group: SharedMemoryGroup, *args: Any) -> Any:
        met.append(group)
        return opens(group, *args)

    def shared(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return shared_empty(numel, dtype)

    tensors = {
        "shared": shared(),
        "half averaged": shared(torch.float16),
        "one ordinary": torch.empty(numel) if mesh.rank == 0 else shared(),
        "strided": strided(shared()),
    }
    counts = {}
    with mock.patch.object(SharedMemoryGroup, "_open", noted):
        for name, tensor in tensors.items():
            op = "avg" if name == "half averaged" else "sum"
            out, part = shared(tensor.dtype), torch.empty(numel // 4, dtype=tensor.dtype)
            parts = [(torch.arange(numel) % 7 + rank).to(tensor.dtype) for rank in range(4)]
            exact = exact_of(parts, op).to(tensor.dtype)
            mine = slice(mesh.rank * numel // 4, (mesh.rank + 1) * numel // 4)
            for _ in range(2):
                tensor.copy_(parts[mesh.rank])
                met.clear()
                ops.reduce_scatter(part, tensor, op, schedule="hierarchical", async_op=True).wait(60)
                counts[name] = len(met)
                assert torch.equal(part, exact[mine]), name
                ops.all_reduce(tensor, op, schedule="hierarchical", async_op=True).wait(60)
                assert torch.equal(tensor, exact), name
                assert len(met) == 2 * counts[name], f"{name}: {len(met)} meetings"
                ops.all_gather(out, part, schedule="hierarchical", async_op=True).wait(60)
                assert torch.equal(out, exact), name
                ordinary = torch.empty_like(exact)  # what comes lands beside it
                ops.all_gather(ordinary, part, schedule="hierarchical", async_op=True).wait(60)
                assert torch.equal(ordinary, exact), name
                assert len(met) == 2 * counts[name], f"{name}: the gather met again"
                out.copy_(torch.cat([part] * 4))
                following = out[(mesh.rank + 1) % 4 * part.numel() :][: part.numel()]  # another rank's place
                ops.all_gather(out, following, schedule="hierarchical", async_op=True).wait(60)
                assert torch.equal(out, exact), name
                assert len(met) == 2 * counts[name] + 1, f"{name}: others write to what is still to be read"
    return counts


def waiting_in_the_host() -> None:
    """Rank 1 is late; nobody looks for it again and again."""
    mesh = imece.init(device="cpu")
    tensor = shared_empty(1000)
    ops.all_reduce(tensor, schedule="hierarchical")
    looked = mock.Mock(side_effect=os.sched_yield)
    with mock.patch("imece.collectives.shared_memory.waiting.os.sched_yield", looked):
        time.sleep(0.3 if mesh.rank == 1 else 0)
        pending = ops.all_reduce(tensor, schedule="hierarchical", async_op=True)
    pending.wait(60)
    assert looked.call_count == 0, f"rank {mesh.rank} looked {looked.call_count} times"


def differing(async_op: bool, made: bool) -> None:
    with contextlib.nullcontext() if made else mock.patch.object(Mesh, "_make_groups_of_hosts"):
        mesh = imece.init(device="cpu")
    assert mesh.has_groups_of_hosts is made
    schedule = None if mesh.rank == 2 else "hierarchical"
    with pytest.raises(MismatchError, match=r"rank 2.*neither schedule nor wire"):
        found: Any = ops.all_reduce(shared_empty(1000), schedule=schedule, async_op=async_op)
        found.wait(60)


def late_groups() -> None:
    with mock.patch.object(Mesh, "_make_groups_of_hosts"):
        mesh = imece.init(device="cpu")
    for async_op in (True, False):
        tensor = shared_empty(1000).fill_(mesh.rank)
        found: Any = ops.all_reduce(tensor, schedule="hierarchical", async_op=async_op)
        assert (found.wait(60) if async_op else found) is tensor and bool((tensor == 6).all())
        assert mesh.has_groups_of_hosts
