"""torch's own functions on the parameters of a sharded model: they do what they say, or say why not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as by_its_own_name
from torch.nn.utils import clip_grad_value_ as value_by_its_own_name

import imece
from imece.data_parallel import torch_calls
from imece.data_parallel.sharded import ShardedDataParallel
from tests.ranks import run_ranks


def made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    return model


def loss(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    result: torch.Tensor = 10 * model(torch.rand(8, 6, dtype=torch.float64)).square().mean()
    return result


Clip = Callable[[nn.Module, nn.Module], "torch.Tensor | None"]
CLIPS: list[Clip] = [
    lambda whole, _: nn.utils.clip_grad_norm_(whole.parameters(), 0.5),
    lambda _, part: nn.utils.clip_grad_norm_(part.get_submodule("2").parameters(), 0.25),
    lambda _, part: nn.utils.clip_grad_norm_(part.get_parameter("0.weight"), max_norm=0.1, norm_type=2),
    lambda whole, _: nn.utils.clip_grad_value_(whole.parameters(), 0.01),
    lambda _, part: nn.utils.clip_grad_value_(part.get_submodule("0").parameters(), 0.01),
]


def clip(strategy: str) -> None:
    """As a plain model's are. torch adds 1e-6 to a norm."""
    alone, whole = made(), made()
    sgd = torch.optim.SGD([each for each in alone.parameters() if each.requires_grad], lr=0.1)
    model, optimizer = imece.parallelize(
        whole, torch.optim.SGD([each for each in whole.parameters() if each.requires_grad], lr=0.1), strategy
    )
    for call in CLIPS:
        sgd.zero_grad()
        optimizer.zero_grad()
        loss(alone).backward()
        loss(model).backward()
        expected, norm = call(alone, alone), call(model, whole)
        assert (expected is None) is (norm is None)
        if expected is not None and norm is not None:
            torch.testing.assert_close(norm, expected)
        sgd.step()
        optimizer.step()
        assert isinstance(model, ShardedDataParallel)
        with model.gathered():
            for name, each in alone.named_parameters():
                torch.testing.assert_close(whole.get_parameter(name), each, rtol=1e-6, atol=1e-6)


def refuse(strategy: str) -> None:
    whole, other = made(), made()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    model, optimizer = imece.parallelize(whole, plain, strategy)

    def says(match: str, kind: type[Exception] = RuntimeError) -> pytest.RaisesExc[Exception]:
        return pytest.raises(kind, match=match)

    with says(
        r"AdamW has parameters of a sharded model, 0\.weight among them.*give it to imece\.parallelize"
    ):
        torch.optim.AdamW(model.parameters()).step()
    loss(model).backward()
    with says(r"model\.clip_grad_norm_\(max_norm\), or as torch\.nn\.utils\.clip_grad_norm_"):
        by_its_own_name(model.parameters(), 1.0)
    with says("norm_type=inf", ValueError):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    loss(other).backward()
    with says("of several models, one of them sharded", ValueError):
        nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    with says(r"SGD has parameters of a sharded model, 0\.weight among them"):
        torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1).step()
    assert float(by_its_own_name(other.parameters(), 1e9)) == float(
        nn.utils.clip_grad_norm_(other.parameters(), 1)
    )
    value_by_its_own_name(other.parameters(), 1e-3)
    assert max(float(each.grad.abs().max()) for each in other.parameters() if each.grad is not None) <= 1e-3
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    optimizer.step()
    optimizer.zero_grad()
    if strategy != "zero3":
        loss(model.module).backward()
        with says(
            r"SGD would step nothing: the gradient of 0\.weight is of this rank alone.*call model\(\.\.\.\)"
        ):
            optimizer.step()
        optimizer.zero_grad()
    loss(model).backward()
    assert isinstance(model, ShardedDataParallel)
    infinite = model.sharding.parts[0].parameter.grad
    assert infinite is not None
    infinite.fill_(float("inf"))
    with says("the norm of the gradient is inf, on all ranks"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def adversaries(strategy: str) -> None:
    """A half that is frozen while the other one learns gets no gradient, and nobody says that it did."""
    both = nn.ModuleDict({"maker": nn.Linear(2, 2), "judge": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both.values()]

    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = both["judge"](both["maker"](x)).sum()
            return result

    model, steppers = imece.parallelize(Game(), optimizers, strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(6):
            now, other = ("judge", "maker") if turn % 2 else ("maker", "judge")
            both[now].requires_grad_(True)
            both[other].requires_grad_(False)
            stepper = steppers[[*both].index(now)]
            stepper.zero_grad()
            model(torch.ones(1, 2)).backward()
            stepper.step()


def go() -> None:
    imece.init()
    for strategy in ("zero1", "zero2", "zero3"):
        for check in (clip, refuse, adversaries):
            check(strategy)
    gc.collect()
    assert len(torch_calls._models) <= 1, "wrapped models stay for ever"


def test_torch_calls() -> None:
    run_ranks(go, 2, backend=None)
