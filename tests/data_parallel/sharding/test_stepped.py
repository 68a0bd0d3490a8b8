"""Optimizers with state besides their groups' either step parts too, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from imece import MixedPrecision, parallelize
from tests.data_parallel.checks import Check, Job, jobs, passed

STRATEGIES = ("zero1", "zero2", "zero3")


class Signed(torch.optim.Optimizer):
    """Steps what it finds in one of its attributes."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 0.01, *, by_data: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._params = self.param_groups[0]["params"]
        self._by_data = by_data

    def _mine(self) -> Iterable[torch.Tensor]:
        return self._params  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self._mine():
            if each.grad is not None:
                (each.data if self._by_data else each).sub_(
                    each.grad.sign(), alpha=self.param_groups[0]["lr"]
                )


class Copying(Signed):
    """Has a list of its own, so that it does not learn what is in its group."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._params = list(self._params)


class ById(Signed):
    """Knows what to do with each parameter by its id."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._turns = {id(each): True for each in self._params}

    def _mine(self) -> Iterable[torch.Tensor]:
        return [each for each in self._params if id(each) in self._turns]


class Enclosed(Signed):
    """Nobody can see what it has."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        kept = list(self._params)
        self._known: Callable[[], list[torch.Tensor]] = lambda: kept

    def _mine(self) -> Iterable[torch.Tensor]:
        return self._known()


def trained(
    make: Callable[[Iterable[nn.Parameter]], Signed], strategy: str, group: dist.ProcessGroup, **options: Any
) -> Iterator[tuple[float, Signed]]:
    """Losses, each before a step of the optimizer."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model, optimizer = parallelize(module, make(module.parameters()), strategy, group, **options)
    while True:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        yield float(loss.detach()), optimizer
        optimizer.step()


def first_three(*args: Any, **options: Any) -> list[float]:
    losses = trained(*args, **options)
    return [next(losses)[0] for _ in range(3)]


def steps_by_its_own_list(group: dist.ProcessGroup) -> None:
    """That of its group, which it has kept; in place or not, nobody finds fault with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = first_three(Signed, "replicate", group)
        assert expected[2] < expected[1] < expected[0]
        for strategy in STRATEGIES:
            assert first_three(Signed, strategy, group) == pytest.approx(expected)
            by_data = lambda given: Signed(given, by_data=True)  # noqa: E731
            assert first_three(by_data, strategy, group) == pytest.approx(expected)


def steps_what_it_has_again(group: dist.ProcessGroup) -> None:
    """After other ranks have come its list has the parts that are cut for these."""
    losses = trained(Signed, "zero2", group)
    _, optimizer = next(losses)
    stepped: Any = optimizer
    model = stepped._imece_stepped._model
    model.regroup(dist.distributed_c10d._get_default_group())
    model.take_over_masters()
    assert stepped._params is optimizer.param_groups[0]["params"]
    assert {id(each) for each in stepped._params} == {id(each.parameter) for each in model.parts}


def says_that_nothing_moves(group: dist.ProcessGroup) -> None:
    kinds: tuple[tuple[Any, str], ...] = ((Copying, "_params"), (ById, "_turns"))
    for strategy in STRATEGIES:
        for kind, attribute in kinds:
            with pytest.raises(RuntimeError) as caught:
                first_three(kind, strategy, group)
            assert str(caught.value) == (
                f"{kind.__name__} has stepped, and nothing that it steps has changed, though it has "
                f"gradients: its attribute {attribute} knows parameters by themselves, and what it steps are "
                f"this rank's parts: have it look into optimizer.param_groups in each step, or use "
                f"strategy='replicate'"
            )
        said = "Enclosed has stepped, and nothing.*: if it keeps parameters"
        with pytest.warns(UserWarning, match=said) as warned:
            first_three(Enclosed, strategy, group)
        assert all(each.filename == __file__ for each in warned)


def says_nothing_of_what_is_to_stay(group: dist.ProcessGroup) -> None:
    """A learning rate of 0, and gradients of 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = trained(Enclosed, "zero1", group)
        _, optimizer = next(losses)
        optimizer.param_groups[0]["lr"] = 0.0
        next(losses)
        for each in optimizer.param_groups[0]["params"]:
            each.grad.zero_()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    with pytest.warns(UserWarning, match="Enclosed has stepped"):
        next(losses)
        for each in optimizer.param_groups[0]["params"][1:]:
            each.grad.zero_()
        optimizer.step()


