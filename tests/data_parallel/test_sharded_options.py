"""Options that work with any strategy: bf16 on the wire, buffers in fewer bits, hooks, averages of weights.

Also the messages for loops that would not train.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imece import MixedPrecision, parallelize
from imece.collectives import execute, native, wire
from imece.collectives.wire_formats import BLOCK, FORMATS
from imece.data_parallel import norm
from imece.data_parallel.norm import norm_of
from imece.data_parallel.sharded import ShardedDataParallel
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.data_parallel.sharding.blocks import (
    LAYERS,
    Small,
    adamw,
    assert_freed,
    loss_of,
    made,
    mesh_of,
    partly_frozen,
    plain,
    there_when_blocks_run,
    two_hosts,
    wrap,
)

SHARDED = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Way:
    """A strategy, and whether its parameters are gathered by unit."""

    strategy: str
    gather: bool = False


WAYS = (*(Way(each) for each in SHARDED), Way("zero3", gather=True))


def wrapped(way: Way, group: dist.ProcessGroup, make: Callable[[], nn.Module] = Small, **options: Any) -> Any:
    return wrap(made(make), group, way.strategy, gather=way.gather, **options)


def losses(way: Way, group: dist.ProcessGroup, **options: Any) -> torch.Tensor:
    """Of eight steps."""
    model, optimizer = wrapped(way, group, **options)
    return torch.stack(list(plain(model, optimizer, 8)))


def of_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor, group=group)
    return found


# Fewer bytes on the wire.


def local_gradients(group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    """Of each parameter, flat: every rank's gradient, divided by their number."""
    model = made()
    loss_of(model, 0).backward()
    return {
        name: of_all_ranks(each.grad.reshape(-1) * (1 / group.size()), group)
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    total, *others = (each.clone() for each in tensors)
    for each in others:
        total += each
    return total


def assert_gradients(model: Any, expected: dict[str, torch.Tensor]) -> None:
    assert model.sharding.parts
    for part in model.sharding.parts:
        grad = part.parameter.grad
        assert grad is not None and torch.equal(grad.reshape(-1), expected[part.name][part.start : part.stop])


def rounds_once(group: dist.ProcessGroup) -> None:
    """Every rank's gradient is rounded, and their sum is not."""
    local = local_gradients(group)
    expected = {name: in_order([rounded(each) for each in found]) for name, found in local.items()}
    for way in WAYS:
        model, _ = wrapped(way, group, wire="bf16")
        loss_of(model, 0).backward()
        assert_gradients(model, expected)


def trains_as_fp32(group: dist.ProcessGroup) -> None:
    """Other bits than fp32's, and nearly their losses; in bf16 the same bits for all strategies."""
    fp32 = losses(WAYS[0], group)
    for carried in FORMATS:
        replicate = losses(Way("replicate"), group, wire=carried)
        found = [losses(way, group, wire=carried) for way in WAYS]
        for each in (replicate, *found):
            assert not torch.equal(each, fp32) and torch.allclose(each, fp32, rtol=0.01)
        if carried == "bf16":
            assert all(torch.equal(each, found[0]) for each in found[1:])


class Sent:
    """Bytes of gradients that a rank sends, by group: N−1 of N slices."""

    def __init__(self) -> None:
        self.by_group: dict[dist.ProcessGroup, int] = {}

    def add(self, nbytes: int, group: dist.ProcessGroup) -> None:
        self.by_group[group] = self.by_group.get(group, 0) + nbytes

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def post(sends: Any, receives: Any, group: Any) -> Any:
            self.add(sum(message.tensor.nbytes for message in sends), group)
            return whole_post(sends, receives, group)

        def slices(name: str, at: int) -> Any:
            def call(*args: Any) -> Any:
                self.add(args[at].nbytes * (args[-1].size() - 1) // args[-1].size(), args[-1])
                return whole[name](*args)

            return mock.patch.object(native, name, call)

        whole_post = execute.post
        whole = {name: getattr(native, name) for name in ("all_to_all", "reduce_scatter")}
        with mock.patch.object(wire, "post", post), slices("all_to_all", 1), slices("reduce_scatter", 1):
            yield


def sends_fewer_bytes(group: dist.ProcessGroup) -> None:
    """A rank's bytes of gradients in one backward, whether it overlaps or not."""
    for way in WAYS:
        for overlap in (False, True):
            sent: list[int] = []
            for carried in (None, *FORMATS):
                model, _ = wrapped(way, group, wire=carried, overlap=overlap)
                count = Sent()
                with count.counting():
                    loss_of(model, 0).backward()
                sent.append(count.by_group[group])
            shards = [store.plan.shard_numel for store in model.sharding.stores]
            in_steps = sum(-(-each // BLOCK) for each in shards)
            for found, elements in zip(
                sent, (sum(shards), sum(shards) / 2, sum(shards) / 4 + in_steps), strict=True
            ):
                assert found == 4 * elements * (group.size() - 1), f"{way}, overlap={overlap}"


def hybrid_wire(group: dist.ProcessGroup) -> None:
    """fp32 inside of a host, bf16 between hosts, where the sum is rounded once more."""
    local = local_gradients(group)
    expected = {}
    for name, (a, b, c, d) in local.items():
        expected[name] = rounded(in_order([rounded(a + b), rounded(c + d)]))
    with two_hosts(group) as mesh:
        for strategy in ("hybrid_zero2", "hybrid"):
            plain_model = made()
            model, _ = parallelize(plain_model, adamw(plain_model), strategy, mesh, wire="bf16")
            count = Sent()
            with count.counting():
                loss_of(model, 0).backward()
            assert_gradients(model, expected)
            assert isinstance(model, ShardedDataParallel)
            shard = sum(store.plan.shard_numel for store in model.sharding.stores)
            assert mesh.cross_group is not None
            assert count.by_group[mesh.host_group] == 4 * shard, "one of two shards, in fp32"
            assert count.by_group[mesh.cross_group] == shard, "half of the own shard in bf16, before its sums"


def refused_options(group: dist.ProcessGroup) -> None:
    for strategy in ("replicate", *SHARDED):
        model = made()
        with pytest.raises(ValueError, match="unknown wire 'fp8': None, 'bf16' or 'int8'"):
            parallelize(model, adamw(model), strategy, group, wire="fp8")  # type: ignore[arg-type]
    for strategy in ("auto", "replicate", "zero1"):
        with pytest.raises(ValueError, match="bucket_cap_mb=inf: MiB, more than 0 and finite"):
            parallelize(model, adamw(model), strategy, group, bucket_cap_mb=float("inf"))


# Buffers.


class Buffered(Small):
    """One buffer of each sort."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([1 / 3]))
        self.register_buffer("again", self.scale)  # the same one
        self.register_buffer("kept", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("count", torch.tensor([2**24 + 1]))
        self.blocks[0].register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.blocks[1].register_buffer("mean", torch.tensor([1 / 7]))
        self.seen: torch.dtype | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = self.scale.dtype
        return super().forward(tokens) * self.scale


def buffers(group: dist.ProcessGroup) -> None:
    """In bf16 while it trains, in their own dtype in state dicts; others stay as they are."""
    precision = MixedPrecision(buffer=torch.bfloat16)
    for way in WAYS:
        model, optimizer = wrapped(way, group, Buffered, precision=precision)
        named = dict(model.module.named_buffers(remove_duplicate=False))
        bf16 = {"scale", "again", "kept", "blocks.1.mean"}
        assert {name for name, each in named.items() if each.dtype == torch.bfloat16} == bf16
        assert named["again"] is named["scale"] and named["count"].item() == 2**24 + 1
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert len(list(plain(model, optimizer, 2))) == 2 and model.module.seen == torch.bfloat16
        state = model.state_dict()
        assert state["module.scale"].dtype == state["module.again"].dtype == torch.float32
        assert state["module.blocks.1.mean"].dtype == torch.float32 and "module.kept" not in state
        assert state["module.count"].dtype == torch.int64
        assert torch.equal(state["module.scale"], torch.tensor([1 / 3]).bfloat16().float())
        half = torch.tensor([0.5])
        model.load_state_dict(state | {"module.scale": half, "module.again": half})
        assert named["scale"].item() == 0.5 and named["scale"].dtype == torch.bfloat16


class Scaled(nn.Module):
    """By a buffer that somebody has to fill."""

    def __init__(self) -> None:
        super().__init__()
        self.by: torch.Tensor
        self.register_buffer("by", torch.empty(4))

    def reset_parameters(self) -> None:
        self.by.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def buffers_from_meta(group: dist.ProcessGroup) -> None:
    """Cast when they have been filled; statistics of a batch norm stay as its kernel wants them."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled())
    model, _ = wrap(model, group, precision=MixedPrecision(buffer=torch.bfloat16))
    norm, scaled = model.module[1:]
    assert norm.running_var.dtype == torch.float32 and norm.num_batches_tracked.dtype == torch.int64
    assert scaled.by.dtype == torch.bfloat16 and scaled.by.tolist() == [2.0] * 4
    model(torch.randn(3, 4)).sum().backward()
    assert norm.running_var.tolist() != [1.0] * 4


class Told(nn.Module):
    """Takes tensors in a mapping and by name, and notes in a list what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(
        self, batch: dict[str, torch.Tensor], seen: list[torch.dtype], *, by: torch.Tensor
    ) -> torch.Tensor:
        assert batch["count"].dtype == torch.int64
        seen += [batch["x"].dtype, by.dtype]
        scaled: torch.Tensor = self.layer(batch["x"]) * by
        return scaled


def inputs_in_bf16(group: dist.ProcessGroup) -> None:
    """Floating-point inputs come in the dtype of the parameters, and their gradients in their own."""
    for way in WAYS:
        for param in (torch.bfloat16, None):
            precision = MixedPrecision(param=param, reduce=torch.float32)
            model, _ = wrap(Told(), group, way.strategy, gather=way.gather, precision=precision)
            seen: list[torch.dtype] = []
            x = torch.full((2, 16), 1 / 3, requires_grad=True)
            model(
                {"x": x, "count": torch.ones(2, dtype=torch.int64)}, seen, by=torch.ones(4)
            ).sum().backward()
            assert seen == [param or torch.float32] * 2
            assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.any()
            with torch.no_grad(), model.gathered():
                given = {"x": x, "count": torch.ones(2, dtype=torch.int64)}
                assert model(given, [], by=torch.ones(4)).dtype == (param or torch.float32)


def frozen_in_bf16(group: dist.ProcessGroup) -> None:
    """A partly frozen model runs in bf16; a frozen parameter has no master."""
    for way in WAYS:
        inner = two_layers()
        inner[0].requires_grad_(False)
        before = inner[0].weight.detach().clone()
        model, optimizer = wrap(inner, group, way.strategy, gather=way.gather,
                                precision=MixedPrecision(param=torch.bfloat16))  # fmt: skip
        trained, frozen = model.module[1].weight, model.module[0].weight
        with model.gathered():
            assert torch.equal(frozen, before.bfloat16())
        model(torch.ones(2, 16, dtype=torch.bfloat16)).mean().backward()
        optimizer.step()
        with model.gathered():
            assert trained.dtype == torch.bfloat16 and trained.any()
        assert torch.equal(model.state_dict()["module.0.weight"], before.bfloat16())
        held = [part.parameter for part in model.frozen_parts]
        assert not held or held[0].dtype == torch.bfloat16


# Communication hooks.


def hooked(group: dist.ProcessGroup) -> None:
    """A hook's mean is what would be without it; units that are gathered are freed as early."""
    for way in WAYS:
        called: list[int] = []

        def hook(
            state: Any, bucket: dist.GradBucket, called: list[int] = called
        ) -> torch.futures.Future[torch.Tensor]:
            called.append(bucket.index())
            return default_hooks.allreduce_hook(state, bucket)

        model, optimizer = wrapped(way, group)
        there = [there_when_blocks_run(model) if way.gather else []]
        expected = torch.stack(list(plain(model, optimizer, 3)))
        again, optimizer = wrapped(way, group)
        there.append(there_when_blocks_run(again) if way.gather else [])
        again.register_comm_hook(group, hook)
        assert torch.equal(torch.stack(list(plain(again, optimizer, 3))), expected), way
        assert len(called) == 3 * len(again.reducer.buckets) and len(set(called)) == len(
            again.reducer.buckets
        )
        if way.gather:
            assert there[0] == there[1] and len(there[0]) == 3 * 2 * LAYERS


def hook_of_many_calls(group: dist.ProcessGroup) -> None:
    """PowerSGD's collectives follow each other from other threads; gathers come between buckets."""
    for way in WAYS:
        model, optimizer = wrapped(way, group)
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found = torch.stack(list(plain(model, optimizer, 6)))
        expected = losses(way, group)[:6]
        assert torch.allclose(found, expected, rtol=0.1) and not torch.equal(found, expected)
        assert state.error_dict, "nothing was compressed"
        model.check_parameters()


# Averages of weights.


def averaged_weights(group: dist.ProcessGroup) -> None:
    """torch's AveragedModel of the module is whole on each rank, as with DDP; of the wrapper: refused."""
    states = []
    for way in (Way("replicate"), *WAYS):
        model, optimizer = wrapped(way, group)
        whole = model.gathered if way.strategy != "replicate" else contextlib.nullcontext
        if way.gather:
            with pytest.raises(RuntimeError, match=r"parameter .* is freed.*`with model.gathered\(\)"):
                AveragedModel(model.module)
        if way.strategy != "replicate":
            with pytest.raises(RuntimeError, match=r"a sharded model cannot be copied.* copy model.module"):
                AveragedModel(model)
        with whole():
            averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            list(plain(model, optimizer, step))
            with whole():
                averaged.update_parameters(model.module)
        with torch.no_grad():
            before = model.sharding.gathering.most_bytes if way.gather else 0
            loss = loss_of(averaged, 7)
            assert not way.gather or before == model.sharding.gathering.most_bytes
        if way.gather:
            assert_freed(model)
        states.append([*(each.detach() for each in averaged.parameters()), loss])
    assert len(states[0]) > LAYERS
    for state in states[1:]:
        assert all(torch.equal(one, other) for one, other in zip(state, states[0], strict=True))


def made_of_whole_parameters(group: dist.ProcessGroup) -> None:
    """The lines of docs/sharding.md: gradients by torch.autograd.grad, cut for this rank's parts."""
    model, optimizer = wrapped(Way("replicate"), group)
    list(plain(model, optimizer, 3))
    usual = torch.cat([each.flatten() for each in model.state_dict().values()])
    for way in (Way("replicate"), *WAYS):
        model, optimizer = wrapped(way, group)
        for step in range(3):
            with model.gathered():
                named = dict(model.module.named_parameters())
                gradients = torch.autograd.grad(loss_of(model, step), list(named.values()))
            whole = dict(zip(named, gradients, strict=True))
            for gradient in whole.values():
                gradient.div_(group.size())
                dist.all_reduce(gradient, group=group)
            for name, parameter in model.module.named_parameters():
                parameter.grad = whole[name] if way.strategy == "replicate" else None
            for part in model.parts:
                gradient = whole[part.name].flatten()[part.start : part.stop]
                part.parameter.grad = gradient.view_as(part.parameter)
            optimizer.step()
            optimizer.zero_grad()
        state = torch.cat([each.flatten() for each in model.state_dict().values()])
        torch.testing.assert_close(state, usual, rtol=1e-5, atol=1e-6)


def sharpness_aware(group: dist.ProcessGroup) -> None:
    """The lines of docs/sharding.md: a step by the gradient at the worst place nearby, alike in each way."""
    found = []
    for way in (Way("replicate"), *WAYS):
        model, optimizer = wrapped(way, group)
        for step in range(4):
            loss_of(model, step).backward()
            scale = 0.05 / (model.gradient_norm() + 1e-12)
            parts = [p for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
            before = [part.detach().clone() for part in parts]
            dist.barrier(group)
            for part in parts:
                part.detach().add_(part.grad * scale)
            model.take_over_masters()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            dist.barrier(group)
            for part, kept in zip(parts, before, strict=True):
                part.detach().copy_(kept)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([each.flatten() for each in model.state_dict().values()]))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-6, atol=1e-7)
    model, optimizer = wrapped(Way("replicate"), group)
    list(plain(model, optimizer, 4))
    usual = torch.cat([each.flatten() for each in model.state_dict().values()])
    assert (usual - found[0]).abs().max() > 1e-5


# Models on several hosts.


def hybrid_models(group: dist.ProcessGroup) -> None:
    """Frozen, tied and checkpointed parameters: the same bits whether they are gathered or whole."""
    makes: list[Callable[[], nn.Module]] = [
        partly_frozen, lambda: Small(tied=True),
        lambda: Small(reentrant=False), lambda: Small(reentrant=True),
    ]  # fmt: skip
    with two_hosts(group) as mesh:
        for make in makes:
            found = []
            for strategy in ("hybrid_zero2", "hybrid"):
                inner = made(make)
                frozen = {n: p.detach().clone() for n, p in inner.named_parameters() if not p.requires_grad}
                model, optimizer = parallelize(inner, adamw(inner), strategy, mesh)
                found.append(torch.stack(list(plain(model, optimizer, 3))))
                state = model.state_dict()
                assert all(torch.equal(state[f"module.{name}"], each) for name, each in frozen.items())
            assert torch.equal(*found) and not torch.equal(found[0][0], found[0][1])
            whole, optimizer = wrapped(Way("replicate"), group, make)
            assert torch.allclose(torch.stack(list(plain(whole, optimizer, 3))), found[0], rtol=1e-4)


# Loops that would not train.


def two_layers() -> Any:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16))


def late_groups(group: dist.ProcessGroup) -> None:
    """A parameter that an optimizer gets after parallelize has no part which it could step."""
    for way in WAYS:
        inner = two_layers()
        inner.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
        optimizer = torch.optim.SGD([inner[0].weight], lr=0.1)
        model, _ = parallelize(inner, optimizer, way.strategy, mesh_of(group), gather=way.gather)
        cases: list[tuple[Any, str]] = [
            (list(inner[1].parameters()), "1.weight"),
            (iter(inner[1].named_parameters()), "1.weight"),
            (inner.frozen, "frozen"),
            ([nn.Parameter(torch.ones(2, 3))], "of shape [2, 3], none of the model's,"),
        ]
        for given, name in cases:
            with pytest.raises(ValueError) as caught:
                optimizer.add_param_group({"params": given, "lr": 0.2})
            assert str(caught.value) == (
                f"parameter {name} is given to SGD after parallelize, and its gradient would not come here: "
                "give it before parallelize, wanting a gradient. To train it later only, freeze it after "
                "parallelize, and thaw it in its turn"
            )
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0]["params"].append(inner[1].weight)
        with pytest.raises(ValueError, match=r"parameter 1\.weight is given to SGD after parallelize"):
            optimizer.step()
        del model  # as long as its optimizer


