"""Graphs of all kinds through one wrapped model: outputs, autograd.grad, checkpoints, torch.func, compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from imece.collectives import ops
from imece.data_parallel.reducing.posting import Posting
from tests.data_parallel.branches import (
    SMALL_MB,
    Branches,
    Fused,
    blown,
    double,
    gradients,
    loss_step,
    mean_over,
    own_input,
    plus,
    same,
    total,
    train_step,
    wrap,
)
from tests.data_parallel.checks import Check, Job, jobs, passed


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Record:
    loss: Any
    words: str = "of no tensor"


class Shown:
    """An object of somebody's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a list": (lambda x: [1, x], lambda output: output[1]),
    "a dict in a tuple": (lambda x: (None, {"loss": x}), lambda output: output[1]["loss"]),
    "a named tuple": (lambda x: Pair(x.detach(), [x]), lambda output: output.second[0]),
    "a dataclass in a dict": (lambda x: {"all": Record([x])}, lambda output: output["all"].loss[0]),
    "an object in one": (lambda x: Shown([Shown(x)]), lambda output: output.value[0].value),
    "one of two": (lambda x: (x * 2, x), lambda output: output[1]),
}


def outputs_of_all_kinds(group: dist.ProcessGroup) -> None:
    for name, (put, take) in OUTPUTS.items():

        class Out(Branches):
            def forward(
                self, x: torch.Tensor, picked: list[int] | None = None, *, put: Callable[..., Any] = put
            ) -> Any:
                return put(super().forward(x, picked))

        model = wrap(double(Out()), group)
        for step in range(2):
            x = own_input(step)
            expected = mean_over(group, model.module, lambda alone, x: take(alone(x)).sum(), x)  # noqa: B023
            model.zero_grad()
            output = model(x, picked=None)
            assert type(output) is type(model.module(own_input())), name
            take(output).sum().backward()
            same(gradients(model), expected)
        # Each of two backwards must begin, which it does when it comes through an output that was seen.
        first, second = model(own_input(1)), model(own_input(1))
        model.zero_grad()
        take(first).sum().backward()
        take(second).sum().backward()
        same(gradients(model), plus(expected, expected))


class Opaque:
    """An object in which nobody finds tensors."""

    __slots__ = ("get",)

    def __init__(self, loss: torch.Tensor) -> None:
        self.get = lambda: loss


class Hiding(Branches):
    """All its layers are in re-entrant checkpoints, and its output hides where backward begins."""

    def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> Any:
        for index in range(len(self.layers)) if picked is None else picked:
            x = checkpoint(self.layers[index], x, use_reentrant=True)
        return Opaque(x.sum())


def hidden_outputs(group: dist.ProcessGroup) -> None:
    """Backward begins and ends inside of checkpoints: with all layers used, and with some left unused."""
    rank = dist.get_rank()
    for picked in ([0, 1, 2, 3], [0, 1, 2], [2, 3], [rank, 2]):
        model = wrap(double(Hiding()), group, bucket_cap_mb=SMALL_MB)
        for step in range(3):
            x = own_input(step).requires_grad_()
            expected = mean_over(group, model.module, lambda alone, *inputs: alone(*inputs).get(), x, picked)
            model.zero_grad()
            model(x, picked).get().backward()
            same(gradients(model), expected)


def outputs_and_parameters_together(group: dist.ProcessGroup) -> None:
    """A penalty on the parameters themselves, and one parameter that is in nothing else."""

    def loss(model: Any) -> torch.Tensor:
        penalty = sum((each**2).sum() for each in model.parameters())
        return model(own_input(), [0, 1]).sum() + penalty  # type: ignore[no-any-return]

    model = wrap(double(Branches()), group)
    for _ in range(2):
        expected = mean_over(group, model.module, loss)
        model.zero_grad()
        loss(model).backward()
        same(gradients(model), expected)


