"""Offloaded optimizer states: the same bits, whenever the copies are made.

CPUs have no second memory, so there is a stand-in: storages are noted when made, and a lane makes each copy
as late as allowed, with NaN in its target until then. The source of an upload may be read until somebody has
waited for it, so it must not be written before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import MixedPrecision, parallelize
from imece.checkpoint import TrainingState
from imece.checkpoint.deal import Slice
from imece.data_parallel.footprint import counted, expected
from imece.data_parallel.joining import Turn
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.offload import (
    Offload,
    check_steps_on_host,
    check_strategy,
    offload_of,
    pinned_bytes,
)
from imece.data_parallel.strategy import find_strategy
from imece.footprint import OFFLOADS
from imece.membership.pieces import Pieces
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed, slow
from tests.data_parallel.sharding.blocks import (
    Small,
    adamw,
    loss_of,
    made,
    mesh_of,
    muon_and_adamw,
    two_hosts,
    units_of,
)
from tests.ranks import run_ranks

CAP_MB = 0.004  # several buckets, which borrow memory of each other
STEPS = 3


# The other memory.


def _nothing(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else 77


class Host:
    """Its storages."""

    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []  # they stay, and so do their storages' addresses

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.full((numel,), _nothing(dtype), dtype=dtype)
        self.pieces.append(made)
        return made

    def has(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == each.untyped_storage().data_ptr() for each in self.pieces)


@dataclass
class Late:
    """A lane that makes copies when somebody makes sure of them, and not before."""

    host: Host
    reuses: bool = True  # False: who asks before memory is written again is not heard
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    goes_up: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Sources, and the version of each when its copy began."""
    made: int = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.host.has(target) and self.host.has(source):
            target.copy_(source)
            return
        assert self.host.has(target) != self.host.has(source), "a copy that leaves no memory"
        target.fill_(_nothing(target.dtype))
        self.waiting.append((target, source))
        if self.host.has(source):
            self.goes_up.append((source, source._version))

    def _make(self, which: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
        due = [which(*pair) for pair in self.waiting]
        now = [pair for pair, is_due in zip(self.waiting, due, strict=True) if is_due]
        self.waiting = [pair for pair, is_due in zip(self.waiting, due, strict=True) if not is_due]
        for target, source in now:
            target.copy_(source)
        self.made += len(now)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        self._make(lambda target, source: self.host.has(source))
        yield

    def reuse(self, memory: torch.Tensor) -> None:
        storage = memory.untyped_storage().data_ptr()
        if self.reuses:
            self._make(lambda target, source: source.untyped_storage().data_ptr() == storage)

    def wait(self) -> None:
        self._make(lambda target, source: True)
        assert all(source._version == version for source, version in self.goes_up), "written while it goes up"
        self.goes_up.clear()


def late(name: str | None, **options: Any) -> Offload | None:
    host = Host()
    return Offload(name == "parameters", Late(host, **options), host.empty) if name is not None else None


def host_of(offload: Offload | None) -> Host:
    assert offload is not None and isinstance(offload.lane, Late)
    return offload.lane.host


# Training.


@dataclass(frozen=True)
class Way:
    """How a model is sharded, and what of it is offloaded."""

    strategy: str
    offload: str | None = "optimizer"

    @property
    def options(self) -> dict[str, Any]:
        return {"gather": self.strategy in ("zero3", "hybrid"), "bucket_cap_mb": CAP_MB}


WAYS = (Way("zero1"), Way("zero2"), Way("zero3"), Way("zero3", "parameters"))
HYBRIDS = (Way("hybrid_zero2"), Way("hybrid"), Way("hybrid", "parameters"))

Make = Callable[[nn.Module], Any]
Train = Callable[[Any, Sequence[Optimizer], int], Iterator[torch.Tensor]]


def each(optimizers: Any) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def stepped_before(model: nn.Module) -> Optimizer:
    """Its state is cut and moves over."""
    optimizer = adamw(model)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def clipped(model: Any, optimizers: Sequence[Optimizer], steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        norm = model.clip_grad_norm_(0.05)
        assert norm > 0.05
        for one in optimizers:
            one.step()
            one.zero_grad()
        yield torch.stack([loss.detach(), torch.as_tensor(norm).to(loss.device)])


def accumulated(model: Any, optimizers: Sequence[Optimizer], steps: int) -> Iterator[torch.Tensor]:
    """Two sums that are added to each other, the second of them of two micro-batches."""
    for step in range(steps):
        loss_of(model, 3 * step).backward()
        with model.no_sync():
            loss_of(model, 3 * step + 1).backward()
        loss = loss_of(model, 3 * step + 2)
        loss.backward()
        with torch.no_grad():
            before = loss_of(model, 99)
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            yield torch.stack([loss.detach(), before, loss_of(model, 99)])


def written(model: Any, optimizers: Sequence[Optimizer], steps: int) -> Iterator[torch.Tensor]:
    """Between steps parameters are written, and masters by something else than their optimizer."""
    for step in range(steps):
        with model.gathered(write=True), torch.no_grad():
            model.module.head.weight.mul_(0.5)
        loss = loss_of(model, step)
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        if step == 1:
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        with torch.no_grad():
            for part in model.sharding.parts:
                part.parameter.mul_(1.25)
        model.take_over_masters()
        yield loss.detach()


def wrap(way: Way, group: dist.ProcessGroup, make: Make = adamw, mesh: Any = None, **options: Any) -> Any:
    """(model, optimizers, offload)."""
    inner = made(options.pop("build", Small))
    optimizers = make(inner)
    offload = options.pop("offload", None) or late(way.offload)
    model, optimizers = parallelize(
        inner, optimizers, way.strategy, mesh or mesh_of(group), offload=offload, **way.options, **options
    )
    return model, each(optimizers), offload


def trained(
    way: Way, group: dist.ProcessGroup, train: Train = clipped, **options: Any
) -> dict[str, torch.Tensor]:
    """All that came of it."""
    model, optimizers, offload = wrap(way, group, **options)
    losses = torch.stack(list(train(model, optimizers, STEPS)))
    assert offload is None or offload.lane.made > STEPS
    model.check_parameters()
    return {"losses": losses} | {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: object) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), f"{what}: {name}"


def same_bits(train: Train = clipped, ways: Sequence[Way] = WAYS, **options: Any) -> Check:
    """As without offload."""

    def check(group: dist.ProcessGroup) -> None:
        for way in ways:
            wanted = trained(replace(way, offload=None), group, train, **options)
            assert_same(trained(way, group, train, **options), wanted, way)

    return check


def same_bits_on_two_hosts(group: dist.ProcessGroup) -> None:
    with two_hosts(group) as mesh:
        same_bits(mesh=mesh, ways=HYBRIDS, overlap=False)(group)
        same_bits(accumulated, HYBRIDS, mesh=mesh, make=muon_and_adamw, overlap=True)(group)


def unheard(group: dist.ProcessGroup) -> None:
    """Buckets that borrow memory from which a copy has not been made yet: it would be other bits."""
    way = Way("zero2")
    wanted = trained(replace(way, offload=None), group)
    got = trained(way, group, offload=late("optimizer", reuses=False))
    assert not torch.equal(got["losses"], wanted["losses"])


# Where things are.


def memories(group: dist.ProcessGroup) -> None:
    for way in WAYS:
        model, optimizers, offload = wrap(way, group, precision=MixedPrecision(reduce=torch.bfloat16))
        list(clipped(model, optimizers, 2))
        loss_of(model, 3).backward()
        host, sharding = host_of(offload), model.sharding
        for store in sharding.stores:
            assert host.has(store.master) and host.has(store.gradient)
            assert host.has(store.own) == (way.offload == "parameters")
            assert not host.has(store.parameters) and not host.has(sharding.all[store.plan.index].flat)
        for part in sharding.parts:
            assert host.has(part.parameter) and part.parameter.grad is not None
            assert host.has(part.parameter.grad)
        if way.strategy == "zero3":
            flats = [flat for unit in units_of(model) for flat in unit.flats]
            assert flats and not any(host.has(flat.full) for flat in flats)


def bytes_of_memories(group: dist.ProcessGroup) -> None:
    """Predicted and counted, on the device and in the host's memory."""
    half = MixedPrecision(torch.bfloat16, torch.bfloat16)
    for way in WAYS:
        for precision in (None, half):
            model, optimizers, offload = wrap(way, group, precision=precision)
            said = expected(model, optimizers)
            assert said is not None
            for _ in range(2):
                loss_of(model, 1).backward()
                optimizers[0].step()
            found, state = counted(model, optimizers), 0
            for kept in optimizers[0].state.values():
                state += sum(value.nbytes for value in kept.values() if value.ndim)
            held = sum(piece.nbytes for piece in host_of(offload).pieces) + state
            scalars = 4 * len(model.sharding.parts)
            padding = 2 * sum(store.master.nbytes for store in model.sharding.stores) - 2 * sum(
                part.parameter.nbytes for part in model.sharding.parts
            )
            assert found.host == pytest.approx(held, abs=scalars)
            assert said.host == pytest.approx(found.host, abs=scalars + padding)
            sharding = model.sharding
            sharding.offload = replace(sharding.offload, takes=pinned_bytes)
            more = sum(pinned_bytes(piece.nbytes) - piece.nbytes for piece in host_of(offload).pieces)
            said_more, found_more = expected(model, optimizers), counted(model, optimizers)
            assert more and said_more is not None
            assert (said_more.host - said.host, found_more.host - found.host) == (more, more)
            assert (said.parameters, said.gradients) == (found.parameters, found.gradients)
            assert said.optimizer == found.optimizer == 0
            whole, optimizers, _ = wrap(replace(way, offload=None), group, precision=precision)
            loss_of(whole, 1).backward()
            optimizers[0].step()
            assert found.total < counted(whole, optimizers).total - state


# State.


def all_of(own: Mapping[str, torch.Tensor | Slice], group: dist.ProcessGroup) -> Pieces:
    """What all ranks have, read as a checkpoint is."""
    mine = {
        name: (value.shape, value.start, value.tensor.reshape(-1).clone())
        if isinstance(value, Slice)
        else (tuple(value.shape), 0, value.reshape(-1).clone())
        for name, value in own.items()
    }
    pieces = Pieces()
    for held in gathered(mine, group):
        for name, (shape, start, flat) in held.items():
            pieces.add(name, tuple(shape), start, flat)
    return pieces


def checkpoints(group: dist.ProcessGroup) -> None:
    """What any way saves, any other loads, offloaded or not, and goes on to the same bits."""
    both = [*WAYS, *(replace(way, offload=None) for way in WAYS[:3])]
    model, optimizers, _ = wrap(Way("zero2", None), group, muon_and_adamw)
    list(clipped(model, optimizers, 2))
    kept = all_of(TrainingState(model, optimizers).own(), group)
    losses = torch.stack(list(clipped(model, optimizers, 2)))
    by_layout: dict[str, torch.Tensor] = {}
    for way in both:
        model, optimizers, offload = wrap(way, group, muon_and_adamw)
        if offload is not None:
            with torch.no_grad():
                loss_of(model, 0)  # what came up for it must not be what is loaded
        state = TrainingState(model, optimizers)
        state.load(kept)
        again = all_of(state.own(), group)
        for name in kept.names():
            assert torch.equal(again.tensor(name), kept.tensor(name)), f"{way}: {name}"
        if offload is not None:
            values = [value for one in optimizers for s in one.state.values() for value in s.values()]
            assert all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))
        got = torch.stack(list(clipped(model, optimizers, 2)))
        # In which order Gloo sums an element of three ranks depends on where in its bucket it lies.
        wanted = losses if dist.get_backend(group) == "shm" else by_layout.setdefault(way.strategy, got)
        assert torch.equal(got, wanted), way
        torch.testing.assert_close(got, losses)