def old_gradients(group: dist.ProcessGroup) -> None:
    """Backward says so, once, when it adds to what was stepped with; not while gradients are accumulated."""

    def through_parameters(model: Any, optimizer: Any) -> None:
        for each in model.parameters():
            each.grad = None

    ways: list[tuple[Callable[[Any, Any], object], int]] = [
        (through_parameters, 1),
        (lambda model, optimizer: model.module.zero_grad(), 1),
        (lambda model, optimizer: model.zero_grad(), 0),
        (lambda model, optimizer: optimizer.zero_grad(), 0),
        (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), 0),
    ]
    for way, (zero, expected) in product(WAYS, ways):
        inner = two_layers()
        model, optimizer = wrap(inner, group, way.strategy, gather=way.gather)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                zero(model, optimizer)
                for _ in range(2):
                    model(torch.ones(2, 16)).mean().backward()
                optimizer.step()
        said = [str(each.message) for each in caught if "zero_grad" in str(each.message)]
        assert all(each.filename == __file__ for each in caught), caught
        assert len(said) == expected, (way, said)
        for text in said:
            assert text == (
                "backward adds to gradients that an optimizer has stepped with: call optimizer.zero_grad() "
                "or model.zero_grad() in each step. parameter.grad = None and model.module.zero_grad() do "
                "not reach the parts of a sharded model, which hold its gradients"
            )


