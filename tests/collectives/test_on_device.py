"""What collectives do only for GPU tensors, proven without a GPU, on stand-ins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import imece
from imece import meeting
from imece.collectives import (
    auto,
    checks,
    companions,
    execute,
    hierarchical_chunk,
    links,
    messages,
    native,
    streams,
)
from imece.collectives.calls import Call, host_device
from imece.collectives.execute import Message
from imece.collectives.given_up import Sliced
from imece.collectives.pending import Task
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.other_devices import OtherDevices
from imece.collectives.texts import gather_json
from imece.data_parallel.same import texts_that_differ
from imece.device import choose_backends, choose_device
from imece.errors import UserError
from imece.world import World
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 0)


class Streams:
    """Stands in for torch.cuda: notes what each stream is told, by its name."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = threading.local()
        self.devices: list[torch.device | None] = []  # current ones of threads that enter a stream
        self.set: list[torch.device] = []

    def set_device(self, device: torch.device) -> None:
        self.current.device = device
        self.set.append(device)

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
        self.devices.append(getattr(self.current, "device", None))
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
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
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


def test_a_thread_that_launches_for_another_has_its_device(on_gpu: Streams) -> None:
    """Or torch takes it back to GPU 0 at the end of each stream, and makes a context there."""

    def run() -> None:
        task.execute()
        task.execute()

    task = Task(lambda: None, [])
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert on_gpu.devices == [CUDA, CUDA] and on_gpu.set == [CUDA], "set once"
    with task._place.behind():
        pass
    assert on_gpu.devices[2:] == [None] and on_gpu.set == [CUDA], "the caller's own is left alone"


@pytest.mark.parametrize("beside", [True, False])
def test_a_checked_call_is_launched_behind_its_place(beside: bool, on_gpu: Streams) -> None:
    checker = SimpleNamespace(is_nccls=lambda device: beside)
    check: Any = SimpleNamespace(_gather=lambda: on_gpu.told.append("all have come"), _checker=checker)
    work = checks.CheckedWork(check, lambda: on_gpu.told.append(f"launched on {on_gpu.now().name}"), CUDA)
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


class OnGpu(torch.Tensor):
    """Taken for one that Gloo's messages cannot read."""

    is_cuda = True


class Recorded:
    """Stands in for a group of NCCL, which batches, or of Gloo."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.moved: list[torch.Tensor] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        self.told.append("begin")

    def _end_coalescing(self, device: torch.device) -> str:
        self.told.append("end")
        return "work"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(f"recv {peer} {tag}")
        self.moved += tensors

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(f"send {peer} {tag}")
        self.moved += tensors


def test_messages_over_nccl_are_one_batch() -> None:
    group: Any = Recorded()
    place = torch.zeros(1)
    works: list[Any] = list(execute._post_batch([Message(place, 1, 7)], [Message(place, 2, 8)], group))
    assert works == ["work"]
    assert group.told == ["begin", "recv 2 8", "send 1 7", "end"]


def test_nccl_has_no_tags_so_both_ends_list_messages_in_their_order() -> None:
    """It pairs the first that one rank sends with the first that the other one receives."""
    group: Any = Recorded()
    by_tag: dict[int, Any] = {tag: SimpleNamespace(device=CUDA, name=f"{tag}") for tag in range(3)}
    for order in ([0, 1, 2], [2, 0, 1]):
        listed = [Message(by_tag[tag], 1, tag) for tag in order]
        execute._post_batch(listed, listed, group)
    ordered = [f"{way} 1 {tag}" for way in ("recv", "send") for tag in range(3)]
    assert group.told == ["begin", *ordered, "end"] * 2
    twice = [Message(torch.zeros(size), 1, 0) for size in (2, 1)]
    sizes: list[int] = []
    group.send = lambda tensors, *_: sizes.append(tensors[0].numel())
    execute._post_batch(twice, [], group)
    assert sizes == [2, 1], "those of one tag as they are listed"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda tensor: messages.send(tensor, 1), ["send 1 0"]),
        (lambda tensor: messages.recv(tensor, 1), ["recv 1 0"]),
        (lambda tensor: messages.exchange([messages.Send(tensor, 1, 7)]), ["begin", "send 1 7", "end"]),
    ],
)
def test_a_message_alone_needs_two_ranks_of_the_group(
    call: Callable[[torch.Tensor], object], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is in the communicator of all, for which NCCL waits if there is none yet. It moves bytes, as
    NCCL has no complex numbers."""
    group = Recorded()
    tensor = torch.zeros(2, dtype=torch.complex64).as_subclass(OnGpu)
    monkeypatch.setattr(group, "rank", lambda: 0, raising=False)
    backend = SimpleNamespace(supports_coalescing=True)
    monkeypatch.setattr(group, "_get_backend", lambda device: backend, raising=False)
    monkeypatch.setattr(messages, "group_or_default", lambda _: group)
    monkeypatch.setattr(messages, "check_rank", lambda *_: None)
    monkeypatch.setattr(messages, "check_tensor", lambda *_: None)
    monkeypatch.setattr(messages, "flattened", lambda each: each)
    monkeypatch.setattr(messages, "flat_place", lambda each: each)
    started = SimpleNamespace(native=lambda start, *_, **__: start())
    monkeypatch.setattr(messages, "Call", lambda *_, **__: started)
    call(tensor)
    assert group.told == told
    (moved,) = group.moved
    kind = moved.dtype, moved.numel(), moved.data_ptr()
    assert kind == (torch.uint8, 16, tensor.data_ptr())
    for alone in (messages.send, messages.recv):
        with pytest.raises(ValueError, match=r"^tag=7, but NCCL has no tags: .* use exchange"):
            alone(tensor, 1, tag=7)


