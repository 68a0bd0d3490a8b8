"""`imece.parallelize`: every strategy trains like one process on the whole batch, all with the same bits."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as Averager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imece import MixedPrecision, broadcast, parallelize
from imece.bench.reference_model import Block, Decoder, batch
from imece.collectives.shared_memory.arena import ARENAS
from imece.data_parallel.optimizer import is_element_wise, parameters_of
from imece.data_parallel.reducing.buckets import Bucket
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.trained import refuse_tied_by_data
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed, slow
from tests.data_parallel.test_parity import (
    SHAPE,
    Checkpointed,
    Routed,
    Untied,
    compiled,
    partly_frozen,
    replaced,
)

CAP_MB = 0.007  # four buckets of the decoder's 29 kB
STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
EXACT = 1e-12

reduced = Sharding.reduced

State = dict[str, torch.Tensor]
Optimizers = Optimizer | Sequence[Optimizer]


def each(optimizers: Optimizers) -> Sequence[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


# Optimizers.


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw_in_groups(model: nn.Module) -> Optimizer:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}], lr=1e-2)


def adamw_by_name(model: nn.Module) -> Optimizer:
    return AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return [Muon(matrices, lr=1e-2), AdamW(others, lr=1e-2)]


def adafactor(model: nn.Module) -> Optimizer:
    return Adafactor(model.parameters(), lr=1e-2)


def adagrad(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), lr=1e-2)


# Models and losses.


class Odd(nn.Module):
    """Parameters without a dim, of one element, perhaps without elements, and one that wants no gradient."""

    def __init__(self, empty: bool = True) -> None:
        super().__init__()
        self.decoder = Decoder(SHAPE)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3) if empty else torch.ones(1, 1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.decoder(tokens) * self.scale.square()
        return loss + (self.shift * self.frozen).square().sum() + self.nothing.sum()


class Turned(nn.Module):
    """Of complex numbers, which Gloo and NCCL do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(SHAPE.length + 1, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        on_the_circle = torch.polar(torch.ones(()), tokens.float()).to(self.turn.weight.dtype)
        loss: torch.Tensor = self.turn(on_the_circle).abs().square().mean()
        return loss


def tokens(turn: int, rank: int, count: int = 16) -> torch.Tensor:
    return batch(SHAPE, count, seed=turn * 10 + rank)


def plain(model: Any, turn: int, rank: int) -> torch.Tensor:
    return model(tokens(turn, rank))  # type: ignore[no-any-return]


def routed(model: Any, turn: int, rank: int) -> torch.Tensor:
    """Block 0 is used by all ranks, block 1 by one of them, block 2 in every third turn."""
    picked = [0] + [1] * (rank == turn % 2) + [2] * (turn % 3 == 0)
    return model(tokens(turn, rank), picked)  # type: ignore[no-any-return]


def count_of(turn: int, rank: int) -> int:
    return 8 * (1 + (turn + rank) % 3)


def of_different_sizes(model: Any, turn: int, rank: int) -> torch.Tensor:
    return model(tokens(turn, rank, count_of(turn, rank)))  # type: ignore[no-any-return]


def raise_in_backward(model: Any) -> None:
    """After most buckets have left, on all ranks."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def arm(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    handle = model.module.tokens.register_forward_hook(arm)
    with pytest.raises(ArithmeticError):
        plain(model, 0, dist.get_rank()).backward()
    handle.remove()


Zero = Callable[[Any, Optimizers, int], None]


def by_optimizer(model: Any, optimizers: Optimizers, step: int) -> None:
    for one in each(optimizers):
        one.zero_grad()


def by_optimizer_in_place(model: Any, optimizers: Optimizers, step: int) -> None:
    for one in each(optimizers):
        one.zero_grad(set_to_none=False)


def by_model(model: Any, optimizers: Optimizers, step: int) -> None:
    model.zero_grad()


def by_model_in_place(model: Any, optimizers: Optimizers, step: int) -> None:
    model.zero_grad(set_to_none=False)


def now_and_then(model: Any, optimizers: Optimizers, step: int) -> None:
    if step % 3 == 0:
        by_optimizer(model, optimizers, step)


@dataclass(frozen=True)
class Case:
    """One way to train."""

    build: Callable[[], nn.Module] = lambda: Decoder(SHAPE)
    make: Callable[[nn.Module], Optimizers] = adamw_in_groups
    loss: Callable[[Any, int, int], torch.Tensor] = plain
    """(model, turn, rank): turns count micro-batches."""
    steps: int = 3
    micros: int = 1
    no_sync: bool = True
    """Whether all micro-batches but the last are in no_sync."""
    zero: Zero = by_optimizer
    zero_late: bool = False
    """Between forward and backward, as many loops do it."""
    schedule: bool = False
    factory: bool = False
    """Give parallelize `make` for parameters, not what it made."""
    before: int = 0
    """Steps before wrapping."""
    average: Any = "ranks"
    clip: float | None = None
    dtype: torch.dtype = torch.float64
    precision: MixedPrecision | None = None
    lengths: Sequence[int] = ()
    """Steps of each rank, if some run out of inputs before others."""
    divide: bool = True
    """Then: by all ranks, not by those still there."""
    prepare: Callable[[Any], None] = lambda model: None
    mesh: Any = None
    """By default the group of the check shards."""

    def start(self) -> tuple[nn.Module, Any]:
        """The model and its optimizers, the same on all ranks, before they are wrapped."""
        torch.manual_seed(1)
        model = self.build()
        for block in model.modules():
            if isinstance(
                block, Block
            ):  # keys' biases have no gradient but rounding, and Adam makes it large
                linear = block.query_key_value
                block.query_key_value = nn.Linear(linear.in_features, linear.out_features, bias=False)
        model.to(self.dtype)
        optimizers = None if self.factory and not self.before else self.make(model)
        for turn in range(self.before):
            by_optimizer(model, optimizers, turn)  # type: ignore[arg-type]
            plain(model, 1000 + turn, 0).backward()
            for one in each(optimizers):  # type: ignore[arg-type]
                one.step()
        return model, optimizers

    def wrapped(self, strategy: str, group: dist.ProcessGroup) -> tuple[Any, Any]:
        model, optimizers = self.start()
        made = parallelize(
            model, optimizers or (lambda _: self.make(model)), strategy, self.mesh or group,
            average=self.average, bucket_cap_mb=CAP_MB, precision=self.precision,
        )  # fmt: skip
        self.prepare(made[0])
        return made

    def schedulers(self, optimizers: Optimizers) -> list[OneCycleLR]:
        if not self.schedule:
            return []
        total = max(self.lengths, default=self.steps) + 1
        return [
            OneCycleLR(one, [0.1 * group["lr"] for group in one.param_groups], total_steps=total)
            for one in each(optimizers)
        ]

    def weight(self, ranks: int, present: Sequence[int], turns: Iterable[int], turn: int, rank: int) -> float:
        """Of one loss among those of a step."""
        if self.average == "tokens":
            return count_of(turn, rank) / sum(count_of(*each) for each in product(turns, present))
        return 1.0 / (ranks if self.divide else len(present))

    def alone(self, ranks: int) -> Iterator[State]:
        """One process, the whole batch."""
        model, optimizers = self.start()
        optimizers = optimizers or self.make(model)
        schedulers = self.schedulers(optimizers)
        for step in range(max(self.lengths[:ranks], default=self.steps)):
            self.zero(model, optimizers, step)
            turns = range(step * self.micros, (step + 1) * self.micros)
            present = [rank for rank in range(ranks) if not self.lengths or step < self.lengths[rank]]
            for turn, rank in product(turns, present):
                loss = self.loss(model, turn, rank) * self.weight(ranks, present, turns, turn, rank)
                loss.backward()
            if self.clip is not None:
                clip(model, self.clip)
            for one in each(optimizers):
                one.step()
            for scheduler in schedulers:
                scheduler.step()
            yield state_of(model)

    def together(self, strategy: str, group: dist.ProcessGroup) -> Iterator[State]:
        """The same by all ranks, each with its part of the batch."""
        model, optimizers = self.wrapped(strategy, group)
        schedulers = self.schedulers(optimizers)
        rank = group.rank()

        def one_step(step: int) -> State:
            if not self.zero_late:
                self.zero(model, optimizers, step)
            losses = []
            for micro in range(self.micros):
                quiet = self.no_sync and micro < self.micros - 1
                with model.no_sync() if quiet else contextlib.nullcontext():
                    turn = step * self.micros + micro
                    loss = self.loss(model, turn, rank)
                    if self.zero_late and micro == 0:
                        self.zero(model, optimizers, step)
                    losses.append(loss.detach())
                    if self.average == "tokens":
                        loss = model.weigh(loss, count_of(turn, rank))
                    loss.backward()
            if self.clip is not None:
                model.clip_grad_norm_(self.clip)
            for one in each(optimizers):
                one.step()
            for scheduler in schedulers:
                scheduler.step()
            return whole_state_of(model) | {"loss": torch.stack(losses)}

        if not self.lengths:
            yield from map(one_step, range(self.steps))
            return
        with model.join(self.divide):
            for step in range(self.lengths[rank]):
                one_step(step)
        yield state_of(model.module)


def clip(model: nn.Module, max_norm: float) -> None:
    """As ours does: without the 1e-6 that torch's own adds to the norm."""
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    norm = nn.utils.get_total_norm(grads).item()
    assert norm > max_norm
    torch._foreach_mul_(grads, max_norm / norm)


def state_of(model: nn.Module) -> State:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def whole_state_of(model: Any) -> State:
    """Of a wrapped model: all ranks call it."""
    with model.gathered():
        return state_of(model.module)


def first_difference(got: Sequence[State], expected: Sequence[State], limit: float = 0.0) -> str | None:
    """The first step and tensor in which they are apart by more than the limit."""
    assert len(got) == len(expected) > 0
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        for name in other:
            if one[name].numel() and not (one[name] - other[name]).abs().max().item() <= limit:
                apart = (one[name] - other[name]).abs().max()
                return f"step {step}: {name} is off by up to {apart} of {other[name].abs().max()}"
    return None


def strategies_on(group: dist.ProcessGroup) -> Sequence[str]:
    return STRATEGIES if group.name() == "shm" else STRATEGIES[:3]


def parity(case: Case, but: Sequence[str] = ()) -> Check:
    """Of all strategies but those."""

    def check(group: dist.ProcessGroup) -> None:
        expected = list(case.alone(group.size()))[-1 if case.lengths else 0 :]
        for strategy in strategies_on(group):
            if strategy in but:
                continue
            found = first_difference(list(case.together(strategy, group)), expected, EXACT)
            assert found is None, f"{strategy}: {found}"

    return check


CASES = {
    "sgd": Case(make=momentum),
    "adamw in groups, schedule": Case(schedule=True),
    "adamw by name, factory": Case(make=adamw_by_name, factory=True),
    "muon and adamw, schedule": Case(make=muon_and_adamw, schedule=True),
    "muon and adamw, factory": Case(make=muon_and_adamw, factory=True, steps=2),
    "adafactor": Case(make=adafactor),
    "adagrad": Case(make=adagrad, steps=3),
    "odd parameters": Case(Odd),
    "complex parameters": Case(Turned, momentum, dtype=torch.complex128),
    "odd parameters, adafactor": Case(lambda: Odd(empty=False), adafactor, before=1),
    "adamw that has stepped": Case(Odd, before=2, steps=2),
    "sgd that has stepped": Case(make=momentum, before=2, steps=2),
    "muon and adamw that have stepped": Case(make=muon_and_adamw, before=1, steps=2),
    "adafactor that has stepped": Case(make=adafactor, before=2, steps=2),
    "adagrad that has stepped": Case(make=adagrad, before=1, steps=2),
    "clipped": Case(make=momentum, clip=0.05),
    "accumulated in no_sync": Case(micros=2),
    "accumulated": Case(make=momentum, micros=2, no_sync=False),
    "accumulated, two optimizers": Case(make=muon_and_adamw, micros=2, steps=2),
    "zeroed in place": Case(zero=by_optimizer_in_place),
    "zeroed by the model": Case(zero=by_model, micros=2, no_sync=False),
    "zeroed by the model in place": Case(zero=by_model_in_place, micros=2),
    "zeroed now and then": Case(make=momentum, zero=now_and_then, steps=4),
    "zeroed now and then, no_sync": Case(zero=now_and_then, micros=2, steps=4),
    "frozen": Case(partly_frozen),
    "untied": Case(Untied),
    "unused": Case(Routed, loss=routed, steps=7),
    "unused, momentum": Case(Routed, momentum, loss=routed, steps=7),
    "unused, zeroed in place": Case(Routed, loss=routed, zero=by_optimizer_in_place, steps=7),
    "unused, zeroed by the model in place": Case(Routed, loss=routed, zero=by_model_in_place, steps=7),
    "unused, zeroed now and then": Case(Routed, loss=routed, zero=now_and_then, steps=7),
    "unused, accumulated in no_sync": Case(Routed, loss=routed, micros=2),
    "checkpoint": Case(lambda: Checkpointed(False), steps=3),
    "checkpoint, re-entrant": Case(lambda: Checkpointed(True), steps=3),
    "tokens": Case(loss=of_different_sizes, average="tokens"),
    "tokens, accumulated": Case(loss=of_different_sizes, average="tokens", micros=2),
}
CASES["after one that raised"] = Case(prepare=raise_in_backward)
UNEVEN = Case(lengths=(3, 5, 1))
CASES |= {
    "uneven": UNEVEN,
    "uneven, by those present": replace(UNEVEN, divide=False, make=momentum),
    "uneven, zeroed in place, schedule": replace(UNEVEN, zero=by_optimizer_in_place, schedule=True),
    "uneven, zeroed after forward": replace(UNEVEN, zero_late=True, make=momentum),
    "uneven, muon and adamw, clipped": replace(UNEVEN, make=muon_and_adamw, clip=0.05),
    "uneven, unused": replace(UNEVEN, build=Routed, loss=routed, micros=2),
    "uneven, unused, zeroed in place": replace(UNEVEN, build=Routed, loss=routed, zero=by_model_in_place),
    "uneven, tokens": replace(UNEVEN, loss=of_different_sizes, average="tokens", micros=2),
}
CORE = [
    "sgd", "uneven, muon and adamw, clipped", "adamw in groups, schedule", "muon and adamw, schedule",
    "unused", "accumulated in no_sync", "clipped", "tokens",
]  # fmt: skip


# The same bits.

FP32 = Case(dtype=torch.float32, clip=0.05, steps=6)
IN_BITS = {
    "sgd": replace(FP32, make=momentum),
    "adamw in groups": FP32,
    "adamw, fused": replace(FP32, make=adamw_by_name, micros=2),
    "muon and adamw": replace(FP32, make=muon_and_adamw),
    "adafactor, unused": replace(FP32, build=Routed, make=adafactor, loss=routed),
    "bf16 hook": replace(
        FP32, steps=5, prepare=lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    ),
}
LONG_IN_BITS = {
    f"{name}, long": replace(case, steps=20) for name, case in IN_BITS.items() if name != "bf16 hook"
}


def same_bits(case: Case, strategies: Sequence[str] = STRATEGIES) -> Check:
    """All strategies have the losses and parameters of the first one, bit for bit."""

    def check(group: dist.ProcessGroup) -> None:
        first, *others = strategies
        expected = list(case.together(first, group))
        assert (
            expected[0]["loss"].isfinite().all() and len({each["loss"].tolist()[0] for each in expected}) > 1
        )
        for strategy in others:
            found = first_difference(list(case.together(strategy, group)), expected)
            assert found is None, f"{strategy}: {found}"

    return check


# The tests notice when something is missing.


def one_bit(self: Sharding, bucket: Bucket) -> None:
    reduced(self, bucket)
    own = self.stores[bucket.index].gradient
    if self.rank == 1 and own is not None:
        own[:1] = torch.nextafter(own[:1], torch.tensor(9.0))


def permuted(self: Sharding, bucket: Bucket) -> None:
    reduced(self, bucket)
    own = self.stores[bucket.index].gradient
    if self.rank == 1 and own is not None:
        own.copy_(own.flip(0))


def not_gathered(self: Sharding, kinds: Collection[int]) -> None:
    if self.strategy.parameters:
        self.parts[0].parameter.data.copy_(self.parts[0].parameter + 1)
    for store in self.stores:
        store.note_parts()
    self.note_versions()


def own_norm(self: ShardedDataParallel, **_: Any) -> torch.Tensor:
    parts = self.sharding.parts
    norms = [each.parameter.grad.norm() for each in parts if each.parameter.grad is not None]
    norm: torch.Tensor = torch.stack(norms).norm()
    return norm


def notices(name: str, broken: Any, make: Callable[[nn.Module], Optimizers] = adamw_in_groups) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        case = replace(FP32, make=make, steps=5)
        expected = list(case.together("replicate", group))
        for strategy in STRATEGIES[1:]:
            with replaced(ShardedDataParallel if broken is own_norm else Sharding, name, broken):
                found = first_difference(list(case.together(strategy, group)), expected)
            assert gathered(found is None, group) == [False] * group.size(), strategy

    return check


# Parameters in bf16, masters in fp32.


def half_alone(reduce: torch.dtype, ranks: int) -> Iterator[State]:
    """All ranks' steps in one process: each one's gradient in bf16, their mean in `reduce`."""
    case = Case(dtype=torch.float32)
    masters, optimizer = case.start()
    halves = copy.deepcopy(masters).bfloat16()
    for turn in range(case.steps):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            halves.zero_grad()
            plain(halves, turn, rank).backward()
            for name, half in halves.named_parameters():
                assert half.grad is not None
                grad = (half.grad.to(reduce) * (1 / ranks)).float()
                sums[name] = sums[name] + grad if rank else grad
        for name, master in masters.named_parameters():
            master.grad = sums[name].to(reduce).float()  # a sum is rounded once
        optimizer.step()
        with torch.no_grad():
            for half, master in zip(halves.parameters(), masters.parameters(), strict=True):
                half.copy_(master)
        yield state_of(halves)


def half(reduce: torch.dtype | None) -> Check:
    case = Case(dtype=torch.float32, precision=MixedPrecision(param=torch.bfloat16, reduce=reduce))

    def check(group: dist.ProcessGroup) -> None:
        for strategy in STRATEGIES[1:]:
            model, optimizer = case.wrapped(strategy, group)
            assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
            assert {each.dtype for each in parameters_of(optimizer)} == {torch.float32}
            expected = list(half_alone(reduce or torch.bfloat16, group.size()))
            found = first_difference(list(case.together(strategy, group)), expected)
            assert found is None, f"{strategy}: {found}"
        same_bits(replace(case, clip=0.05, make=adafactor, steps=10), STRATEGIES[1:])(group)

    return check


def loaded_into_masters(group: dist.ProcessGroup) -> None:
    """What load_state_dict brings is what the next step begins from, with all its bits."""
    case = Case(dtype=torch.float32, make=momentum, precision=MixedPrecision(param=torch.bfloat16))
    for strategy in STRATEGIES[1:]:
        model, optimizer = case.wrapped(strategy, group)
        alone = {f"module.{name}": each for name, each in state_of(case.start()[0]).items()}
        assert first_difference([state_of(model)], [alone]) is None, strategy
        changed = {name: each + 2**-20 for name, each in alone.items()}  # in bf16 most of it is the same
        model.load_state_dict(changed)
        plain(model, 0, group.rank()).backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        state = state_of(model)
        assert first_difference([state], [changed]) is None, strategy
        assert {each.dtype for each in state.values()} == {torch.float32}
        model.load_state_dict({name: each.bfloat16() for name, each in state.items()})
        assert first_difference([state_of(model)], [changed]) is None, "masters lost bits to their roundings"


# Memory.


def bytes_of(tensors: Iterable[Any]) -> int:
    """Each byte once; without the arenas out of which shared tensors are given."""
    arenas = {id(segment.memory) for segment in ARENAS._by_address[1]}
    ranges = sorted(
        (each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu" and id(each) not in arenas
    )  # fmt: skip
    total = reached = 0
    for start, stop in ranges:
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def alive() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return bytes_of(gc.get_objects())


def memory(group: dist.ProcessGroup) -> None:
    """After a step: parameters, gradients, and AdamW's two states."""
    size, layers, width = group.size(), 12, 64
    whole = layers * (width * width + width) * 4
    bucket = whole / layers
    # Or the next one's buckets would lie where these did, where collectives have views that count before.
    kept: list[Any] = []

    def taken(strategy: str) -> tuple[int, float]:
        """Bytes, and the part of the optimizer's state that this rank has."""
        before = alive()
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        wrapped, optimizer = parallelize(
            model, AdamW(model.parameters(), fused=True), strategy, group,
            bucket_cap_mb=bucket / 2**20,
        )  # fmt: skip
        kept.append((wrapped, optimizer))
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(torch.randn(2, width)).sum().backward()
            optimizer.step()
        state = bytes_of(value for each in optimizer.state.values() for value in each.values() if value.ndim)
        return alive() - before, state / (2 * whole)

    taken("replicate")  # what is made once in a process
    for strategy, expected in {
        "replicate": 4 * whole,
        "zero1": 2 * whole + 2 * whole / size,
        "zero2": whole + 3 * whole / size + bucket,
        "zero3": whole + 3 * whole / size + bucket,  # the parameters are one copy for all ranks
    }.items():
        found, share = taken(strategy)
        assert 0.97 <= found / expected <= 1.05, f"{strategy}: {found} bytes, expected {expected:.0f}"
        assert abs(share - (1 if strategy == "replicate" else 1 / size)) < 0.03, f"{strategy}: {share}"


def common_parameters(group: dist.ProcessGroup) -> None:
    """zero3 has one copy on this host: what a rank writes is there on all others."""
    for strategy, common in {"zero2": False, "zero3": True}.items():
        model, _ = Case().wrapped(strategy, group)
        first = next(model.parameters())
        before = first.detach().clone()
        dist.barrier(group)
        if group.rank() == 0:
            first.data.fill_(7.0)
        dist.barrier(group)
        seen = bool((first == 7.0).all())
        assert seen == (common or group.rank() == 0) and (seen or torch.equal(first, before)), strategy
        dist.barrier(group)


# What else the wrapped model and the optimizer can do.


def goes_on_from_its_state(group: dist.ProcessGroup) -> None:
    for make in (adamw_in_groups, muon_and_adamw):
        for strategy in STRATEGIES:
            case = replace(FP32, make=make)

            def steps(model: Any, optimizers: Any, turns: Iterable[int]) -> list[State]:
                for turn in turns:
                    by_optimizer(model, optimizers, turn)
                    plain(model, turn, group.rank()).backward()
                    for one in each(optimizers):
                        one.step()
                return [state_of(model.module)]

            model, optimizers = case.wrapped(strategy, group)
            steps(model, optimizers, range(3))
            saved = state_of(model), [copy.deepcopy(one.state_dict()) for one in each(optimizers)]
            expected = steps(model, optimizers, range(3, 6))
            again, made = case.wrapped(strategy, group)
            again.load_state_dict(saved[0])
            for one, state in zip(each(made), saved[1], strict=True):
                one.load_state_dict(state)
            found = first_difference(steps(again, made, range(3, 6)), expected)
            assert found is None, f"{strategy}: {found}"


def state_of_other_parts(group: dist.ProcessGroup) -> None:
    """Of another rank, and of another number of ranks: the same keys and shapes for other elements."""
    for strategy in strategies_on(group)[1:]:
        _, optimizer = FP32.wrapped(strategy, group)
        mine = optimizer.state_dict()
        of_0 = gathered(mine["imece"], group)[0]
        assert of_0["rank"] == 0 and of_0["size"] == group.size()
        optimizer.load_state_dict(mine)
        optimizer.load_state_dict({key: mine[key] for key in ("state", "param_groups")})
        if group.rank() == 0:
            optimizer.load_state_dict(mine | {"imece": of_0})
            continue
        with pytest.raises(ValueError) as caught:
            optimizer.load_state_dict(mine | {"imece": of_0})
        assert str(caught.value) == (
            f"this optimizer's state dict is of the parts of rank 0 of {group.size()}, "
            f"and rank {group.rank()} of {group.size()} has others: load on each rank what it has saved, "
            f"or save with imece.checkpoint.TrainingState, which loads on any rank"
        )


def average_of_weights(group: dist.ProcessGroup) -> None:
    for strategy in STRATEGIES[:3]:
        case = Case()
        model, optimizer = case.wrapped(strategy, group)
        averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        expected = None
        for turn in range(4):
            by_optimizer(model, optimizer, turn)
            plain(model, turn, group.rank()).backward()
            optimizer.step()
            averaged.update_parameters(model.module)
            now = state_of(model.module)
            expected = now if expected is None else {k: (expected[k] + now[k]) / 2 for k in now}
        assert expected is not None
        assert first_difference([state_of(averaged.module)], [expected], EXACT) is None, strategy


def trace(group: dist.ProcessGroup) -> None:
    for strategy in strategies_on(group):
        model, _ = Case().wrapped(strategy, group)
        model.record_trace()
        for turn in range(2):
            plain(model, turn, group.rank()).backward()
        found = model.last_trace
        assert [each.index for each in found.buckets] == list(range(len(model.reducer.buckets)))
        assert len(found.buckets) > 3 and sum(each.nbytes for each in found.buckets) >= 8 * 3000
        for each in found.buckets:
            assert found.backward_start_s < each.ready_s <= each.launched_s <= each.done_s <= found.end_s


def gradients_are_in_the_optimizer(group: dist.ProcessGroup) -> None:
    for strategy in STRATEGIES[1:]:
        model, optimizer = Case().wrapped(strategy, group)
        with model.no_sync():
            plain(model, 0, group.rank()).backward()
        assert all(each.grad is not None for each in model.parameters())
        assert all(each.grad is None for each in parameters_of(optimizer))
        plain(model, 1, group.rank()).backward()
        assert all(each.grad is None for each in model.parameters())
        assert all(each.grad is not None for each in parameters_of(optimizer))
        elements = sum(each.numel() for each in parameters_of(optimizer))
        assert sum(gathered(elements, group)) == sum(each.numel() for each in model.parameters())


def line_search(group: dist.ProcessGroup) -> None:
    """LBFGS decides by the closure's loss: with one of each rank's own, ranks would drift apart unseen."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs, targets = torch.randn(4 * group.size(), 4), torch.randn(4 * group.size(), 1)
    mine = slice(group.rank(), None, group.size())

    def trained(model: nn.Module, optimizer: LBFGS, share: slice, mean: bool) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
            loss.backward()
            told = loss.detach().clone()
            if mean:
                told /= group.size()
                dist.all_reduce(told, group=group)
            return told

        for turn in range(4):
            optimizer.step(closure) if turn % 2 else optimizer.step(closure=closure)

    def searching(model: nn.Module) -> LBFGS:
        return LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    alone, together, apart = (copy.deepcopy(start) for _ in range(3))
    trained(alone, searching(alone), slice(None), mean=False)
    wrapped, optimizer = parallelize(together, searching(together), "replicate", group)
    trained(wrapped, optimizer, mine, mean=True)
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    wrapped, optimizer = parallelize(apart, searching(apart), "replicate", group)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'closure'"):
        optimizer.step()  # type: ignore[call-arg]
    said = r"closure of LBFGS returned [\d.]+ on rank 0, [\d.]+ on rank 1.* Return the mean over ranks"
    with pytest.raises(MismatchError, match=said):
        trained(wrapped, optimizer, mine, mean=False)


def given_to_a_whole_optimizer_later(group: dist.ProcessGroup) -> None:
    """A parameter that some wrapped model has is stepped; one whose gradient nobody sums is an error."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    wrapped, _ = parallelize(model, optimizer, "replicate", group)
    other = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    model[1].register_parameter("late", nn.Parameter(torch.ones(1)))
    optimizer.add_param_group({"params": [*model[1].parameters(), *other.parameters()]})
    inputs = torch.full((2, 4), float(group.rank()))
    other(wrapped(inputs)).sum().backward()
    optimizer.step()
    states = [each.flatten().tolist() for each in (*model.parameters(), *other.parameters())]
    assert gathered(states, group) == [states] * group.size()
    stranger = nn.Parameter(torch.ones(2))
    optimizer.param_groups[1]["params"] = [stranger]
    (other(wrapped(inputs)).sum() * stranger.sum()).backward()
    with pytest.raises(ValueError, match=r"^parameter of shape \[2\], none of.* SGD after .*nobody sums"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"^parameter 1\.late came after the model was wrapped"):
        (other(wrapped(inputs)).sum() * model[1].late.sum()).backward()


def steps_of_one_rank_alone(group: dist.ProcessGroup) -> None:
    """Whole parameters are stepped by them, with a warning; parts would not be stepped."""
    said = "SGD .*0.weight.* of this rank alone.* or by a backward in no_sync"
    for strategy in strategies_on(group):
        linear = nn.Sequential(nn.Linear(4, 4))
        model, optimizer = parallelize(linear, momentum(linear), strategy, group)

        def backward(model: nn.Module = model) -> None:
            model(torch.full((2, 4), float(group.rank()))).sum().backward()

        with model.no_sync():
            backward()
        backward()
        with warnings.catch_warnings(action="error"):
            optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            backward()
        if strategy == "replicate":
            with pytest.warns(UserWarning, match=said) as warned:
                optimizer.step()
            assert [each.filename for each in warned] == [__file__]
            with warnings.catch_warnings(action="error"):
                optimizer.step()  # it is said once
            by_hand = nn.Sequential(nn.Linear(4, 4))
            model, optimizer = parallelize(by_hand, momentum(by_hand), strategy, group)
            inputs = torch.full((2, 4), float(group.rank()), requires_grad=True)
            backward(model)
            torch.autograd.grad(model(inputs).sum(), inputs)  # as one that looks at saliency
            with warnings.catch_warnings(action="error"):
                optimizer.step()
            for each in torch.autograd.grad(model(inputs).sum(), [*by_hand.parameters()]):
                next(p for p in by_hand.parameters() if p.shape == each.shape).grad = each
            with pytest.warns(
                UserWarning, match=r"0\.weight.* of this rank alone.* by torch\.autograd\.grad"
            ):
                optimizer.step()
            other = nn.Linear(4, 4)
            optimizer = parallelize(other, momentum(other), strategy, group)[1]
            other(torch.ones(2, 4)).sum().backward()
            with pytest.warns(UserWarning, match="the model that parallelize returned with it.* is gone"):
                optimizer.step()
            optimizer = parallelize(other, momentum(other), strategy, group)[1]
            again = DistributedDataParallel(other, process_group=group)
            backward(again)
            with warnings.catch_warnings(action="error"):
                optimizer.step()  # another wrapped model has summed them
        else:
            with pytest.raises(RuntimeError, match=said):
                optimizer.step()


def one_script_for_every_strategy(group: dist.ProcessGroup) -> None:
    for strategy in strategies_on(group):
        model, _ = Case().wrapped(strategy, group)
        assert model.strategy == strategy
        sharded = strategy != "replicate"
        every = [name for name, each in model.module.named_parameters() if each.requires_grad]
        assert model.sharded_names == (every if sharded else [])
        numels = gathered(sum(part.numel for part in model.parts), group)
        assert sum(numels) == (sum(each.numel() for each in model.parameters()) if sharded else 0)
        with model.gathered(write=True), torch.no_grad():
            with model.gathered(write=True):  # as load_state_dict enters it too
                for each in model.module.parameters():
                    each.fill_(1.0)
            for each in model.module.parameters():
                assert each.eq(1.0).all(), strategy
                each.add_(1.0)
        with torch.no_grad():
            for part in model.parts:
                part.parameter.add_(1.0)
        model.take_over_masters()
        model.settle()
        for name, value in whole_state_of(model).items():
            assert (
                not value.is_floating_point() or name not in every or value.eq(3.0 if sharded else 2.0).all()
            )


def what_one_rank_alone_writes(group: dist.ProcessGroup) -> None:
    """As within DeepSpeed's `GatheredParameters(modifier_rank=0)`; a broadcast of it is no mistake."""
    first = dist.get_rank(group) == 0
    ways: list[tuple[str, dict[str, Any]]] = [(each, {}) for each in strategies_on(group)]
    for strategy, more in [*ways, ("zero3", {"gather": True})]:
        module: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5).requires_grad_(False))
        model, _ = parallelize(module, AdamW(module[0].parameters()), strategy, group, **more)
        for number in range(2):
            weight = module[number].weight
            with model.gathered(write=True), torch.no_grad():
                if first:
                    weight.fill_(2.0 + number)
                broadcast(weight.detach(), 0, group=group)
            assert (model.state_dict()[f"module.{number}.weight"] == 2.0 + number).all(), strategy
            who = "rank [01]" if group.size() > 2 else "all ranks"
            said = rf"not the same: {number}\.weight on {who} \(of 4 parameters\)"
            for counted in (True, False):
                with pytest.raises(MismatchError, match=said), model.gathered(write=True), torch.no_grad():
                    if first:
                        (weight if counted else weight.data[-1:]).fill_(4.0)
            with model.gathered(write=True), torch.no_grad():
                weight.fill_(1.0)
        model(torch.ones(2, 8)).sum().backward()
    module = nn.Linear(8, 6)
    model, _ = parallelize(module, AdamW(module.parameters()), "zero1", group)
    with pytest.raises(MismatchError, match=r"written by load_state_dict, which all ranks call\)"):
        if first:
            model.load_state_dict({f"module.{name}": each + 1 for name, each in module.state_dict().items()})
        else:
            model(torch.ones(2, 8)).sum().backward()


