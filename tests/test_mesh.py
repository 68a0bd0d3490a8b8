"""Which ranks are in which group; and that ranks with different ideas of the world are told so."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import imece
from imece import meeting, moments, opening
from imece import mesh as mesh_module
from imece import store as store_module
from imece.axes import AXES, check_axes, coordinates, crossing, partition
from imece.collectives import recorder
from imece.collectives.recording import attach
from imece.collectives.shared_memory import board
from imece.collectives.shared_memory.board import CLOSED
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.device import check_backend, choose_device
from imece.errors import CollectiveError, CollectiveTimeoutError, PeerLostError, UserError
from imece.store import read_note
from imece.world import World, check_not_opened
from tests.ranks import run_ranks, start_ranks

# --- what can be asked for ---


def test_a_backend_that_torch_does_not_have() -> None:
    """Those of torch that move nothing are not among what is offered."""
    with pytest.raises(UserError, match=r"^backend 'foo': torch here has gloo, [^']*shm") as caught:
        check_backend("foo")
    assert "undefined" not in str(caught.value) and "fake" not in str(caught.value)
    check_backend("fake")


def test_a_backend_that_torch_knows_and_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match=r"^backend 'cpu:gloo,cuda:nccl': torch here has gloo, ") as caught:
        check_backend("cpu:gloo,cuda:nccl")
    assert caught.value.args[0].count("nccl") == 1, "it is not offered"


def test_a_timeout_in_seconds() -> None:
    seconds: Any = 3
    with pytest.raises(
        UserError, match=r"^timeout=3: give a datetime.timedelta, timedelta\(seconds=60\) say$"
    ):
        imece.init(timeout=seconds)


def test_a_number_of_ranks_in_words() -> None:
    ranks: Any = "1"  # as argparse without type=int has it
    with pytest.raises(UserError, match=r"^ranks='1': give a whole number$"):
        imece.init(ranks=ranks)


@pytest.mark.parametrize("axes", ["tensor", ["tensor"], 2])
def test_axes_without_sizes(axes: Any) -> None:
    with pytest.raises(UserError) as caught:
        imece.init(axes)
    assert str(caught.value) == f"axes={axes!r}: give sizes by name, {{'shard': 2}} say"


# --- arithmetic ---

_SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(_SIZES, st.sets(st.sampled_from(AXES)))
def test_sets_of_ranks_are_a_partition_along_the_axes(sizes: dict[str, int], axes: set[str]) -> None:
    world_size = math.prod(sizes.values())
    sets = partition(sorted(axes), sizes)
    assert sorted(rank for ranks in sets for rank in ranks) == list(range(world_size))
    assert all(len(ranks) == math.prod(sizes[axis] for axis in axes) for ranks in sets)
    for ranks in sets:
        assert list(ranks) == sorted(ranks)
        fixed = [{a: c for a, c in coordinates(rank, sizes).items() if a not in axes} for rank in ranks]
        assert all(each == fixed[0] for each in fixed)


@given(_SIZES)
def test_every_rank_has_its_own_coordinates(sizes: dict[str, int]) -> None:
    seen = {tuple(coordinates(rank, sizes).values()) for rank in range(math.prod(sizes.values()))}
    assert len(seen) == math.prod(sizes.values())


def test_neighbours_share_a_tensor_and_stages_lie_far_apart() -> None:
    sizes = check_axes({"pipeline": 2, "tensor": 2, "replicate": 2}, 8)
    assert partition(["tensor"], sizes) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert partition(["replicate"], sizes) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert partition(["pipeline"], sizes) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert partition(["replicate", "pipeline"], sizes) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_crossing_hosts() -> None:
    assert crossing(((0, 1), (2, 3))) == ((0, 2), (1, 3))
    assert crossing(((0, 2), (1, 3))) == ((0, 1), (2, 3))
    assert crossing(((0, 1, 2),)) == ((0,), (1,), (2,))
    assert crossing(((0, 1), (2,))) is None


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"replicate": 3}, ["replicate 3", "= 3 ranks", "has 4"]),
        ({"replicate": 2, "shard": 4}, ["8 ranks", "has 4"]),
        ({"data": 4}, ["'data'", "replicate, shard"]),
        ({"shard": 0}, ["shard", "0"]),
        ({"shard": 4.0}, ["shard", "4.0"]),
        ({}, ["has 4"]),
    ],
)
def test_axes_that_do_not_fit(axes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_axes(axes, 4)
    assert all(part in str(caught.value) for part in said), caught.value


# --- one rank ---


@pytest.mark.parametrize(
    "divide",
    [
        lambda model, mesh: imece.tensor_parallel(model, mesh),
        lambda model, mesh: imece.Pipeline(model, mesh, micro_batches=1, loss=imece.cross_entropy),
        lambda model, mesh: imece.ContextParallel(mesh),
    ],
)
def test_what_is_no_mesh_and_none_before_init(divide: Callable[[nn.Module, Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"mesh='tensor': what imece\.init\(\) returned"):
        divide(nn.Linear(2, 2), "tensor")
    with pytest.raises(UserError, match=r"call imece\.init\(\) first"):
        divide(nn.Linear(2, 2), None)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "device 'gpu': 'cpu', 'cuda', or a GPU by its number, 'cuda:0'"),
        ("mps", "device 'mps': imece runs on 'cpu' and 'cuda'"),
        ("cuda", "device 'cuda': torch sees no GPU on this host: use 'cpu', or leave it out"),
    ],
)
def test_a_device_that_there_is_not(device: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_device(device, World(0, 1, 0, 1, "host", "single"))
    assert str(caught.value) == said


def test_one_rank_needs_no_launcher_and_no_second_init() -> None:
    mesh = imece.init()
    try:
        assert sys.excepthook.__module__ == "imece.status", "failures are told to the launcher"
        assert (mesh.rank, mesh.world_size, mesh.hosts, mesh.backend) == (0, 1, ((0,),), "shm")
        assert repr(mesh) == "<imece.Mesh rank 0 of 1 on 1 host, cpu, shm>"
        assert mesh.world.master_port is None
        assert imece.init() is mesh is mesh_module.current()
        with pytest.raises(UserError) as caught:
            imece.init({"shard": 1}, device="cpu")
        assert str(caught.value) == (
            "imece.init() was called with axes=None, device=None before, and now with axes={'shard': 1}, "
            "device=cpu: close() the mesh that is open to open another"
        )
        assert mesh.group("tensor") is mesh.world_group is mesh.host_group
        assert mesh.device_mesh.shape == (1,)
        for wrong in ((), ("rows",), ("shard", "shard")):
            with pytest.raises(UserError):
                mesh.group(*wrong)
    finally:
        mesh.close()
    assert not dist.is_initialized() and sys.excepthook.__module__ != "imece.status"
    with pytest.raises(UserError, match="closed"):
        mesh.group("shard")
    mesh.close()  # a second time does nothing


def test_lines_of_a_traceback_get_the_rank_in_front_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(meeting, "_hooked", False)
    for _ in range(2):
        imece.init().close()
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert capsys.readouterr().err == "[rank0]: ValueError: wrong\n"


def test_groups_that_torch_destroyed() -> None:
    mesh = imece.init()
    mesh.host_group_in(1)
    dist.destroy_process_group()
    again = imece.init()
    assert again is not mesh and again is mesh_module.current()
    assert imece.all_reduce(torch.ones(1)).item() == 1
    again.host_group_in(1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    again.close()  # as at the end of the process
    assert dist.is_initialized(), "that group is not the mesh's"
    dist.destroy_process_group()


def test_a_forked_copy_does_not_leave_for_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = imece.init()
    group = mesh.world_group
    assert isinstance(group, SharedMemoryGroup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork with threads
        child = os.fork()
    if child == 0:  # what it does at its end
        monkeypatch.setattr("imece.status.tell_closed", lambda *_: os._exit(1))
        mesh.close()
        group._close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the launcher would take the rank for one that has left"
    assert group._board.mine[CLOSED] == 0, "the others would"
    mesh.close()


def test_the_script_says_how_many_ranks_it_wants() -> None:
    with pytest.raises(
        UserError, match="wants 2 ranks and was started as 1: start it with imece launch --ranks 2"
    ):
        imece.init(ranks=2)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("backend", "device"), [("smoke", None), (None, "tpu"), (None, "moon")])
def test_unknown_backend_or_device(backend: str | None, device: str | None) -> None:
    with pytest.raises(UserError, match=r"smoke|tpu|moon"):
        imece.init(backend=backend, device=device)


def test_a_world_of_another_size_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="rank 0 of 1, but torchrun started rank 0 of 2"):
            imece.init()
        assert dist.is_initialized(), "not ours to destroy"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "data", [b"[1]", b"\x80\x04.", b"{", b"[" * 10_000, b'{"a":"' + b"x" * 20_000 + b'"}']
)
def test_notes_that_imece_did_not_write(data: bytes) -> None:
    with pytest.raises(UserError, match="did not write"):
        read_note(data, "rank 1")


# --- four ranks ---

SHAPES: list[dict[str, int]] = [
    {"replicate": 4},
    {"replicate": 2, "shard": 2},
    {"pipeline": 2, "tensor": 2},
    {"shard": 2, "context": 2, "replicate": 1},
]


def groups_of(shapes: list[dict[str, int]], backend: str) -> list[list[list[int]]]:
    """For each shape: the ranks of this rank's group for each axis, then for all pairs of axes in use, each
    seen through a real sum as well."""
    found = []
    for shape in shapes:
        mesh = imece.init(shape, backend=backend)
        used = [axis for axis, size in shape.items() if size > 1]
        groups = [mesh.group(axis) for axis in AXES] + [mesh.group(*used), mesh.host_group]
        found.append([dist.get_process_group_ranks(group) for group in groups])
        for group in groups:
            bits = torch.tensor([1 << mesh.rank])
            dist.all_reduce(bits, group=group)
            assert bits.item() == sum(1 << rank for rank in dist.get_process_group_ranks(group))
        assert mesh.device_mesh.mesh_dim_names is not None
        for axis in mesh.device_mesh.mesh_dim_names:
            assert mesh.device_mesh.get_group(axis) is mesh.group(axis)
            assert mesh.device_mesh.get_local_rank(axis) == mesh.coordinate(axis)
        mesh.close()
        assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_members_of_groups(backend: str) -> None:
    by_rank = run_ranks(groups_of, 4, args=(SHAPES, backend), backend=None)
    for rank, found in enumerate(by_rank):
        for shape, groups in zip(SHAPES, found, strict=True):
            sizes = check_axes(shape, 4)
            used = [axis for axis, size in shape.items() if size > 1]
            wanted = [[axis] for axis in AXES] + [used]
            expected = [next(list(s) for s in partition(axes, sizes) if rank in s) for axes in wanted]
            assert groups == [*expected, [0, 1, 2, 3]], shape


def hosts_and_groups() -> dict[str, Any]:
    mesh = imece.init({"replicate": 2, "shard": 2})
    cross = mesh.cross_group
    found = {
        "repr": repr(mesh),
        "hosts": mesh.hosts,
        "backend": mesh.backend,
        "host": dist.get_process_group_ranks(mesh.host_group),
        "cross": None if cross is None else dist.get_process_group_ranks(cross),
        "backends": [
            dist.get_backend(group) for group in (mesh.world_group, mesh.host_group, mesh.group("shard"))
        ],
    }
    bits = torch.tensor([1 << mesh.rank])
    dist.all_reduce(bits, group=mesh.host_group)
    return {**found, "bits": bits.item()}


def test_two_emulated_hosts() -> None:
    by_rank = run_ranks(hosts_and_groups, 4, backend=None, ranks_per_host=2)
    for rank, found in enumerate(by_rank):
        mine = [0, 1] if rank < 2 else [2, 3]
        said = f"<imece.Mesh rank {rank} of 4 on 2 hosts, replicate 2, shard 2, cpu, gloo>"
        assert (found["repr"], found["hosts"]) == (said, [[0, 1], [2, 3]])
        assert found["host"] == mine and found["bits"] == sum(1 << other for other in mine)
        assert found["cross"] == [rank % 2, rank % 2 + 2]
        assert found["backend"] == "gloo"
        assert found["backends"] == ["gloo", "shm", "shm"]


def test_hosts_of_different_sizes_have_no_cross_group() -> None:
    by_rank = run_ranks(cross_group_ranks, 3, backend=None, ranks_per_host=2)
    assert by_rank == [[[[0, 1], [2]], None]] * 3


def cross_group_ranks() -> list[Any]:
    mesh = imece.init()
    return [mesh.hosts, mesh.cross_group]


def want_different_things() -> list[str]:
    """What a rank is told of one mistake after the other."""
    rank = int(os.environ["RANK"])
    mistakes: list[dict[str, Any]] = [
        {"axes": {"replicate": 2} if rank == 0 else {"shard": 2}},
        {"backend": "gloo" if rank == 0 else None},
    ]
    told = []
    for mistake in mistakes:
        with pytest.raises(UserError) as caught:
            imece.init(**mistake)
        told.append(str(caught.value))
    imece.init()  # and then they agree
    return told


def test_ranks_that_want_different_things() -> None:
    for axes, backend in run_ranks(want_different_things, 2, backend=None):
        assert "'replicate': 2, 'shard': 1" in axes and "'replicate': 1, 'shard': 2" in axes
        assert backend == "backend: gloo on rank 0, but None on rank 1"


def ask_for_groups_in_different_order() -> None:
    mesh = imece.init({"replicate": 2, "shard": 2})
    mesh.group("shard" if mesh.rank < 2 else "replicate")


def test_groups_in_different_order() -> None:
    """Whoever asks second is told; the first ones wait, and are ended here as a launcher would end them."""
    with start_ranks(ask_for_groups_in_different_order, 4) as ranks:
        results = ranks.wait(60, after_failure_s=0.5)
    told = [result.error_text for result in results if "same order" in result.error_text]
    assert len(told) == 2, [result.report() for result in results]
    assert all("((0, 1), (2, 3))" in text and "((0, 2), (1, 3))" in text for text in told)


def adopt() -> list[Any]:
    mesh = imece.init()
    same = mesh.world_group is dist.group.WORLD
    mesh.close()
    return [mesh.backend, mesh.hosts, same, dist.is_initialized()]


def test_adopts_a_process_group() -> None:
    assert run_ranks(adopt, 2, backend="gloo") == [["gloo", [[0, 1]], True, True]] * 2


def adopt_without_a_launcher() -> list[Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    mesh = imece.init()
    found = [mesh.hosts, mesh.world.local_rank, mesh.world.local_world_size]
    mesh.close()
    return found


def test_ranks_find_out_who_shares_a_host_where_no_launcher_says_so() -> None:
    found = run_ranks(adopt_without_a_launcher, 3, backend="gloo", ranks_per_host=2)
    assert found == [[[[0, 1], [2]], *local] for local in ([0, 2], [1, 2], [0, 1])]


def wait_for_the_missing() -> None:
    if os.environ["RANK"] != "1":
        imece.init(timeout=timedelta(seconds=1))


def test_missing_ranks_are_named() -> None:
    with pytest.raises(
        AssertionError, match=r"rank [02] waited 1 s for 1 of 3 ranks, which never came: rank 1"
    ):
        run_ranks(wait_for_the_missing, 3, backend=None)


def reforms() -> list[float]:
    """Rank 0 forms a generation that is over half-way, of which rank 1 never hears, and then waits for it."""
    mesh = imece.init(timeout=timedelta(hours=10))
    rank, store = mesh.rank, mesh._launchers
    if rank == 0:
        is_over = mock.patch.object(board, "_meet", side_effect=CollectiveError("a newer one is there"))
        with is_over, pytest.raises(CollectiveError):
            opening.reform(0, 1, dist.PrefixStore("half-way", store))
    hurry = 1.0  # so many seconds pass in one while ranks meet
    clock = SimpleNamespace(monotonic=lambda: hurry * time.monotonic(), sleep=time.sleep)
    summed = []

    def both(name: str, late_s: float) -> None:
        time.sleep(late_s if rank == 1 else 0)
        opening.reform(rank, 2, dist.PrefixStore(name, store))
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mesh.host_group_in(1))
        summed.append(ones.item())

    both("another", 0)
    with mock.patch.object(store_module, "time", clock):
        hurry = 2e3
        both("after 13 minutes at least", 0.4)
        hurry, mesh.world = 1e6, replace(mesh.world, joining=rank == 0)
        both("after 27 hours at least", 0.1)
        if rank == 0:
            with pytest.raises(UserError, match=r"^rank 0 waited 36000 s for 1 of 2 ranks, which never came"):
                both("never", 0)
    return summed


def test_ranks_find_each_other_however_the_last_attempt_of_each_ended() -> None:
    """They come when their step is over: a rank waits as long as in a collective, one that joins for ever."""
    assert run_ranks(reforms, 2, backend=None) == [[2.0] * 3] * 2


def stay_away() -> list[Any]:
    """Seconds until rank 0 is told that rank 1 stays away from a group of 1 s, and the recorder's groups."""
    imece.init()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    imece.barrier(group=group)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises((CollectiveTimeoutError, PeerLostError)):
            imece.all_reduce(torch.ones(1), group=group)
        store.set("told", "")
    else:
        store.wait(["told"], timedelta(seconds=100))
    return [time.monotonic() - began, group.group_name, list(attach(os.getpid()).groups)]


