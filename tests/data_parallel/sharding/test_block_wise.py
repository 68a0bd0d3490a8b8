"""8-bit optimizers on parts that end at block borders, so that sharded runs have the bits of whole ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from imece import layout
from tests.data_parallel.checks import Check, Job, jobs, passed
from tests.data_parallel.sharding.blocks import mesh_of, wrap
from tests.data_parallel.test_sharded_options import SHARDED, Way

BLOCK = 256
WAYS = (*(Way(each) for each in SHARDED), Way("zero3", gather=True))
Make = Callable[[nn.Module], Optimizer]


class Wide(nn.Module):
    """Tensors with a last block that is full, one that is not, and some too small for blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 135)  # 4185 elements
        self.up, self.down = nn.Linear(135, 128, bias=False), nn.Linear(128, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.down(self.up(self.embed(tokens)).tanh())))  # type: ignore[no-any-return]


def bitsandbytes(model: nn.Module) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=3e-3, weight_decay=0.1)  # type: ignore[no-any-return]


def torchao(model: nn.Module) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=3e-3, weight_decay=0.1)  # type: ignore[no-any-return]


def made() -> Wide:
    torch.manual_seed(3)
    return Wide()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(31, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(tokens).view(-1, 32), tokens.view(-1))


def train(model: Any, optimizer: Any, steps: range, rank: int) -> torch.Tensor:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def wrapped(way: Way, group: dist.ProcessGroup, make: Make) -> Any:
    return wrap(made(), group, way.strategy, gather=way.gather, make=make)


def kept(optimizer: Any) -> list[torch.Tensor]:
    """What is as large as a part, of all parts."""
    return [
        value
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim and value.numel() == parameter.numel()
    ]


def is_8bit(value: torch.Tensor) -> bool:
    return value.dtype == torch.uint8 or type(value) is not torch.Tensor


def quantised_here(optimizer: Any) -> int:
    """Elements of state."""
    return sum(each.numel() for each in kept(optimizer) if is_8bit(each))


def quantised_on_all(optimizer: Any, group: dist.ProcessGroup) -> int:
    count = torch.tensor(quantised_here(optimizer))
    dist.all_reduce(count, group=group)
    return int(count)


def interpreted() -> Any:
    """torchao compiles its step for each shape, which takes longer than all the rest."""
    return mock.patch.object(torch, "compile", lambda function, **_: function)


def trains(make: Make) -> Check:
    """The bits of replicate, in which states are whole; nearly the losses of one process; and in 8 bits."""

    def check(group: dist.ProcessGroup) -> None:
        with interpreted():
            alone, optimizer = made(), None
            optimizer = make(alone)
            expected = []
            for step in range(12):
                optimizer.zero_grad()
                losses = [loss_of(alone, step, rank) for rank in range(group.size())]
                (sum(losses) / group.size()).backward()  # type: ignore[union-attr]
                optimizer.step()
                expected.append(losses[group.rank()].detach())
            whole, optimizer = wrapped(Way("replicate"), group, make)
            replicate = train(whole, optimizer, range(12), group.rank())
            assert torch.allclose(replicate, torch.stack(expected), rtol=1e-3)
            assert replicate[-1] < replicate[0] - 0.1
            quantised = quantised_here(optimizer)
            assert quantised > 16_000
            for way in WAYS:
                model, optimizer = wrapped(way, group, make)
                assert torch.equal(train(model, optimizer, range(12), group.rank()), replicate), way
                assert quantised_on_all(optimizer, group) == quantised, way

    return check


def goes_on(make: Make) -> Check:
    """From the state dicts of model and optimizer, to the same bits."""

    def check(group: dist.ProcessGroup) -> None:
        with interpreted():
            for way in WAYS:
                model, optimizer = wrapped(way, group, make)
                train(model, optimizer, range(3), group.rank())
                states = {name: each.clone() for name, each in model.state_dict().items()}
                saved = io.BytesIO()  # torchao's tensors have no other way to be copied
                torch.save(optimizer.state_dict(), saved)
                expected = train(model, optimizer, range(3, 7), group.rank())
                again, made_again = wrapped(way, group, make)
                again.load_state_dict(states)
                saved.seek(0)
                made_again.load_state_dict(torch.load(saved))
                assert torch.equal(train(again, made_again, range(3, 7), group.rank()), expected), way

    return check


def regrouped(make: Make) -> Check:
    """Parts that are cut anew are quantised as before."""

    def check(group: dist.ProcessGroup) -> None:
        with interpreted():
            for way in WAYS:
                model, optimizer = wrapped(way, group, make)
                train(model, optimizer, range(1), group.rank())
                before = quantised_on_all(optimizer, group)
                model.regroup(mesh_of(group))
                assert not kept(optimizer)
                train(model, optimizer, range(1), group.rank())
                assert quantised_on_all(optimizer, group) == before > 0, way

    return check


def has_stepped(make: Make) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        with interpreted():
            model = made()
            optimizer = make(model)
            train(model, optimizer, range(1), 0)
            with pytest.raises(ValueError, match=r"AdamW8bit has stepped before, .*before its first step"):
                wrap(model, group, "zero2", make=lambda _: optimizer)

    return check


def told_of_one_parameter(group: dist.ProcessGroup) -> None:
    """bitsandbytes keeps what the user says of one parameter by its id, or by its place."""
    from bitsandbytes.optim import GlobalOptimManager

    told = GlobalOptimManager.get_instance()

    def make(model: Any) -> Optimizer:
        optimizer = bitsandbytes(model)
        told.override_config(model.up.weight, "optim_bits", 32)
        told.register_parameters(optimizer.param_groups)
        told.register_module_override(model.embed, "weight", {"optim_bits": 32})
        return optimizer

    for way in WAYS:
        model, optimizer = wrapped(way, group, make)
        train(model, optimizer, range(1), group.rank())
        for part in model.sharding.parts:
            expected = part.name == "down.weight"
            assert is_8bit(optimizer.state[part.parameter]["state1"]) == expected, f"{way}: {part.name}"
        told.initialize()


CHECKS: dict[str, Check] = {
    f"{make.__name__}: {name}": check(make)
    for make in (bitsandbytes, torchao)
    for name, check in {
        "trains": trains,
        "goes on": goes_on,
        "regrouped": regrouped,
        "has stepped": has_stepped,
    }.items()
} | {"bitsandbytes: told of one parameter": told_of_one_parameter}


@pytest.mark.parametrize(
    "job",
    jobs(__name__, CHECKS, (2, "shm"))
    + jobs(__name__, [each for each in CHECKS if "trains" in each], (3, "shm")),
)
def test_block_wise(job: Job, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(job.name.partition(":")[0])
    passed(job, request)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 40_000))
def test_shards_cut_between_blocks(sizes: list[int], shards: int, cap_bytes: int) -> None:
    items = [layout.Item(f"layer{at}.weight", (size,), "float32", 4) for at, size in enumerate(sizes)]
    built = layout.build(items, cap_bytes=cap_bytes, shards=shards, blocks={0: BLOCK})
    seen = [0] * len(items)
    for bucket in built.buckets:
        for rank in range(shards):
            for part in bucket.parts(*bucket.shard(rank)):
                assert part.item_start == seen[part.item] and part.item_start % BLOCK == 0
                seen[part.item] = part.item_stop
    assert seen == sizes
