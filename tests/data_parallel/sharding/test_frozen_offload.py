"""Frozen parameters with offload: the same bits, and memory where it should be.

The stand-in for the host's memory, with copies made as late as possible, is that of test_offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import MixedPrecision
from imece.checkpoint import TrainingState
from imece.data_parallel.footprint import counted, expected
from imece.data_parallel.sharding.offload import pinned_bytes
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.data_parallel.sharding.blocks import Small, loss_of, two_hosts, units_of
from tests.data_parallel.sharding.test_frozen import (
    adamw,
    adapted,
    in_checkpoints,
    single_parameters,
    whole_modules,
)
from tests.data_parallel.sharding.test_offload import (
    HALF,
    HYBRIDS,
    WAYS,
    Way,
    all_of,
    clipped,
    host_of,
    same_bits,
    wrap,
)

GATHERED = tuple(way for way in WAYS if way.strategy == "zero3")  # zero1 and zero2 leave them whole


def frozen_written(model: Any, optimizers: Sequence[Optimizer], steps: int) -> Iterator[torch.Tensor]:
    """Between steps what is frozen is written, and loaded."""
    for step in range(steps):
        with model.gathered(write=True), torch.no_grad():
            model.module.first.weight.mul_(0.5)
        loss = loss_of(model, step)
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        if step == 1:
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        yield loss.detach()


def same(make: Callable[[], nn.Module], **options: Any) -> Check:
    return same_bits(make=adamw, build=make, **{"ways": GATHERED} | options)


def same_on_two_hosts(group: dist.ProcessGroup) -> None:
    with two_hosts(group) as mesh:
        same(whole_modules, ways=HYBRIDS, mesh=mesh)(group)


def memories(group: dist.ProcessGroup) -> None:
    """A rank's part of what is frozen lies in the host's memory with "parameters" alone, once."""
    for way in GATHERED:
        for precision in (None, HALF):
            model, optimizers, offload = wrap(way, group, adamw, build=adapted, precision=precision)
            list(clipped(model, optimizers, 2))
            host, sharding = host_of(offload), model.sharding
            assert sharding.frozen
            for store in sharding.frozen:
                assert store.own is store.master and store.gradient is None
                assert host.has(store.own) == (way.offload == "parameters")
                assert not host.has(store.parameters)
                assert all(host.has(part.parameter) == host.has(store.own) for part in store.parts)
                assert store.parameters.untyped_storage().nbytes() == 0
            assert not any(host.has(flat.full) for unit in units_of(model) for flat in unit.flats)


def bytes_of_memories(group: dist.ProcessGroup) -> None:
    """Predicted and counted, and by hand from the storages; and in pinned memory, a power of two of each."""
    for way in GATHERED:
        for precision in (None, MixedPrecision(torch.bfloat16, torch.bfloat16)):
            model, optimizers, offload = wrap(way, group, adamw, build=adapted, precision=precision)
            sharding, pieces = model.sharding, host_of(offload).pieces
            for takes in (int, pinned_bytes):
                sharding.offload = replace(sharding.offload, takes=takes)
                said = expected(model, optimizers)
                list(clipped(model, optimizers, 2))
                loss_of(model, 1).backward()
                found = counted(model, optimizers)
                state = sum(
                    value.nbytes
                    for kept in optimizers[0].state.values()
                    for value in kept.values()
                    if value.ndim
                )
                frozen = sum(store.own.nbytes for store in sharding.frozen)
                trained = sum(store.own.nbytes for store in sharding.stores)
                on_device = 0 if way.offload == "parameters" else frozen + trained
                assert said is not None and said.parameters == found.parameters == on_device, way
                scalars = 4 * len(sharding.parts)
                held = state + sum(takes(each.nbytes) for each in pieces)
                assert found.host == pytest.approx(held, abs=scalars), way
                padding = 2 * sum(store.master.nbytes for store in sharding.stores)
                padding -= 2 * sum(part.parameter.nbytes for part in sharding.parts)
                assert said.host == pytest.approx(found.host, abs=scalars + padding), way


def checkpoints(group: dist.ProcessGroup) -> None:
    """What is frozen goes from any way into any other, and training on to the same bits."""
    model, optimizers, _ = wrap(GATHERED[0], group, adamw, build=single_parameters, offload=None)
    list(frozen_written(model, optimizers, 2))
    kept = all_of(model_state(model, optimizers), group)
    assert "model/head.weight" in kept.names()
    wanted = torch.stack(list(clipped(model, optimizers, 2)))
    for way in (*GATHERED, replace(GATHERED[0], offload=None)):
        model, optimizers, _ = wrap(way, group, adamw, build=single_parameters)
        with torch.no_grad():
            loss_of(model, 0)  # what came up for it must not be what is loaded
        TrainingState(model, optimizers).load(kept)
        again = all_of(model_state(model, optimizers), group)
        for name in kept.names():
            assert torch.equal(again.tensor(name), kept.tensor(name)), f"{way}: {name}"
        assert torch.equal(torch.stack(list(clipped(model, optimizers, 2))), wanted), way


def model_state(model: Any, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    state = TrainingState(model, optimizers)
    return {**state.own(), **state.still()}


def regrouped(group: dist.ProcessGroup) -> None:
    """Other ranks go on with it, from parts that each had."""
    for way in GATHERED:
        losses = []
        for offload in (None, way.offload):
            model, optimizers, made = wrap(replace(way, offload=offload), group, adamw, build=adapted)
            list(clipped(model, optimizers, 1))
            kept, other = all_of(model_state(model, optimizers), group), dist.new_group()
            model.regroup(cast(Any, other))
            TrainingState(model, optimizers).load(kept)
            losses.append(torch.stack(list(clipped(model, optimizers, 2))))
            if made is not None:
                at_home = {host_of(made).has(part.parameter) for part in model.frozen_parts}
                assert at_home == {way.offload == "parameters"}
            model.leave()
            dist.destroy_process_group(other)
        assert torch.equal(*losses), way


def through(group: dist.ProcessGroup) -> None:
    """The gradient of what lies before frozen modules is that of one process, to the last bits."""
    way = Way("zero3", "parameters")

    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)

    model, (optimizer,), _ = wrap(way, group, sgd, build=whole_modules)
    alone = cast(Small, wrap(Way("replicate", None), group, sgd, build=whole_modules)[0].module)
    before = {name: each.detach().clone() for name, each in alone.named_parameters()}
    loss_of(model, 0).backward()
    optimizer.step()
    moved = model.state_dict()
    loss_of(alone, 0).backward()
    for name, each in alone.named_parameters():
        if each.grad is None:
            assert torch.equal(moved[f"module.{name}"], before[name]), name
        else:
            mean = each.grad.clone()
            dist.all_reduce(mean, group=group)
            torch.testing.assert_close(moved[f"module.{name}"], before[name] - mean / group.size())
    assert alone.first.weight.grad is not None and bool(alone.first.weight.grad.any())


CHECKS: dict[str, Check] = {
    "adapters": same(adapted),
    "whole modules": same(whole_modules),
    "single parameters, half": same(single_parameters, precision=HALF),
    "in checkpoints": same(in_checkpoints(False)),
    "one in flight": same(whole_modules, gathers_in_flight=1),
    "reshard late": same(whole_modules, reshard_after_forward=False),
    "written": same(adapted, train=frozen_written),
    "two hosts": same_on_two_hosts,
    "memories": memories,
    "bytes": bytes_of_memories,
    "checkpoints": checkpoints,
    "regrouped": regrouped,
    "through": through,
}
QUICK = ["adapters", "single parameters, half", "written", "memories", "bytes", "checkpoints", "through"]
JOBS = jobs(__name__, QUICK, (2, "gloo"))
LONG_JOBS = [
    *jobs(__name__, [name for name in CHECKS if name not in (*QUICK, "two hosts")], (2, "gloo")),
    *jobs(__name__, ["whole modules", "checkpoints", "regrouped"], (2, "shm")),
    *jobs(__name__, ["two hosts"], (4, "gloo")),
]


@pytest.mark.parametrize("job", JOBS + slow(LONG_JOBS))
def test_frozen_offload(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