def write_as_allowed(model: Any, inner: Any, step: Callable[[], None]) -> None:
    step()
    with torch.no_grad(), model.gathered(write=True):
        inner[1].weight.mul_(0.5)
    step()
    model.load_state_dict(model.state_dict())
    step()


def written_in_common(group: dist.ProcessGroup) -> None:
    """Into zero3's parameters, one memory for all ranks, each would write on top of the others."""
    inner = two_layers()
    model, optimizer = wrap(inner, group, gather=False)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 16)).mean().backward()
        optimizer.step()

    write_as_allowed(model, inner, step)
    with model.join():
        pass
    step()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    dist.barrier(group)
    model(torch.ones(2, 16)).mean().backward()
    for change in (optimizer.step, model.take_over_masters):
        with pytest.raises(RuntimeError) as caught, model.gathered(write=True):
            change()
        assert str(caught.value) == (
            "an optimizer's step, or a load from a checkpoint, inside of gathered(write=True): what is there "
            "would take its place; do it behind the `with`"
        )
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    dist.barrier(group)
    with torch.no_grad():
        inner[1].weight.mul_(0.5)
    with pytest.raises(RuntimeError) as caught:
        step()
    assert str(caught.value) == (
        "parameter 1.weight was written into, and the ranks of this host have its memory in common, so that "
        "each of them changed what the others had written: do it inside of `with model.gathered(write=True):`"
    )
    with pytest.raises(RuntimeError, match=r"1.weight was written into, and the ranks of this host"):
        model.take_over_masters()  # else it would pass for new values of the parts