@pytest.fixture
def behind_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Stands for NCCL in a world of one rank in shared memory, for tensors on "meta"."""
    group = Recorded()
    monkeypatch.setattr(OtherDevices, "_make", lambda *_: group)
    twenty = timedelta(seconds=20)
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1, timeout=twenty)
    yield group
    monkeypatch.setattr(OtherDevices, "shutdown", lambda _: None)
    dist.destroy_process_group()


def test_torch_makes_a_batch_only_where_it_is_told_to(
    behind_shm: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.14 batch_isend_irecv makes none in a group not of torch's own class: what it does there is
    refused, as NCCL would hang in it."""
    tensor, world = torch.empty(4, device="meta"), dist.group.WORLD
    with distributed_c10d._coalescing_manager(world, tensor.device, async_ops=True) as batch:
        dist.isend(tensor, group=world, group_dst=0)
        dist.irecv(tensor, group=world, group_src=0)
    assert behind_shm.told == ["begin", "send 0 0", "recv 0 0", "end"] and batch.works == ["work"]
    behind_shm.told.clear()
    monkeypatch.setattr(distributed_c10d, "_check_p2p_op_list", lambda _: None)
    for op in (dist.isend, dist.irecv):
        message: Any = SimpleNamespace(op=op, tensor=tensor, group=world, tag=0, group_peer=0)
        if torch.torch_version.TorchVersion(torch.__version__) >= "2.14":
            works: list[Any] = dist.batch_isend_irecv([message])
            assert works == ["work"]
            assert [behind_shm.told[0], *behind_shm.told[2:]] == ["begin", "end"]
            behind_shm.told.clear()
            continue
        with pytest.raises(
            UserError, match=r"^torch\.distributed\.batch_isend_irecv .* use imece\.exchange, or"
        ):
            dist.batch_isend_irecv([message])
        assert behind_shm.told == []
        with distributed_c10d._coalescing_manager(world, tensor.device, async_ops=True):  # as torch 2.14 does
            dist.batch_isend_irecv([message])
        assert [behind_shm.told[0], *behind_shm.told[2:]] == ["begin", "end"]
        behind_shm.told.clear()


def test_checks_have_the_timeout_of_their_group(behind_shm: Recorded) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert companions._timeout_of(world) == timedelta(seconds=20)


def staged() -> list[Any]:
    """What came, and how many of the messages of which links are measured went by way of the host."""
    group = dist.group.WORLD
    assert group is not None
    other = 1 - group.rank()
    mine, theirs = torch.full((3,), float(group.rank())), torch.full((3,), -1.0)
    for work in execute._post_staged([Message(mine, other, 0)], [Message(theirs, other, 0)], group):
        work.wait()
    counted, by_way, zeros = 0, execute._post_staged, torch.zeros

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return by_way(*args)

    execute._post_staged = counting  # type: ignore[assignment]
    torch.zeros = lambda *args, **kwargs: zeros(*args, **kwargs).as_subclass(OnGpu)
    links._ping_pong(group, group.rank() == 0, other, "cpu")
    return [theirs.tolist(), counted]


