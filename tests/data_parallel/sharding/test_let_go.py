"""Memory as on a GPU, where freed memory is reused at once: the same bits, and less is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece import MixedPrecision
from tests.data_parallel.checks import Check, Job, jobs, passed
from tests.data_parallel.sharding import test_from_meta, test_units
from tests.data_parallel.sharding.blocks import (
    Routed,
    Small,
    accumulated,
    accumulated_in_no_sync,
    loss_of,
    made,
    muon_and_adamw,
    plain,
    wrap,
)
from tests.gpu.fake_world import memory_as_on_a_gpu

Train = Callable[[Any, Any, int], Iterator[torch.Tensor]]


def zeroed_in_place(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=step % 2 == 1)
        yield loss.detach()


def after_one_that_raised(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):

        def stop(_gradient: torch.Tensor) -> None:
            raise RuntimeError("stop")

        handle = model.module.first.weight.register_hook(stop)
        with pytest.raises(RuntimeError, match="stop"):
            loss_of(model, 50 + step).backward()
        handle.remove()
        optimizer.zero_grad()
        yield from plain(model, optimizer, 1)


def after_one_of_several_that_raised(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """It was added to the sums of some buckets, and not of others: nothing goes on with these."""
    for step in range(steps):

        def stop(_gradient: torch.Tensor) -> None:
            raise ArithmeticError

        loss_of(model, 50 + step).backward()
        handle = model.module.first.weight.register_hook(stop)
        with pytest.raises(ArithmeticError):
            loss_of(model, 60 + step).backward()
        handle.remove()
        with pytest.raises(RuntimeError, match=r"a backward that raised .* optimizer\.zero_grad\(\)"):
            optimizer.step() if step % 2 else loss_of(model, 70).backward()
        optimizer.zero_grad()
        yield from plain(model, optimizer, 1)


def zeroed_in_backward(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """When some sums are there and some are not."""
    for step in range(steps):
        handle = model.module.first.weight.register_hook(lambda _: optimizer.zero_grad())
        loss = loss_of(model, step)
        loss.backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def some_replaced(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """Gradients to be added to that are not where they were, and others that are not there."""
    for step in range(steps):
        loss_of(model, 2 * step).backward()
        for at, part in enumerate(model.parts):
            if part.parameter.grad is not None:
                part.parameter.grad = None if at % 3 == 0 else 2 * part.parameter.grad
        loss = loss_of(model, 2 * step + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def same_bits(
    strategy: str, train: Train = plain, make: Callable[[], nn.Module] = Small, **options: Any
) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        states = []
        for goes in (False, True):
            with memory_as_on_a_gpu() if goes else contextlib.nullcontext():
                model, optimizer = wrap(made(make), group, strategy, **options)
            casts = goes and strategy == "zero3" and "precision" in options
            assert all(
                (store.own.dtype != store.parameters.dtype) == casts for store in model.sharding.stores
            )
            for _ in train(model, optimizer, 2):
                kept = [store.gradient for store in model.sharding.stores]
                if train is not zeroed_in_place:
                    assert not goes or kept == [None] * len(kept)
                    assert goes or None not in kept
                assert model.sharding.stores[0].older is None
                assert (model.sharding.memory.nbytes == 0) == (goes and strategy != "zero1")
            states.append(model.state_dict())
        for name, each in states[0].items():
            assert torch.equal(each, states[1][name]), name

    return check


BF16 = MixedPrecision(torch.bfloat16, torch.bfloat16)
CHECKS: dict[str, Check] = {
    "zero1": same_bits("zero1"),
    "zero1, bf16": same_bits("zero1", accumulated, precision=BF16),
    "zero1, accumulated": same_bits("zero1", accumulated),
    "zero2": same_bits("zero2"),
    "zero2, accumulated": same_bits("zero2", accumulated, bucket_cap_mb=1e-3),
    "zero2, some replaced": same_bits("zero2", some_replaced),
    "zero3": same_bits("zero3"),
    "zero3, bf16": same_bits("zero3", accumulated, precision=BF16),
    "zero3, accumulated": same_bits("zero3", accumulated),
    "zero3, in no_sync": same_bits("zero3", accumulated_in_no_sync),
    "zero3, bf16, in no_sync": same_bits("zero3", accumulated_in_no_sync, precision=BF16),
    "zero3, unused": same_bits("zero3", accumulated, Routed),
    "zero3, zeroed in place": same_bits("zero3", zeroed_in_place),
    "zero3, zeroed in backward": same_bits("zero3", zeroed_in_backward),
    "zero2, after one of several that raised": same_bits(
        "zero2", after_one_of_several_that_raised, bucket_cap_mb=1e-3
    ),
    "zero3, after one of several that raised": same_bits("zero3", after_one_of_several_that_raised),
    "zero3, after one that raised": same_bits("zero3", after_one_that_raised),
    "zero3, some replaced": same_bits("zero3", some_replaced),
}


def two_optimizers(group: dist.ProcessGroup) -> None:
    """What one of them has zeroed goes, and the other's stays."""
    with memory_as_on_a_gpu():
        model, optimizer = wrap(made(Small), group, "zero3", make=muon_and_adamw)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer._optimizers[1].zero_grad()
    for store in model.sharding.stores:
        assert (store.gradient is None) == (store.kind == 1)
    model.zero_grad()
    assert all(store.gradient is None for store in model.sharding.stores)
    list(plain(model, optimizer, 1))


def not_copied(group: dist.ProcessGroup) -> None:
    """The next sum takes other memory than the one it is added to, also on a CPU."""
    model, _ = wrap(made(Small), group, "zero2")
    loss_of(model, 0).backward()
    before = [store.gradient for store in model.sharding.stores]
    loss_of(model, 1).backward()
    for store, older in zip(model.sharding.stores, before, strict=True):
        assert older is not None and store.gradient is not None and store.older is None
        assert store.gradient.data_ptr() != older.data_ptr()


def nothing_between(group: dist.ProcessGroup) -> None:
    """What no gradient fills of a bucket is 0, whatever was in its memory."""
    with memory_as_on_a_gpu():
        model, _ = wrap(made(Small), group, "zero3")
    memory, between = model.sharding.memory, 0
    new = memory._new
    memory._new = lambda nbytes, device: new(nbytes, device).fill_(255)  # nan
    for bucket, store in zip(model.sharding.all, model.sharding.stores, strict=True):
        memory.lend(bucket)
        filled = torch.zeros(bucket.flat.numel(), dtype=torch.bool)
        for place in store.plan.places:
            filled[place.start : place.stop] = True
        assert bucket.flat[filled].isnan().all() and not bucket.flat[~filled].any()
        between += int((~filled).sum())
        memory.take_back(bucket)
    assert between


def as_on_a_gpu(check: Check) -> Check:
    """One of other tests."""

    def checked(group: dist.ProcessGroup) -> None:
        with memory_as_on_a_gpu():
            check(group)

    return checked


OTHERS = [
    "half", "masters keep bits", "states", "written", "from meta", "from meta, frozen", "resized",
    "gradient penalty", "failed backward", "unused on some ranks, accumulated",
]  # fmt: skip
THERE = test_units.CHECKS | test_from_meta.CHECKS
CHECKS |= {name: as_on_a_gpu(THERE[name]) for name in OTHERS}
CHECKS |= {
    "two optimizers": two_optimizers, "nothing between": nothing_between, "not copied": not_copied,
}  # fmt: skip


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "gloo")))
def test_let_go(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