def given_other_memory(group: dist.ProcessGroup) -> None:
    """In `gathered(write=True)` that is a write as any other: peft merges and unmerges some adapters so."""
    for way in (Way("replicate"), *WAYS):
        found = []
        for other_memory in (False, True):
            inner = two_layers()
            inner[0].requires_grad_(False)
            model, optimizer = wrap(inner, group, way.strategy, gather=way.gather)
            with torch.no_grad(), model.gathered(write=True):
                for each in (inner[0].weight, inner[1].weight):
                    if other_memory:
                        each.data = each.data * 0.5
                    else:
                        each.mul_(0.5)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 16)).mean().backward()
                optimizer.step()
            found.append([each.clone() for each in model.state_dict().values()])
            dist.barrier(group)
        assert all(map(torch.equal, *found)), way


def written_by_data(group: dist.ProcessGroup) -> None:
    """What is in no version is seen by each rank, in the part that it has itself."""
    for frozen in (False, True):
        inner = two_layers()
        inner[0].requires_grad_(not frozen)
        model, optimizer = wrap(inner, group, gather=False)

        def step(value: float, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.full((2, 16), value)).mean().backward()
            optimizer.step()

        for value in (1.0, math.nan, 1.0):  # NaN stays what it is
            step(value)
        with torch.no_grad(), model.gathered(write=True):
            for each in inner.parameters():
                each.fill_(1.0)
        dist.barrier(group)
        for each in inner[0].parameters() if frozen else inner.parameters():
            each.data.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"parameter .* was written into, and the ranks of this host"):
            step(1.0)
        dist.barrier(group)