def names_of_parts(group: dist.ProcessGroup) -> None:
    model, optimizer = Case(make=adamw_by_name).wrapped("zero2", group)
    (params,) = optimizer.param_groups
    assert params["param_names"] == [
        part.name
        for name, _ in model.module.named_parameters()
        for part in model.sharding.parts
        if part.name == name
    ]
    assert len(params["params"]) == len(params["param_names"])
    assert min(gathered(len(params["params"]), group)) < len(list(model.parameters()))


def an_optimizer_zeroes_its_own(group: dist.ProcessGroup) -> None:
    """One optimizer's zero_grad leaves what came in no_sync for the other's parameters."""
    model, (muon, adamw) = Case(make=muon_and_adamw).wrapped("zero1", group)
    with model.no_sync():
        plain(model, 0, group.rank()).backward()
    muon.zero_grad()
    left = {each.ndim for each in model.parameters() if each.grad is not None}
    assert left == {1}
    adamw.zero_grad()
    assert all(each.grad is None for each in model.parameters())


def a_compiled_step(group: dist.ProcessGroup) -> None:
    """torch.compile of what steps: the optimizer's arithmetic alone is in the graph."""

    def trained(compile: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(1)
        module = nn.Linear(8, 4)
        model, optimizer = parallelize(module, SGD(module.parameters(), 0.1), strategy, group)

        def step() -> None:
            optimizer.step()

        step = compile(step)
        for turn in range(2):
            model(torch.randn(3, 8, generator=torch.Generator().manual_seed(turn))).sum().backward()
            step()
            optimizer.zero_grad()
        model.check_parameters()
        return module

    for strategy in ("zero1", "zero3"):
        graphs: list[torch.fx.GraphModule] = []

        def kept(graph: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        ways: list[Callable[..., Any]] = [torch.compile(backend=kept), lambda step: step]
        got, expected = (trained(each).get_parameter("weight") for each in ways)
        assert torch.allclose(got, expected)
        assert len(graphs) == 1, f"{len(graphs)} graphs in two steps of {strategy}"


# What is refused.


def refused(group: dist.ProcessGroup) -> None:
    def attempt(
        error: type[Exception], message: str, make: Callable[[nn.Module], Any], strategy: str
    ) -> None:
        model = Decoder(SHAPE)
        with pytest.raises(error, match=message):
            parallelize(model, make(model), strategy, group)

    attempt(ValueError, "unknown strategy 'zero4'; did you mean 'zero", momentum, "zero4")
    attempt(ValueError, "strategy 'hybrid' needs a mesh", momentum, "hybrid")
    attempt(ValueError, "LBFGS cannot be sharded: .* use strategy='replicate'",
            lambda model: torch.optim.LBFGS(model.parameters()), "zero1")  # fmt: skip
    attempt(ValueError, "PostLocalSGDOptimizer cannot be sharded: it averages over ranks what it steps",
            lambda model: PostLocalSGDOptimizer(momentum(model), Averager(1)), "zero3")  # fmt: skip
    attempt(ValueError, "two optimizers step tokens.weight", lambda model: [momentum(model)] * 2, "zero2")
    for strategy in ("zero3", "replicate"):
        attempt(ValueError, r"shape \[32, 16\] that is none of the model's: .*put both into one module",
                lambda model: momentum(Decoder(SHAPE)), strategy)  # fmt: skip
    attempt(ValueError, "no optimizer", lambda model: [], "zero1")
    with pytest.raises(TypeError, match="an SGD is no model"):
        parallelize(momentum(Decoder(SHAPE)), Decoder(SHAPE), "zero1", group)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"^strategy=an SGD: a name, such as"):
        parallelize(model := Decoder(SHAPE), "zero1", momentum(model), group)  # type: ignore[arg-type]
    mistakes: dict[str, Any] = {"init": "normal", "activation_bytes": "1GB", "mesh": 2}
    for what, value in (*mistakes.items(), ("activation_bytes", -1)):
        options: dict[str, Any] = {"mesh": group, what: value}
        model = Decoder(SHAPE)
        with pytest.raises((TypeError, ValueError), match=f"^{what}={value!r}: "):
            parallelize(model, momentum(model), "auto", **options)
    for what in ("param", "reduce", "buffer"):
        with pytest.raises(TypeError, match=rf"^MixedPrecision\({what}=torch.int8\): a dtype of floating"):
            MixedPrecision(**{what: torch.int8})
    with pytest.raises(ValueError, match=f"model of 1 elements cannot be divided among {group.size()} ranks"):
        tiny = nn.Linear(1, 1, bias=False)
        parallelize(tiny, momentum(tiny), "zero1", group)
    with pytest.raises(ValueError, match="precision"):
        parallelize(tiny, momentum(tiny), "replicate", group, precision=MixedPrecision(torch.half))
    turned = nn.ParameterDict({"phase": torch.ones(4, dtype=torch.complex64)})
    for what, dtypes in {"param": (torch.bfloat16,), "reduce": (None, torch.bfloat16)}.items():
        with pytest.raises(ValueError, match=rf"phase is torch.complex64, and .*{what}=.* leave {what} out"):
            parallelize(turned, momentum(turned), "zero1", group, precision=MixedPrecision(*dtypes))
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight.data = tied["a"].weight.data
    with pytest.raises(ValueError) as caught:
        parallelize(tied, momentum(tied), "zero1", group)
    assert str(caught.value) == (
        "a.weight and b.weight share memory but are two parameters: assign the Parameter itself"
    )
    model, optimizer = Case().wrapped("zero1", group)
    for strategy in ("zero1", "replicate"):
        with pytest.raises(ValueError, match="the model is a ShardedDataParallel already"):
            parallelize(model, optimizer, strategy, group)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match="a sharded model cannot be"):
            copied(model)