@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_a_companion_has_the_timeout_of_its_group_and_is_not_recorded(ranks_per_host: int) -> None:
    for waited_s, name, groups in run_ranks(
        stay_away, 2, backend="gloo", timeout_s=200, ranks_per_host=ranks_per_host
    ):
        assert 0.9 < waited_s < 60
        assert groups == [name]  # what its checks send is nobody's call


def sums_on_one_mesh_after_another() -> list[float]:
    found = []
    for axes in ({"replicate": 2, "tensor": 2}, {"pipeline": 2, "replicate": 2}):
        mesh = imece.init(axes, backend="gloo", timeout=timedelta(seconds=20))
        axis = next(axis for axis in ("tensor", "pipeline") if mesh.size(axis) > 1)
        found.append(imece.all_reduce(torch.tensor(float(mesh.rank)), group=mesh.group(axis)).item())
        mesh.close()
    return found


def test_groups_of_the_next_mesh_have_the_names_of_other_ranks_groups() -> None:
    """torch counts them anew, so the ranks of a group may have used its name differently often."""
    assert run_ranks(sums_on_one_mesh_after_another, 4, backend=None) == [[1, 2], [1, 4], [5, 2], [5, 4]]


# --- SIGUSR1 ---


def use_the_signal(folder: str) -> list[bool]:
    """Rank 0 has no use for it, 1 a handler in Python, 2 one in C, and 3 opens the mesh on another thread."""
    rank, mine, file = int(os.environ["RANK"]), [], Path(folder, os.environ["RANK"]).open("w")  # noqa: SIM115
    if rank == 1:
        signal.signal(signal.SIGUSR1, lambda *_: mine.append(True))
    if rank == 2:
        faulthandler.register(signal.SIGUSR1, file)
    if rank == 3:
        thread = threading.Thread(target=imece.init)
        thread.start()
        thread.join()
        return [signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL]
    imece.init()
    recorder.leave(recorder.enter("broadcast", "g", torch.float32, (8,), "", 0, "w"))
    signal.raise_signal(signal.SIGUSR1)
    return [bool(mine), file.tell() > 0]