def read_in_a_closure(group: dist.ProcessGroup) -> None:
    """What it reads when all gradients are there no rank has stepped yet, and all of it the next one sees."""
    model, optimizer = wrap(two_layers(), group, gather=False)
    before = model.module[1].weight.detach().clone()

    def closure() -> torch.Tensor:
        model(torch.ones(2, 16)).mean().backward()
        if group.rank() == 1:
            time.sleep(0.05)
        seen: torch.Tensor = model.module[1].weight.detach().clone()
        return seen

    for given, named in (((closure,), {}), ((), {"closure": closure})):
        optimizer.zero_grad()
        assert torch.equal(optimizer.step(*given, **named), before)
        dist.barrier(group)
        assert not torch.equal(model.module[1].weight, before)
        before = model.module[1].weight.detach().clone()
        dist.barrier(group)


class Summands(nn.Module):
    """Its loss has the gradient 1 for each element: of `always`, or of `first` too."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = (nn.Parameter(torch.zeros(5)) for _ in range(2))

    def forward(self, both: bool) -> torch.Tensor:
        return self.always.sum() + (self.first.sum() if both else 0)


def added_up_in_fp32(group: dist.ProcessGroup) -> None:
    """Micro-batches in no_sync, if gradients are reduced in fp32: bf16 cannot add 1 to 256."""
    before = (256.0, 1.0, 1.0)
    for way in WAYS:
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        model, optimizer = wrapped(way, group, Summands, precision=precision)
        inner = model.module
        for _ in range(2):
            for scale in before:
                with model.no_sync():
                    (scale * model(group.rank() == 0)).backward()
            model(False).backward()
            expected = {"always": sum(before) + 1, "first": sum(before) / 2}
            for part in model.sharding.parts:
                assert part.parameter.grad.dtype == torch.float32
                assert set(part.parameter.grad.tolist()) <= {expected[part.name]}, (way, part.name)
            optimizer.zero_grad()
        for scale in before:  # the first one around the wrapper, which does not see it begin
            with model.no_sync(), model.gathered():
                (scale * (inner if scale > 1 else model)(True)).backward()
        assert inner.first.grad.dtype == torch.float32 and set(inner.first.grad.tolist()) == {sum(before)}
        optimizer.zero_grad()
        assert inner.first.grad is None


class Unit(nn.Module):
    """Adds the sum of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        return before + self.weight.sum()