def copied_whole(group: dist.ProcessGroup) -> None:
    """A model that is not sharded, as torch's: a copy has the default group, and no optimizer."""
    world = dist.group.WORLD
    assert world is not None
    model, _ = Case().wrapped("replicate", world)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert copied.process_group is world and model.stepped_by and not copied.stepped_by
        assert all(map(torch.equal, copied.parameters(), model.parameters()))


def models_that_differ(group: dist.ProcessGroup) -> None:
    for strategy in strategies_on(group):
        model = nn.Linear(3, 3 + (group.rank() == 1))
        with pytest.raises(MismatchError, match="weight"):
            parallelize(model, momentum(model), strategy, group)


def optimizers_that_differ(group: dist.ProcessGroup) -> None:
    for strategy in strategies_on(group)[1:]:
        model = Decoder(SHAPE)
        with pytest.raises(MismatchError, match="optimizer"):
            parallelize(model, (momentum if group.rank() else muon_and_adamw)(model), strategy, group)


OTHERS: dict[str, Check] = {
    f"bits: {name}": same_bits(case) for name, case in (IN_BITS | LONG_IN_BITS).items()
} | {
    "notices one bit": notices("reduced", one_bit),
    "notices a permutation": notices("reduced", permuted),
    "notices what is not gathered": notices("after_step", not_gathered),
    "notices a norm of one's own": notices("gradient_norm", own_norm, momentum),
    "half": half(None),
    "half, summed in fp32": half(torch.float32),
    "half, loaded": loaded_into_masters,
    "memory": memory,
    "common parameters": common_parameters,
    "goes on from its state": goes_on_from_its_state,
    "state of other parts": state_of_other_parts,
    "average of weights": average_of_weights,
    "trace": trace,
    "gradients are in the optimizer": gradients_are_in_the_optimizer,
    "compiled": parity(Case(compiled, steps=3), but=["replicate", "zero1", "zero3"]),
    "names": names_of_parts,
    "given to a whole optimizer later": given_to_a_whole_optimizer_later,
    "steps of one rank alone": steps_of_one_rank_alone,
    "line search": line_search,
    "one script for every strategy": one_script_for_every_strategy,
    "what one rank alone writes": what_one_rank_alone_writes,
    "an optimizer zeroes its own": an_optimizer_zeroes_its_own,
    "refused": refused,
    "copied whole": copied_whole,
    "a compiled step": a_compiled_step,
    "models that differ": models_that_differ,
    "optimizers that differ": optimizers_that_differ,
}
CHECKS: dict[str, Check] = {name: parity(case) for name, case in CASES.items()} | OTHERS
IN_THREE = ["bits: muon and adamw", "half, loaded", "odd parameters", "adafactor", "uneven, unused"]
IN_THREE += [name for name in OTHERS if name.startswith("notices")]
SLOW_IN_THREE = [name for name in OTHERS if name.startswith(("bits", "half")) and name not in IN_THREE]
SLOW_IN_THREE += ["adamw that has stepped", "unused, momentum"]
SLOW = ["compiled", "a compiled step", *(f"bits: {name}" for name in LONG_IN_BITS)]