def test_a_signal_shows_what_a_rank_does_unless_the_program_uses_it(tmp_path: Path) -> None:
    with start_ranks(use_the_signal, 4, args=(str(tmp_path),)) as ranks:
        results = ranks.wait(60, after_failure_s=10)
    assert [result.value for result in results] == [[False, False], [True, False], [False, True], [True]], [
        result.report() for result in results
    ]
    for result in results:
        shown = "use_the_signal" in result.output and "broadcast from 0 of float32[8] (w)" in result.output
        assert shown == (result.rank == 0), result.report()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_helper_that_imports_the_script_is_no_rank(tmp_path: Path, method: str) -> None:
    """It would tell the launcher that it is this rank. From Python 3.14 on workers of a DataLoader do."""
    lines = """
        import multiprocessing
        import imece
        imece.init()
        helper = multiprocessing.get_context("METHOD").Process(target=print)
        helper.start()
        helper.join()
    """
    script = tmp_path / "unguarded.py"
    script.write_text(textwrap.dedent(lines).replace("METHOD", method))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    said = ended.stderr.partition("UserError: ")[2]
    assert said.startswith("imece.init() in a helper of this rank"), ended.stderr
    assert 'under `if __name__ == "__main__":`' in said


def starts_another() -> list[str]:
    """What imece.init says in a program that this rank starts. Nothing, if that does as it is told, or if the
    rank's world is closed."""
    mesh, said = imece.init(), []
    in_it = mock.patch.multiple(mesh_module, _open=None), mock.patch("torch.distributed.is_initialized", bool)
    with in_it[0], in_it[1], mock.patch("os.getpid", lambda: 1), pytest.raises(UserError) as refused:
        imece.init()
    said.append(str(refused.value))
    theirs = {name: value for name, value in os.environ.items() if name not in said[0]}
    launched = {**os.environ, "MASTER_PORT": "1"}
    with mock.patch("os.getpid", lambda: 1):
        check_not_opened(theirs)
        check_not_opened(launched)
    mesh.close()
    with mock.patch("os.getpid", lambda: 1):
        check_not_opened()
    return said