def divided_in_reduce(group: dist.ProcessGroup) -> None:
    """By a divisor of as many bits, in the first backward too, when most buckets have no memory so far."""
    gradient = 255 / 128
    for way in WAYS:
        model, _ = wrapped(
            way, group, lambda: nn.Sequential(Unit(), Unit(), Unit()),
            precision=MixedPrecision(reduce=torch.float64), average="samples", bucket_cap_mb=16 / 2**20,
        )  # fmt: skip
        for _ in range(2):
            loss = gradient * model(torch.zeros(()))
            model.weigh(loss, 3 + group.rank()).backward()  # of 7 samples: fp32 has 1 / 7 only nearly
            for part in model.parts:
                assert set(part.parameter.grad.tolist()) == {gradient}, (way, part.name)
            model.zero_grad()


def written_beside_masters(group: dist.ProcessGroup) -> None:
    """Into parameters that the next step fills again from its masters."""
    for way in WAYS[:2]:
        inner = two_layers()
        precision = MixedPrecision(param=torch.bfloat16)
        model, optimizer = wrap(inner, group, way.strategy, precision=precision)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 16, dtype=torch.bfloat16)).mean().backward()
            optimizer.step()

        write_as_allowed(model, inner, step)
        with torch.no_grad():
            inner[1].weight.clamp_(-0.01, 0.01)
        with pytest.raises(RuntimeError) as caught:
            step()
        assert str(caught.value) == (
            "parameter 1.weight was written into, and the optimizer steps a master copy of it, from which "
            "the next step would fill it again: do it inside of `with model.gathered(write=True):`, or by "
            "model.load_state_dict"
        )
        with pytest.raises(RuntimeError, match=r"parameter 1.weight was written into, and the optimizer"):
            model.take_over_masters()  # it would fill it again
        model, optimizer = wrap(two_layers(), group, way.strategy)  # what steps the parameters themselves
        with torch.no_grad():
            model.module[1].weight.clamp_(-0.01, 0.01)
        model(torch.ones(2, 16)).mean().backward()
        optimizer.step()