def refused(group: dist.ProcessGroup) -> None:
    def attempt(
        message: str,
        make: Callable[[nn.Module], Any] = lambda model: torch.optim.SGD(model.parameters(), 0.1),
        strategy: Any = "zero3",
        **options: Any,
    ) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises((ValueError, TypeError)) as caught:
            parallelize(model, make(model), strategy, group, gather=True, **options)
        assert str(caught.value) == message
        assert all(type(each) is nn.Parameter and each.norm() for each in model.parameters()), "they are lost"

    normed = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "whole": nn.BatchNorm1d(4, affine=False)})
    halved = MixedPrecision(param=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        parallelize(normed, torch.optim.SGD(normed.parameters(), 0.1), "zero1", group, precision=halved)
    assert str(caught.value) == (
        "norm is a BatchNorm1d, and torch has none for CPUs whose parameters are torch.bfloat16 and whose "
        "statistics are torch.float32: leave param out of MixedPrecision and run forward inside of "
        "torch.autocast"
    )
    summed = MixedPrecision(reduce=torch.bfloat16)
    parallelize(normed, torch.optim.SGD(normed.parameters(), 0.1), "zero1", group, precision=summed)
    with torch.autocast("cpu", torch.bfloat16):
        normed["norm"](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()

    def lists(scales: Any) -> Callable[[nn.Module], Any]:
        return lambda model: Other([{"params": list(model.parameters()), "scales": scales}], 0.1)

    Other = type("Other", (torch.optim.SGD,), {})
    attempt(
        "Other has in group 0 a list 'scales' of 4 for 4 parameters, and a rank steps some of these: if it "
        "is one for each, make each parameter a group of its own; if not, make it a tuple",
        lists([1.0, 2.0, 3.0, 4.0]),
    )
    for scales in ((1.0, 2.0, 3.0, 4.0), [1.0, 2.0]):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        _, optimizer = parallelize(model, lists(scales)(model), "zero3", group)
        assert optimizer.param_groups[0]["scales"] is scales
    Mine = type("Mine", (torch.optim.LBFGS,), {})
    attempt(
        "Mine cannot be sharded: it searches along one direction of all parameters together; use "
        "strategy='replicate' or another optimizer",
        lambda model: Mine(model.parameters()),
    )
    attempt(
        "ZeroRedundancyOptimizer cannot be sharded: it divides among ranks itself, as 'zero1' does with the "
        "optimizer in it; use strategy='replicate' or another optimizer",
        lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group),
    )
    attempt("average='sample': one of ranks, samples, tokens", average="sample")
    attempt("units=Linear: a tuple of classes, (Linear,)", units=nn.Linear)
    attempt("strategy=2: a name, such as 'zero2'", strategy=2)
    precision = "precision=torch.bfloat16: imece.MixedPrecision(param=..., reduce=...) of dtypes"
    attempt(precision, precision=torch.bfloat16)
    for make, kind in (
        (nn.Module.parameters, "generator"),
        (lambda model: [*model.parameters()], "Parameter"),
    ):
        attempt(
            f"a {kind} is no optimizer: give one of torch's, a list of them, or a function that makes one of "
            f"parameters",
            make,
        )
    bf16: Any = "bf16"
    with pytest.raises(
        TypeError,
        match=r"^MixedPrecision\(reduce='bf16'\): a dtype of floating point, such as",
    ):
        MixedPrecision(reduce=bf16)
    attempt(
        "this SGD was given to parallelize before, and steps parts of that model: make a new optimizer of "
        "the parameters of this one",
        lambda _: given_before(group),
    )


def given_before(group: dist.ProcessGroup) -> Any:
    model = nn.Linear(4, 4)
    return parallelize(model, torch.optim.SGD(model.parameters(), 0.1), "zero1", group)[1]


CHECKS: dict[str, Check] = {
    "steps by its own list": steps_by_its_own_list,
    "steps what it has again": steps_what_it_has_again,
    "says that nothing moves": says_that_nothing_moves,
    "says nothing of what is to stay": says_nothing_of_what_is_to_stay,
    "refused": refused,
}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "gloo")))
def test_stepped(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