def test_what_a_rank_starts_with_its_own_variables_is_no_rank() -> None:
    """It would wait for the other ranks, for minutes, and report its failure as that of the rank."""
    for rank, (said,) in enumerate(run_ranks(starts_another, 2)):
        assert re.match(rf"rank {rank} \(pid \d+\) has started this process", said), said


def ends() -> list[str]:
    imece.init()
    said: list[str] = []
    moments.before_closing.append(lambda: said.append("the mesh"))
    moments.ended_last.append(lambda: said.append("the beat"))
    atexit.register(lambda: said.append("somebody's upload"))
    atexit._run_exitfuncs()
    return said


def test_what_is_to_go_on_ends_after_all_exit_handlers() -> None:
    """The launcher takes a rank for hung that neither beats nor has told that it is closed."""
    assert run_ranks(ends, 1, backend=None) == [["somebody's upload", "the mesh", "the beat"]]


@pytest.mark.parametrize("member", [None, 3])
def test_nccls_own_ways_with_errors_are_off_where_ranks_go_on(
    member: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end a process whose peer has died. What a user has set stays, and other launchers' ranks too."""
    environ = dict(os.environ) | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: seen.append(
            {name: value for name, value in environ.items() if name.startswith("TORCH_NCCL")}
        ),
    )
    world = World(0, 1, 0, 1, "host", "torchrun", "10.0.0.1", 1, member=member)
    meeting.open_default_group(world, "nccl", dist.HashStore(), timedelta(seconds=1))
    off = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    assert seen == [{"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} | (off if member is not None else {})]


@pytest.mark.parametrize(
    ("name", "ways", "expected"),
    [
        ("10.0.9.1", [["10.0.0.1", "10.0.0.1"]], None),  # Gloo finds it by itself
        ("127.0.1.1", [["10.0.0.1", "10.0.0.9"]], "eth1"),
        (None, [["127.0.0.1", "127.0.1.1"], ["10.0.0.2", "10.0.0.1"]], "eth1"),  # rank 0's host, by others
        (None, [["127.0.0.1", "127.0.0.1"], None], None),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_gloo_listens_where_a_host_reaches_rank_0(
    hosts: int, name: str | None, ways: list[list[str] | None], expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Many hosts have 127.0.1.1 beside their name, and Gloo would listen there."""
    interfaces = {"10.0.0.1": "eth1", "127.0.0.1": "lo", "127.0.1.1": "lo"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(meeting, "address_of_name", lambda: name)
    monkeypatch.setattr(meeting, "interface_of", interfaces.get)
    monkeypatch.setattr(meeting, "way_to", lambda _address: ways[0])

    def swapped(*arguments: Any) -> list[Any]:
        note = arguments[3]
        others = [{**note, "host": str(at % hosts), "rank 0 at": way} for at, way in enumerate(ways[1:], 1)]
        return [note | {"host": "0"}, *(others or [{**note, "host": str(1 % hosts)}])]

    monkeypatch.setattr(meeting, "swap_notes", swapped)
    world = World(0, 2, 0, 1, "0", "openmpi", "me", 1)
    cpu, second = torch.device("cpu"), timedelta(seconds=1)
    assert len(meeting.meet(dist.HashStore(), world, {}, None, cpu, second)) == hosts
    chosen = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert chosen == (expected if hosts == 2 else None)


def test_gloo_is_told_an_interface_that_is_not_here() -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "eth9"}
    (error,) = run_ranks(
        with_gloo, 1, backend=None, env=wrong, expect=r"UserError: GLOO_SOCKET_IFNAME=eth9: "
    )
    assert "has no such interface with an address, but" in error and " lo" in error
    assert "enforce fail" not in error


def with_gloo() -> None:
    imece.init(backend="gloo")