def other_rates(group: dist.ProcessGroup) -> None:
    """Each rank would step its part by a rate of its own, and those that keep whole parameters would part."""
    rank = group.rank()
    for way in (Way("replicate"), *WAYS):
        model, optimizer = wrapped(way, group)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for number, losses in enumerate(([1.0, 1.0], [2.0, 2.0], [3.0, 0.5])):
            assert len(list(plain(model, optimizer, 1))) == 1, f"step {number}: the rates are the same"
            scheduler.step(losses[rank])
        with pytest.raises(MismatchError) as caught:
            loss_of(model, 3).backward()
        rates = ["0.0025 on rank 0", "0.005 on rank 1"]
        assert str(caught.value) == (
            f"the ranks' learning rates differ, in parameter group 0: {', '.join(rates)}. Give a scheduler "
            "that looks at a loss, as ReduceLROnPlateau does, the same one on all ranks: the mean of theirs"
        )
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.zero_grad()
        assert len(list(plain(model, optimizer, 1))) == 1, "a loop that mends it goes on"


def rates_of_one_that_has_ended(group: dist.ProcessGroup) -> None:
    """It steps no scheduler any more."""
    for way in (Way("replicate"), *WAYS[:2]):
        model, optimizer = wrapped(way, group)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with model.join():
            for _ in plain(model, optimizer, 2 + 2 * group.rank()):
                scheduler.step()


def parts_by_data(group: dist.ProcessGroup) -> None:
    """A Lookahead around the optimizer that was divided: no other rank gets what it writes, uncounted.

    What all ranks write into whole parameters is no error, and neither is a rank's noise that it takes back.
    """
    for way in WAYS[:2]:
        model, optimizer = wrapped(way, group)
        for number in range(3):
            for parameter in model.module.parameters():
                parameter.data.clamp_(-0.01 / (number + 1), 0.2)  # some elements of some parts
            kept = [each.detach().clone() for each in model.module.parameters()]
            noise = torch.Generator().manual_seed(group.rank())
            for parameter in model.module.parameters():
                parameter.data += 1e-4 * torch.randn(parameter.shape, generator=noise)
            loss_of(model, number).backward()
            for parameter, before in zip(model.module.parameters(), kept, strict=True):
                parameter.data.copy_(before)
            optimizer.step()
            optimizer.zero_grad()
        slow = [each.detach().clone() for group_ in optimizer.param_groups for each in group_["params"]]
        assert len(list(plain(model, optimizer, 2))) == 2
        parts = [each for group_ in optimizer.param_groups for each in group_["params"]]
        for part, before in zip(parts, slow, strict=True):
            part.data.copy_(before + 0.5 * (part.data - before))
        with model.no_sync():
            loss_of(model, 3).backward()
        with pytest.raises(MismatchError) as caught:
            loss_of(model, 3).backward()
        assert re.fullmatch(
            r"the ranks' parameters differ, in an element: \S+ of (\S+) on rank 0, \S+ of \1 on rank 1. "
            "Something wrote by `.data` into this rank's part, outside of its optimizer's step, and the "
            "others do not have that: give imece.parallelize the outermost optimizer, such as a Lookahead; "
            r"or call imece.barrier\(\) before it and model.take_over_masters\(\) after it, on all ranks",
            str(caught.value),
        )
        optimizer.zero_grad()
        model.take_over_masters()
        assert len(list(plain(model, optimizer, 1))) == 1, "a loop that mends it goes on"


