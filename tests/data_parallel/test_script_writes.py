"""What a script writes into parameters on some ranks alone, or not alike, is told, with ranks and names."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.data_parallel.same import apart_by_writes
from imece.data_parallel.script_writes import ScriptWrites
from imece.errors import MismatchError
from tests.ranks import run_ranks

WHOLE = ("DistributedDataParallel", "replicate")
WAYS = (*WHOLE, "zero1", "zero2")


def net() -> nn.Sequential:
    torch.manual_seed(1)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), frozen, nn.Linear(4, 2))


def wrap(way: str) -> tuple[Any, torch.optim.Optimizer]:
    module = net()
    optimizer = torch.optim.Adam([each for each in module.parameters() if each.requires_grad], lr=0.1)
    if way == "DistributedDataParallel":
        return imece.DistributedDataParallel(module), optimizer
    model: Any
    model, optimizer = imece.parallelize(module, optimizer, way, dist.group.WORLD)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, after_backward: Callable[[], None]) -> None:
    model(torch.randn(2, 3)).square().sum().backward()
    after_backward()
    optimizer.step()
    optimizer.zero_grad()


def nothing() -> None:
    pass


def load(model: Any) -> None:
    torch.manual_seed(2)
    model.module.load_state_dict(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()
    )


def on_rank_1(do: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda model: do(model) if dist.get_rank() == 1 else None


def head_by_chance(model: Any) -> None:
    torch.manual_seed(dist.get_rank())
    model.module[3].reset_parameters()


def frozen_by_chance(model: Any) -> None:
    torch.manual_seed(dist.get_rank())
    model.module[2].reset_parameters()


APART: dict[str, tuple[Callable[[Any], None], str]] = {
    "one loads": (on_rank_1(load), r"on rank 1, outside of an optimizer's step.*0\.weight"),
    "a head of its own": (
        head_by_chance,
        r"on ranks 0, 1, .*differ: 3\.[a-z]+ on all ranks; 3\.[a-z]+ on all",
    ),
    "frozen": (frozen_by_chance, r"differ: 2\.weight on all ranks; 2\.bias on all ranks \(of 6"),
}


@contextlib.contextmanager
def told(way: str, message: str) -> Iterator[None]:
    """Whole models go on, with a warning of rank 0; what is sharded would be mixed: an error on all."""
    if way not in WHOLE:
        with pytest.raises(MismatchError, match=message):
            yield
    elif dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=message) as caught:
            yield
        assert [each.filename for each in caught] == [__file__], "once, at the script's line"
    else:
        with warnings.catch_warnings(action="error"):
            yield


def refused() -> None:
    for way in WAYS:
        for write, message in APART.values():
            for before_the_step in (False, True) if way in WHOLE else (False,):
                model, optimizer = wrap(way)
                step(model, optimizer, nothing)
                if before_the_step:  # and after backward: sharded, parameters come from their owners then
                    step(model, optimizer, lambda: write(model))  # noqa: B023
                else:
                    write(model)
                with told(way, message):
                    for _ in range(2):
                        step(model, optimizer, nothing)


def sharded_before_the_step() -> None:
    """After it all ranks would have the owners' values, a mixture, and nobody could tell."""
    model, optimizer = wrap("zero1")
    on_rank_1(load)(model)
    before = [each.detach().clone() for each in model.module.parameters()]
    with pytest.raises(MismatchError, match="on rank 1"):
        step(model, optimizer, nothing)
    assert all(map(torch.equal, before, model.module.parameters()))


def accepted() -> int:
    """How often the ranks compared, in all: of what they write in each step once."""
    compared = 0

    def counted(*args: Any, **options: Any) -> str:
        nonlocal compared
        compared += 1
        return apart_by_writes(*args, **options)

    patched = patch("imece.data_parallel.replicate.apart_by_writes", counted)
    patched.start()
    for way in WAYS:
        model, optimizer = wrap(way)
        kept = {name: each.detach().clone() for name, each in model.module.state_dict().items()}
        load(model)  # 1
        for _ in range(2):
            step(model, optimizer, nothing)
        on_rank_1(load)(model)  # 2: an average is put in for a while, and out again
        on_rank_1(lambda model: model.module.load_state_dict(kept))(model)  # noqa: B023
        if dist.get_rank() == 0:
            model.module.load_state_dict(kept)
        for _ in range(4):
            step(model, optimizer, nothing)
            with torch.no_grad():
                model.module[0].weight.clamp_(-0.1, 0.1)  # 3
        step(model, optimizer, nothing)
    patched.stop()
    return compared


def own_neighbourhoods() -> None:
    """Sharpness-aware minimisation in which each rank looks where its own gradient leads: the ranks differ in
    a synchronised forward, and are alike again before the step."""
    models: list[nn.Module] = []
    for wrapper in (imece.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        module, own = net(), torch.Generator().manual_seed(dist.get_rank())
        model: Any = wrapper(module)
        trained = [each for each in module.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(4):  # warnings are errors here
            x = torch.randn(2, 3, generator=own)
            with model.no_sync():
                model(x).square().sum().backward()
            kept = [each.detach().clone() for each in trained]
            with torch.no_grad():
                for each in trained:
                    assert each.grad is not None
                    each.add_(each.grad, alpha=0.05)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for each, before in zip(trained, kept, strict=True):
                    each.copy_(before)
            optimizer.step()
            optimizer.zero_grad()
        models.append(module)
    ours, theirs = (list(each.parameters()) for each in models)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def writes_of_a_script() -> None:
    own_neighbourhoods()
    refused()
    sharded_before_the_step()
    assert accepted() == 3 * len(WAYS)


def test_ranks_that_a_script_lets_differ_are_told() -> None:
    run_ranks(writes_of_a_script, 2, backend="shm")


def test_steps_are_not_the_scripts_writes() -> None:
    module: Any = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    writes = ScriptWrites(module.parameters())
    for _ in range(3):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert not writes.is_unusual()
    with torch.no_grad():
        module[0].weight.mul_(0.5)
    assert writes.is_unusual()
    assert not writes.is_unusual()