def fail_in_backward(model: Any, offload: Any) -> int:
    """When most buckets have left. Returns copies that nobody has made sure of."""

    def refuse(_gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def arm(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    handle = model.module.first.register_forward_hook(arm)
    with pytest.raises(ArithmeticError):
        loss_of(model, 5).backward()
    handle.remove()
    for bucket in model.reducer.buckets:
        model.reducer.leaving._wait(bucket)
    return len(offload.lane.waiting) if offload is not None else 0


def regrouped(group: dist.ProcessGroup) -> None:
    """The ranks go on in another group, from what they had."""
    under_way = 0
    for way in WAYS:
        losses = []
        for offload in (None, way.offload):
            model, optimizers, made = wrap(replace(way, offload=offload), group, overlap=True)
            list(clipped(model, optimizers, 2))
            state = TrainingState(model, optimizers)
            kept = all_of(state.own(), group)
            under_way += fail_in_backward(model, made)
            other = dist.new_group()
            model.regroup(cast(Any, other))
            assert made is None or not made.lane.waiting
            state.load(kept)
            losses.append(torch.stack(list(clipped(model, optimizers, 2))))
            if made is not None:
                assert all(host_of(made).has(part.parameter) for part in model.sharding.parts)
            model.leave()
            dist.destroy_process_group(other)
        assert torch.equal(*losses), way
    assert under_way


def joined(group: dist.ProcessGroup) -> None:
    """A rank that has run out of inputs steps its part where it lies."""
    for way in WAYS[:2]:
        states = []
        for offload in (None, way.offload):
            model, optimizers, _ = wrap(replace(way, offload=offload), group)
            with model.join():
                list(clipped(model, optimizers, 1 + 2 * (group.rank() == 0)))
            states.append(dict(model.state_dict()))
        assert_same(states[1], states[0], way)
    assert Turn.NORM in Turn


# What cannot be.


def refused(group: dist.ProcessGroup) -> None:
    model = made()
    for strategy, offload, message in (
        ("zero1", "optimizer", r"this model is on cpu: leave offload out"),
        ("zero3", "parameters", r"this model is on cpu: leave offload out"),
        ("zero1", "disk", r"unknown offload 'disk': None, 'optimizer' or 'parameters'"),
        ("replicate", "optimizer", r"for sharded strategies, such as zero1, not for 'replicate'"),
        ("zero2", "parameters", r"'zero2' has all parameters on each rank: use offload='optimizer'"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(model, adamw(model), strategy, group, offload=cast(Any, offload))
    if group.name() == "shm":
        with pytest.raises(ValueError, match="'parameters' needs units that are gathered: pass gather=True"):
            parallelize(model, adamw(model), "zero3", group, offload=late("parameters"))
    model, optimizers, _ = wrap(Way("zero1", None), group)
    assert len(list(clipped(model, optimizers, 1))) == 1  # nothing is left of it


def test_what_is_refused_without_ranks() -> None:
    for strategy in ("zero1", "zero2", "hybrid_zero2"):
        check_strategy("optimizer", find_strategy(strategy))
        with pytest.raises(ValueError, match=f"'{strategy}' has all parameters"):
            check_strategy("parameters", find_strategy(strategy))
    for strategy in ("zero3", "hybrid"):
        for name in OFFLOADS:
            check_strategy(name, find_strategy(strategy))
    two = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="one GPU, and this one is on cuda:0, cuda:1"):
        offload_of("optimizer", two)


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(each) for each in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def test_optimizers_that_step_on_gpus_alone() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    check_steps_on_host([torch.optim.AdamW(parameters, fused=True), torch.optim.Muon([torch.ones(2, 2)])])
    check_steps_on_host([torch.optim.SGD(parameters, fused=True), torch.optim.Adagrad(parameters)])
    capturable = torch.optim.Adam(parameters)
    capturable.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match=r"Adam\(capturable=True\) steps on GPUs alone"):
        check_steps_on_host([capturable])
    paged: Any = SimpleNamespace(is_paged=True, param_groups=[])
    with pytest.raises(ValueError, match="pages its state between GPU and host by itself"):
        check_steps_on_host([paged])
    lion: Any = type("Lion", (), {"param_groups": [{"fused": True}]})()
    with pytest.raises(ValueError, match=r"Lion\(fused=True\) steps on GPUs alone"):
        check_steps_on_host([lion])


HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
CHECKS: dict[str, Check] = {
    "clipped": same_bits(),
    "accumulated": same_bits(accumulated),
    "muon": same_bits(make=muon_and_adamw),
    "muon, accumulated": same_bits(accumulated, make=muon_and_adamw),
    "half": same_bits(precision=HALF),
    "half, accumulated": same_bits(accumulated, precision=HALF),
    "half parameters": same_bits(precision=MixedPrecision(param=torch.bfloat16, reduce=torch.float32)),
    "written": same_bits(written),
    "half, written": same_bits(written, precision=HALF),
    "fused": same_bits(make=fused),
    "stepped before": same_bits(make=stepped_before),
    "one in flight": same_bits(ways=WAYS[2:], gathers_in_flight=1),
    "reshard late": same_bits(ways=WAYS[2:], reshard_after_forward=False),
    "checkpoint": same_bits(ways=WAYS[2:], build=lambda: Small(reentrant=False)),
    "overlapped": same_bits(overlap=True),
    "two hosts": same_bits_on_two_hosts,
    "unheard": unheard,
    "memories": memories,
    "bytes": bytes_of_memories,
    "checkpoints": checkpoints,
    "regrouped": regrouped,
    "joined": joined,
    "refused": refused,
}
QUICK = ["clipped", "half, accumulated", "written", "unheard", "memories", "bytes", "refused"]
JOBS = [
    *jobs(__name__, QUICK, (2, "gloo")),
    *jobs(__name__, ["accumulated", "checkpoints", "refused"], (2, "shm")),
]
LONG_JOBS = [
    *jobs(__name__, [name for name in CHECKS if name not in (*QUICK, "two hosts")], (2, "gloo")),
    *jobs(__name__, ["clipped", "muon", "half"], (2, "shm")),
    *jobs(__name__, ["clipped", "accumulated", "memories", "checkpoints"], (3, "gloo")),
    *jobs(__name__, ["two hosts"], (4, "gloo")),
    *jobs(__name__, ["clipped", "accumulated"], (1, "gloo")),
]


@pytest.mark.parametrize("job", JOBS + slow(LONG_JOBS))
def test_offload(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


# The same with a GPU and its host.


def on_a_gpu(make: str, train: str) -> list[str]:
    """Ways that differ from those without offload by more than CPUs and GPUs round otherwise."""
    group, device = dist.group.WORLD, torch.device("cuda", 0)
    assert group is not None
    makes: dict[str, Make] = {"adamw": adamw, "muon": muon_and_adamw, "fused": fused}
    trains: dict[str, Train] = {"clipped": clipped, "accumulated": accumulated, "written": written}
    wrong = []
    for way in WAYS:
        found = []
        for offload in (None, way.offload):
            torch.manual_seed(5)
            inner = Small().to(device)
            inner.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(device),))
            inner.register_forward_hook(lambda _, inputs, output: output.cpu())
            model, optimizers = parallelize(
                inner, makes[make](inner), way.strategy, mesh_of(group), offload=cast(Any, offload),
                **way.options,
            )  # fmt: skip
            found.append(torch.stack([loss.cpu() for loss in trains[train](model, each(optimizers), 8)]))
            assert isinstance(model, ShardedDataParallel)
            if offload is not None:
                shards = [store.master for store in model.sharding.stores]
                assert shards and all(shard.is_pinned() for shard in shards)
        if not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4):
            wrong.append(f"{way}: {found}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("train", ["clipped", "accumulated", "written"])
@pytest.mark.parametrize("make", ["adamw", "fused", "muon"])
def test_on_a_gpu(make: str, train: str) -> None:
    """Two ranks share one card."""
    for wrong in run_ranks(on_a_gpu, 2, args=(make, train), backend="gloo", timeout_s=240, fresh=True):
        assert not wrong, "\n".join(wrong)