@pytest.mark.parametrize(
    "job",
    jobs(__name__, [name for name in CHECKS if name not in SLOW], (2, "shm"))
    + jobs(__name__, [*CORE, *IN_THREE], (3, "shm"))
    + jobs(__name__, CORE[:2], (1, "shm"), (3, "gloo"))
    + jobs(__name__, ["complex parameters", *CORE[2:]], (2, "gloo"))
    + jobs(__name__, ["muon and adamw, schedule"], (4, "shm"))
    + slow(
        jobs(__name__, SLOW, (2, "shm"))
        + jobs(__name__, SLOW_IN_THREE, (3, "shm"))
        + jobs(__name__, CORE[2:], (1, "shm"))
        + jobs(__name__, CORE[:2], (2, "gloo"))
        + jobs(__name__, ["sgd"], (4, "shm"))
    ),
)
def test_parallelize(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


class Known(SGD):
    """Nobody but its author knows what it does."""

    element_wise = True


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((each, True) for each in (SGD, AdamW, Adagrad, torch.optim.RMSprop, Known)),
        *(
            (each, False)
            for each in (Adafactor, Muon, type("Unknown", (SGD,), {}), type("AdamW", (SGD,), {}))
        ),
    ],
)
def test_whose_matrices_may_be_cut(make: Any, expected: bool) -> None:
    assert is_element_wise(make([nn.Parameter(torch.ones(2, 2))], lr=0.1)) is expected