def autograd_grad_on_one_rank(group: dist.ProcessGroup) -> None:
    """Of inputs, outputs or parameters, for a picture or a log: it sends nothing, so others need not know."""
    model = wrap(double(Branches()), group)
    for step in range(4):
        train_step(model, group, step)
        if step and dist.get_rank() == 0:
            x = own_input().requires_grad_()
            hidden = x * 2
            output = model(hidden)
            for wanted in (x, hidden, output, list(model.parameters()), model.module.layers[1].weight):
                torch.autograd.grad(output.sum(), wanted, retain_graph=True)


def a_penalty_sends_as_much_as_a_loss(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    sent: list[int] = []
    reduce, finish = ops.all_reduce, Posting.finish

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return reduce(tensor, *args, **options)

    def sum_posted(posting: Posting) -> None:
        sent.extend(bucket.flat.nbytes for bucket in model.reducer.buckets)
        finish(posting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "all_reduce", all_reduce)
        patch.setattr(Posting, "finish", sum_posted)
        x = own_input().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        assert not sent
        (output.sum() + slope.square().sum()).backward()
    told = len(model.reducer.slots) + 17  # used, digests of what is alike, and whether a script wrote
    assert sent == [bucket.flat.nbytes for bucket in model.reducer.buckets] + [told]


def some_parameters_alone(group: dist.ProcessGroup) -> None:
    """backward(inputs=...) is a backward, of the nearest parameter or of others."""
    for at in (0, 3):
        model = wrap(double(Branches()), group)
        for step in range(3):
            wanted = model.module.layers[at].weight
            expected = mean_over(group, model.module, total, own_input(step))[f"layers.{at}.weight"]
            model.zero_grad()
            output = model(own_input(step))
            with model.no_sync():
                model(own_input(step))  # so that the output alone says that this is to be reduced
            output.sum().backward(inputs=[wanted])
            found = {name: each for name, each in gradients(model).items() if each is not None}
            same(found, {f"layers.{at}.weight": expected})


def gradients_by_autograd_grad(group: dist.ProcessGroup) -> None:
    """torch.autograd.grad asks for gradients of its own: none is synchronised, and the next step is right."""
    model = wrap(double(Branches()), group)
    x = own_input().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert all(each is None for each in gradients(model).values())
    slope.square().sum().backward()
    for step in range(2):
        train_step(model, group, step)


class Scores(nn.Module):
    """Its output is a view of what its last layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))

    def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> torch.Tensor:
        return torch.as_tensor(self.layers(x)).squeeze(-1)


def an_output_changed_in_place(group: dist.ProcessGroup) -> None:
    def loss(model: Any, step: int) -> torch.Tensor:
        scores = model(own_input(step))
        scores /= 2.0
        return scores.sum()  # type: ignore[no-any-return]

    model = wrap(double(Scores()), group)
    for step in range(3):
        loss_step(model, group, loss, step)


def a_loss_of_gradients_alone(group: dist.ProcessGroup) -> None:
    """Its graph does not lead through the output: that is linear in what is behind it."""

    def loss(model: Any, step: int) -> torch.Tensor:
        x = own_input(step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    model = wrap(double(Scores()), group)
    for step in range(3):
        loss_step(model, group, loss, step)
        train_step(model, group, step)


def a_loss_of_gradients_comes_second(group: dist.ProcessGroup) -> None:
    """After a backward of the output that they are of: it leads through no output, and is reduced as well."""

    def both(model: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = own_input(step).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.sum(), slope.square().sum()

    model = wrap(double(Scores()), group)
    for step in range(3):
        expected = mean_over(group, model.module, lambda *given: torch.stack(both(*given)).sum(), step)
        model.zero_grad()
        loss, penalty = both(model, step)
        loss.backward(retain_graph=True)
        penalty.backward()
        same(gradients(model), expected)


class Manual(Scores):
    """Trains in forward, as with Lightning's manual optimization."""

    def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> torch.Tensor:
        scores = super().forward(x, picked)
        if torch.is_grad_enabled():
            scores.square().sum().backward()
        return scores.detach()


def a_backward_inside_of_forward(group: dist.ProcessGroup) -> None:
    model = wrap(double(Manual()), group)
    for step in range(3):
        expected = mean_over(
            group, model.module, lambda m, at: Scores.forward(m, own_input(at)).square().sum(), step
        )
        model.zero_grad()
        model(own_input(step))
        same(gradients(model), expected)


def of_two_forwards_each_as_it_was(group: dist.ProcessGroup) -> None:
    """One in no_sync stays local, though another one was prepared before its backward."""

    def loss(model: Any, step: int) -> torch.Tensor:
        return total(model, own_input(step)) + total(model, own_input(step + 5))

    model = wrap(double(Branches()), group)
    for step in range(2):
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        total(alone, own_input(step)).backward()
        expected = mean_over(group, model.module, loss, step)
        model.zero_grad()
        with model.no_sync():
            local = total(model, own_input(step))
        both = total(model, own_input(step + 5))
        local.backward()
        same(gradients(model), gradients(alone))
        both.backward()
        same(gradients(model), expected)


def within_torch_func(group: dist.ProcessGroup) -> None:
    """Gradients of a transform are this rank's own; a loss of them is a loss as any other."""
    model = wrap(double(Branches()), group)
    train_step(model, group)  # so that the next forward lays buckets anew
    model.zero_grad()
    values = {name: each.detach().clone() for name, each in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()  # type: ignore[no-any-return]

    x = own_input()
    got = torch.func.grad(loss)(values, x)
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    alone = copy.deepcopy(model.module)
    alone(x).square().sum().backward()
    same({name: got[f"module.{name}"] for name in gradients(alone)}, gradients(alone))
    same({name: by_sample[f"module.{name}"].sum(0) for name in gradients(alone)}, gradients(alone))
    assert all(each is None for each in gradients(model).values())

    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        slope: torch.Tensor = torch.func.grad(lambda x: model(x).sum())(x)
        return slope.square().sum()

    for step in range(2):
        loss_step(model, group, penalty, own_input(step))
        train_step(model, group, step)


def checkpointed_after_another_failed(group: dist.ProcessGroup) -> None:
    """It has no forward with gradients outside of backward, which would see that the other one is over."""
    failed, model = wrap(double(Fused()), group), wrap(double(Branches()), group)
    with blown():
        failed(own_input()).sum().backward()
    x = own_input().requires_grad_()
    expected = mean_over(group, model.module, total, x)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    same(gradients(model), expected)


def checkpointed_from_outside(group: dist.ProcessGroup) -> None:
    """The wrapper's own forward runs again in backward."""
    for reentrant in (False, True):
        model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
        for step in range(3):
            x = own_input(step).requires_grad_()
            expected = mean_over(group, model.module, total, x)
            model.zero_grad()
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            same(gradients(model), expected)


def compiled_as_a_whole(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(3):
        expected = mean_over(group, model.module, total, own_input(step))
        model.zero_grad()
        compiled(own_input(step)).sum().backward()
        same(gradients(model), expected)


CHECKS: dict[str, Check] = {
    "outputs": outputs_of_all_kinds,
    "hidden outputs": hidden_outputs,
    "outputs and parameters": outputs_and_parameters_together,
    "autograd.grad": gradients_by_autograd_grad,
    "autograd.grad on one rank": autograd_grad_on_one_rank,
    "a penalty": a_penalty_sends_as_much_as_a_loss,
    "some parameters alone": some_parameters_alone,
    "an output changed in place": an_output_changed_in_place,
    "a loss of gradients": a_loss_of_gradients_alone,
    "a loss of gradients after another": a_loss_of_gradients_comes_second,
    "inside of forward": a_backward_inside_of_forward,
    "of two forwards": of_two_forwards_each_as_it_was,
    "checkpointed from outside": checkpointed_from_outside,
    "compiled as a whole": compiled_as_a_whole,
    "within torch.func": within_torch_func,
    "checkpointed after another failed": checkpointed_after_another_failed,
}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm")))
def test_graphs(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