CHECKS: dict[str, Check] = {
    "parts by data": parts_by_data,
    "other rates": other_rates,
    "rates of one that has ended": rates_of_one_that_has_ended,
    "late groups": late_groups,
    "old gradients": old_gradients,
    "written in common": written_in_common,
    "given other memory": given_other_memory,
    "read in a closure": read_in_a_closure,
    "written by data": written_by_data,
    "added up in fp32": added_up_in_fp32,
    "divided in reduce": divided_in_reduce,
    "written beside masters": written_beside_masters,
    "hooked": hooked,
    "hook of many calls": hook_of_many_calls,
    "averaged weights": averaged_weights,
    "hybrid models": hybrid_models,
    "frozen in bf16": frozen_in_bf16,
    "inputs in bf16": inputs_in_bf16,
    "made of whole parameters": made_of_whole_parameters,
    "sharpness aware": sharpness_aware,
    "buffers": buffers,
    "buffers from meta": buffers_from_meta,
    "rounds once": rounds_once,
    "trains as fp32": trains_as_fp32,
    "sends half": sends_fewer_bytes,
    "refused options": refused_options,
    "hybrid wire": hybrid_wire,
}
JOBS = [
    *jobs(__name__, ["rounds once", "trains as fp32"], (2, "shm"), (2, "gloo")),
    *jobs(__name__, ["sends half", "refused options", "buffers", "buffers from meta"], (2, "gloo")),
    *jobs(__name__, ["added up in fp32", "divided in reduce"], (2, "shm"), (2, "gloo")),
    *jobs(__name__, ["other rates", "rates of one that has ended", "parts by data"], (2, "shm"), (2, "gloo")),
    *slow(jobs(__name__, ["rounds once", "sends half"], (3, "gloo"))),
    *jobs(__name__, ["hooked", "hook of many calls", "averaged weights"], (2, "gloo")),
    *jobs(__name__, ["late groups", "old gradients", "frozen in bf16", "inputs in bf16"], (2, "gloo")),
    *jobs(
        __name__,
        ["averaged weights", "written in common", "written by data", "written beside masters"],
        (2, "shm"),
    ),
    *jobs(__name__, ["given other memory"], (2, "shm"), (2, "gloo")),
    *jobs(__name__, ["read in a closure"], (2, "shm")),
    *jobs(__name__, ["sharpness aware", "made of whole parameters"], (2, "shm"), (2, "gloo")),
    *jobs(__name__, ["hybrid wire", "hybrid models"], (4, "gloo")),
]


@pytest.mark.parametrize("job", JOBS)
def test_sharded_options(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_norm_takes_fp64_for_a_piece_of_a_gradient_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [torch.randn(7, 11, requires_grad=True, dtype=dtype), torch.randn(4, 6, dtype=dtype).t()]
    expected = sum(each.detach().to(torch.complex128).abs().square().sum().item() for each in gradients)
    taken = []

    def vector_norm(tensor: torch.Tensor, *order: float, **options: Any) -> Any:
        taken.append(tensor.numel())
        return whole(tensor, *order, **options)

    whole = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", vector_norm)
    monkeypatch.setattr(norm, "_PIECE_ON_CPU", 32)
    assert norm_of(gradients, torch.device("cpu")).item() == pytest.approx(math.sqrt(expected), rel=1e-14)
    assert taken == [32, 32, 13, 3, 24, 2]


def test_norm_of_gradients_on_several_devices() -> None:
    """As of a module whose layers are on two GPUs."""
    with FakeTensorMode():
        gradients = [torch.ones(3, device=f"cuda:{number}") for number in (1, 0)]
        assert norm_of(gradients, torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_norm_of_complex_gradients() -> None:
    tensors = [torch.tensor([3 + 4j, 0]), torch.tensor([12.0]), torch.tensor([84j]).conj()]
    assert norm_of(tensors, torch.device("cpu")).item() == 85.0
    assert torch.nn.utils.get_total_norm(tensors).item() == 85.0
