"""What a GPU's tensors need of the collectives and no CPU's do: proven without one, on stand-ins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imece
from imece import mesh
from imece.collectives import checks, execute, streams
from imece.collectives.calls import Call, host_device
from imece.collectives.execute import Message
from imece.collectives.pending import Task
from imece.device import choose_backends
from imece.errors import UserError
from imece.world import World
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 0)


class Streams:
    """Stands in for torch.cuda: notes what each stream is told, by its name."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = threading.local()

    def stream(self, name: str) -> Any:
        def record_event() -> str:
            self.told.append(f"{name} records")
            return f"event of {name}"

        def wait_event(event: str) -> None:
            self.told.append(f"{name} waits for {event}")

        return SimpleNamespace(name=name, device=CUDA, record_event=record_event, wait_event=wait_event)

    def now(self) -> Any:
        return getattr(self.current, "stream", None) or self.stream("caller")

    @contextlib.contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = None


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: made.now())
    monkeypatch.setattr(torch.cuda, "stream", made.inside)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority: made.stream(f"beside {priority}"))
    monkeypatch.setattr(streams, "_here", streams._Here())
    return made


def test_a_task_begins_behind_its_call_and_who_waits_comes_behind_the_task(on_gpu: Streams) -> None:
    task = Task(lambda: on_gpu.told.append(f"runs on {on_gpu.now().name}"), [])
    thread = threading.Thread(target=task.execute)
    thread.start()
    thread.join()
    kept = [task._run is not None]  # while the GPU may still read what it holds
    task.wait()
    assert [*kept, task._run is None] == [True, True]
    assert on_gpu.told == [
        "caller records", "beside -1 waits for event of caller", "runs on beside -1", "beside -1 records",
        "caller waits for event of beside -1",
    ]  # fmt: skip


@pytest.mark.parametrize("beside", [True, False])
def test_a_checked_call_is_launched_behind_its_place(beside: bool, on_gpu: Streams) -> None:
    checker = SimpleNamespace(launches_beside=beside)
    check: Any = SimpleNamespace(
        _gather=lambda deadline: on_gpu.told.append("all have come"), _checker=checker
    )
    work = checks.CheckedWork(check, lambda: on_gpu.told.append(f"launched on {on_gpu.now().name}"))
    on_gpu.told.append("the caller goes on")
    work._run()
    assert on_gpu.told[:2] == ["caller records", "the caller goes on"]
    where = "beside -1" if beside else "caller"
    assert on_gpu.told[2:5] == [
        "all have come", f"{where} waits for event of caller", f"launched on {where}"
    ]  # fmt: skip


def test_without_a_gpu_nothing_is_waited_for_or_kept() -> None:
    assert not streams.Place().on_gpu
    task = Task(lambda: None, [])
    task.execute()
    assert task._run is None


class Recorded:
    """Stands in for a group of NCCL, which batches, or of Gloo."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.told.append("begin")

    def _end_coalescing(self, device: torch.device) -> str:
        self.told.append("end")
        return "work"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(f"recv {peer} {tag}")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(f"send {peer} {tag}")


def test_messages_over_nccl_are_one_batch() -> None:
    group: Any = Recorded()
    place = torch.zeros(1)
    works: list[Any] = list(execute._post_batch([Message(place, 1, 7)], [Message(place, 2, 8)], group))
    assert works == ["work"]
    assert group.told == ["begin", "recv 2 8", "send 1 7", "end"]


def staged() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    other = 1 - group.rank()
    mine, theirs = torch.full((3,), float(group.rank())), torch.full((3,), -1.0)
    for work in execute._post_staged([Message(mine, other, 0)], [Message(theirs, other, 0)], group):
        work.wait()
    return list(theirs.tolist())


def test_messages_over_gloo_go_by_way_of_the_host() -> None:
    assert run_ranks(staged, 2, backend="gloo") == [[1.0] * 3, [0.0] * 3]


def who_checks() -> list[Any]:
    group = imece.init(device="cpu").world_group
    said = []
    for device in ("cpu", "meta"):  # meta: not the CPU, as a GPU is not
        call = Call("all_reduce", group, torch.zeros(2, device=device), "sum")
        said += [call._checker() is not None, call._enter() is not None]
    return [*said, str(host_device(group, CUDA))]


def test_calls_of_a_gpu_are_noted_and_checked_in_a_group_that_has_shm_beside_nccl() -> None:
    assert run_ranks(who_checks, 2, backend=None) == [[False, False, True, True, "cpu"]] * 2


def test_numbers_of_the_host_stay_there_where_the_group_can_move_them() -> None:
    of_both: Any = SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")])
    nccl: Any = SimpleNamespace(_device_types=[torch.device("cuda")])
    assert [host_device(each, CUDA).type for each in (of_both, nccl)] == ["cpu", "cuda"]


def meet_on_one_gpu(backend: str | None) -> list[Any]:
    """Two ranks with the same one: the hosts that each found, or what it was told."""
    store = dist.HashStore()
    found: list[Any] = [None, None]

    def rank(number: int) -> None:
        world = World(number, 2, number, 2, "host", "torchrun")
        try:
            found[number] = mesh._meet(store, world, {}, backend, CUDA, torch.distributed.default_pg_timeout)
        except UserError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_ranks_share_a_gpu_over_gloo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    assert choose_backends(CUDA, True, "gloo").own == "gloo"
    assert meet_on_one_gpu("gloo") == [((0, 1),)] * 2
    assert all("share GPU GPU-1" in told and "IMECE_BACKEND=gloo" in told for told in meet_on_one_gpu(None))


def backend_of_environment() -> str:
    return imece.init(device="cpu").backend


def test_the_environment_names_the_backend_where_a_script_does_not() -> None:
    assert run_ranks(backend_of_environment, 1, backend=None, env={"IMECE_BACKEND": "gloo"}) == ["gloo"]