def test_messages_over_gloo_go_by_way_of_the_host() -> None:
    """So do those by which links are measured."""
    a_rank = 2 * (2 + 1 + links.ROUNDS * (links.PINGS + 1))
    assert run_ranks(staged, 2, backend="gloo") == [[[1.0] * 3, a_rank], [[0.0] * 3, a_rank]]


def who_checks() -> list[Any]:
    group = imece.init(device="cpu").world_group
    said = []
    for device in ("cpu", "meta"):  # meta: not the CPU, as a GPU is not
        call = Call("all_reduce", group, torch.zeros(2, device=device), "sum")
        with call._noted() as token:
            said += [call._checker() is not None, token is not None]
    meta = torch.device("meta")
    texts = gather_json(group.rank(), group, meta), texts_that_differ([f"{group.rank()}"], group, meta, "")
    return [*said, str(host_device(group, CUDA)), *texts]


def test_calls_of_a_gpu_are_noted_and_checked_in_a_group_that_has_shm_beside_nccl() -> None:
    """And texts go over shm."""
    assert run_ranks(who_checks, 2, backend=None) == [
        [False, False, True, True, "cpu", [0, 1], {"0": ["0"], "1": ["1"]}]
    ] * 2  # fmt: skip


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
            timeout = torch.distributed.default_pg_timeout
            found[number] = meeting.meet(store, world, {}, backend, CUDA, timeout)
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


def test_ranks_share_several_gpus_over_gloo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    worlds = [World(rank, 4, rank, 4, "host", "torchrun") for rank in range(4)]
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):
        indices = [choose_device(None, world, backend).index for world in worlds]
        assert indices == [0, 1, 0, 1]
    with pytest.raises(UserError, match=r"^4 ranks on this host, but 2 GPUs: .*IMECE_BACKEND=gloo"):
        choose_device(None, worlds[3])
    with pytest.raises(UserError, match=r"^device 'cuda:2': this rank sees 2 GPUs, cuda:0 to cuda:1$"):
        choose_device("cuda:2", worlds[0], "gloo")