def test_memory_that_two_parameters_share() -> None:
    flat, empty = torch.zeros(12), torch.zeros(0)
    meta = torch.zeros(3, device="meta")
    beside = [flat[:4], flat[4:12].view(2, 4).t(), empty, empty, meta, meta, torch.zeros(4)]
    columns = flat.view(4, 3)
    refuse_tied_by_data([(str(at), each) for at, each in enumerate(beside)])
    refuse_tied_by_data([("left", columns[:, :1]), ("right", columns[:, 1:])])
    for one, other in ((flat[:4], flat[3:6]), (flat[2:3], flat), (columns[1:, :1], flat[3:9])):
        with pytest.raises(ValueError, match=r"^(a and b|b and a) share memory"):
            refuse_tied_by_data([("a", one), ("b", other)])
    frozen = [("a", flat), ("b", flat[1:3])]
    refuse_tied_by_data([], frozen)
    with pytest.raises(ValueError, match="a and c share memory"):
        refuse_tied_by_data([("c", flat[6:9])], frozen)


def test_a_norm_of_all_that_it_steps() -> None:
    """A rank would take that of its parts, and scale these by another number than other ranks do."""

    class Lamb(SGD):
        """Divides gradients by their norm, where that is larger than a number in its groups."""

    optimizer = Lamb([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    optimizer.param_groups[0]["max_grad_norm"] = None
    assert not is_element_wise(optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = 0.5
    with pytest.raises(
        ValueError, match=r"Lamb clips by the norm of all .*max_grad_norm=0.5.*clip_grad_norm_"
    ):
        is_element_wise(optimizer)