@pytest.mark.parametrize(("rank", "current", "own"), [(0, 0, 0), (3, 0, 1), (2, 1, 1), (3, None, 1)])
def test_an_adopted_group_says_nothing_of_hosts(
    rank: int, current: int | None, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 ranks on two hosts of 2 GPUs. current: as the script has set it; None: it uses no GPU so far."""
    for name, answer in {
        "is_available": True, "device_count": 2, "set_device": None, "is_initialized": current is not None,
        "current_device": current,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    adopted = World(rank, 4, rank, 4, "host", "single")
    assert choose_device(None, adopted, "nccl").index == own


def test_two_threads_make_one_group_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both, made = threading.Barrier(2), list[Recorded]()

    def make(*_: object) -> Recorded:
        made.append(Recorded())
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other one, which would make one too
        return made[-1]

    monkeypatch.setattr(OtherDevices, "_make", make)
    others: Any = OtherDevices(dist.HashStore(), 0, 1, timedelta(seconds=1))
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(others.on, CUDA, Recorded()) for _ in range(2))
        assert first.result() is second.result() is made[0] and len(made) == 1


def test_a_backend_that_does_not_move_a_gpus_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the CPU beside GPUs too, and not for both."""
    for name, answer in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    world = World(0, 4, 0, 4, "host", "torchrun")
    for backend in ("shm", "cpu:shm", "cpu:gloo"):
        assert choose_device(None, world, backend) == torch.device("cpu")
        with pytest.raises(UserError, match=f"^device 'cuda' with backend '{backend}', which moves the CPU"):
            choose_device("cuda", world, backend)
    for asked in (None, "nccl", "cuda:nccl", "cpu:shm,cuda:nccl"):
        assert choose_device(None, world, asked) == CUDA
    with pytest.raises(UserError, match=r"beside shm a GPU's tensors go over NCCL .*IMECE_BACKEND=gloo"):
        choose_device(None, world, "cpu:shm,cuda:gloo")
    assert choose_device("cpu", world, "cpu:shm,cuda:gloo") == torch.device("cpu")


def test_calls_of_the_cpus_tensors_beside_nccl_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are Gloo's in a group that has both, as its barriers are, and no stream is beside them."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    configs = iter(["cpu:gloo,cuda:nccl", "cuda:nccl"])
    monkeypatch.setattr(dist, "get_backend_config", lambda _: next(configs))
    group: Any = SimpleNamespace(size=lambda: 2)
    made: Any = SimpleNamespace(order=[0, 1], levels=[])
    work: Any = object()
    checker = checks.Checker(group, made)
    for device in (torch.device("cpu"), None):
        assert isinstance(checker.sliced_call(work, device), Sliced)
    assert checker.sliced_call(work, CUDA) is work
    assert checks.Checker(group, made).sliced_call(work, None) is work


def test_a_message_from_anybody_to_a_gpu_is_not_shared_memorys() -> None:
    told: list[int] = []
    called = SimpleNamespace(recv_anysource=lambda tensors, tag: told.append(tag))
    group: Any = SimpleNamespace(_others=SimpleNamespace(on=lambda device, owner: called))
    SharedMemoryGroup.recv_anysource(group, [torch.empty(1)], 3)
    assert told == [3]


def test_links_are_those_of_the_memory_that_a_call_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one group NCCL moves a GPU's tensors, and shared memory the CPU's."""
    measured: list[Any] = []

    def measure(group: Any, hosts: Any, device: Any) -> Any:
        measured.append(str(device))
        return str(device)

    monkeypatch.setattr(auto, "_links", {})
    monkeypatch.setattr(auto, "Call", lambda *_, **__: SimpleNamespace(native=lambda *_, **__: None))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(auto, "measure", measure)
    monkeypatch.setattr("imece.mesh.hosts_in", lambda _: None)
    group: Any = "group"
    found: list[Any] = [
        auto.links_of(group, device) for device in ("cpu", CUDA, torch.device("cpu"), "cuda:0")
    ]
    assert found == ["cpu", "cuda:0", "cpu", "cuda:0"] and measured == ["cpu", "cuda:0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_between_hosts_are_made_where_the_tensors_lie(dtype: torch.dtype) -> None:
    """In memory of their own if they are made in fp32, or if the third host's is where the sum goes."""
    parts = [torch.empty(4, dtype=dtype, device="meta") for _ in range(3)]
    hierarchical_chunk._reduce("sum", parts, parts[2].view(4) if dtype == torch.float32 else parts[0])


@pytest.mark.parametrize(("op", "dtype"), [("sum", torch.float32), ("product", torch.complex64)])
def test_sums_of_complex_numbers_are_sums_of_real_ones(
    op: str, dtype: torch.dtype, behind_shm: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has no complex dtypes, beside shm either."""
    given: list[torch.Tensor] = []
    nccl: Any = SimpleNamespace(reduce_scatter_single=lambda *tensors: given.extend(tensors[:2]))
    output, flat = torch.zeros(2, dtype=torch.complex64), torch.zeros(6, dtype=torch.complex64)
    native.reduce_scatter(output, flat, op, nccl)
    assert [each.data_ptr() for each in given] == [output.data_ptr(), flat.data_ptr()]
    monkeypatch.setattr(behind_shm, "reduce_scatter_single", nccl.reduce_scatter_single, raising=False)
    assert dist.group.WORLD is not None
    native.reduce_scatter(output.to("meta"), flat.to("meta"), op, dist.group.WORLD)
    assert [each.dtype for each in given] == [dtype] * 4


def test_nccl_alone_is_for_the_tensors_of_gpus() -> None:
    """What imece says between CPUs goes over shm or Gloo then too."""
    for one_host in (True, False):
        assert choose_backends(CUDA, one_host, "nccl") == choose_backends(CUDA, one_host, None)


def backend_of_environment() -> str:
    return imece.init(device="cpu").backend


def test_the_environment_names_the_backend_where_a_script_does_not() -> None:
    assert run_ranks(backend_of_environment, 1, backend=None, env={"IMECE_BACKEND": "gloo"}) == ["gloo"]
