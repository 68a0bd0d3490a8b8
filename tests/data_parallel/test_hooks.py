"""Hooks on parameters, buckets and buffers, and optimizers that step in backward."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation

from imece import parallelize
from tests.data_parallel.branches import (
    SMALL_MB,
    Branches,
    double,
    gradients,
    mean_over,
    own_input,
    same,
    total,
    wrap,
)
from tests.data_parallel.checks import Check, Job, jobs, passed


def hooks_on_parameters_come_first(group: dist.ProcessGroup) -> None:
    """Added after wrapping too: they see this rank's gradient, and what they leave is reduced."""
    factor = dist.get_rank() + 2

    def replace(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * factor + 1

    def write(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(factor).add_(1)

    for strategy, overlap in (("replicate", False), ("replicate", True), ("zero1", False), ("zero3", False)):
        module = double(Branches())
        model, optimizer = parallelize(
            module, torch.optim.SGD(module.parameters(), lr=1.0), strategy, group, bucket_cap_mb=SMALL_MB,
            overlap=overlap,
        )  # fmt: skip
        for at, parameter in enumerate(module.parameters()):
            parameter.register_post_accumulate_grad_hook(write if at % 2 else replace)
        for step in range(3):
            x, before = own_input(step), {name: each.clone() for name, each in module.named_parameters()}
            means = mean_over(group, module, lambda alone, x: alone(x).sum() * factor, x)
            expected = {name: before[name] - each - 1 for name, each in means.items() if each is not None}
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            same(dict(module.named_parameters()), expected)


def hooks_may_answer_in_several_ways(group: dist.ProcessGroup) -> None:
    def answer(value: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(value)
        return future

    seen: list[tuple[int, bool, int, int]] = []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert state == "mine"
        views, parameters = bucket.gradients(), bucket.parameters()
        assert [view.shape for view in views] == [each.shape for each in parameters]
        assert sum(view.numel() for view in views) == bucket.buffer().numel()
        seen.append((bucket.index(), bucket.is_last(), len(views), bucket.buffer().numel()))
        doubled = bucket.buffer() * 2
        return answer([doubled] if bucket.index() % 2 else doubled)  # type: ignore[no-any-return]

    model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
    model.register_comm_hook("mine", hook)
    for step in range(2):
        seen.clear()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        alone(own_input(step)).sum().backward()
        model.zero_grad()
        model(own_input(step)).sum().backward()
        own = gradients(alone)
        same(gradients(model), {name: grad * 2 for name, grad in own.items() if grad is not None})
        count = len(model.reducer.buckets)
        assert [(index, last) for index, last, *_ in seen] == [(at, at == count - 1) for at in range(count)]
        assert sum(views for *_, views, _ in seen) == 8 and sum(numel for *_, numel in seen) == 48

    model = wrap(double(Branches()), group)
    model.register_comm_hook(None, lambda state, bucket: answer("words"))
    with pytest.raises(TypeError, match="gave str, not a tensor"):
        model(own_input()).sum().backward()


def hooks_may_set_another_buffer(group: dist.ProcessGroup) -> None:
    """Its gradients are views of that, with its dtype and the strides of the parameters."""

    def doubled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.set_buffer(bucket.buffer().float())
        for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert (view.dtype, view.stride()) == (torch.float32, parameter.stride())
            view.mul_(2)
        if bucket.buffer().numel() > 1:
            kept = bucket.buffer()
            bucket.set_buffer(kept[:1])
            with pytest.raises(RuntimeError):
                bucket.gradients()
            bucket.set_buffer(kept)
        return default_hooks.allreduce_hook(group, bucket)

    convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module = double(nn.Sequential(convolution, nn.Flatten(), nn.Linear(3, 3)))
    x = torch.rand(2, 2, 2, 2, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    model = wrap(module, group)
    expected = mean_over(group, module, total, x)
    model.register_comm_hook(None, doubled)
    model(x).sum().backward()
    for name, each in gradients(model).items():
        mean = expected[name]
        assert mean is not None and each is not None
        assert torch.allclose(each, 2 * mean, rtol=1e-5, atol=1e-5), name


def hooks_that_are_refused(group: dist.ProcessGroup) -> None:
    def of_another_kind(state: object, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    def without_future(state: object, bucket: dist.GradBucket) -> torch.Tensor:
        raise NotImplementedError

    model = wrap(double(Branches()), group)
    with pytest.raises(TypeError, match="is a function"):
        model.register_comm_hook(None, "hook")
    with pytest.raises(ValueError, match=r"bucket is a dist\.GradBucket; .*of_another_kind wants"):
        model.register_comm_hook(None, of_another_kind)
    with pytest.raises(ValueError, match=r"returns a torch\.futures\.Future; .*without_future returns"):
        model.register_comm_hook(None, without_future)
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="already"):
        model.register_comm_hook(None, lambda state, bucket: None)


def optimizers_in_backward(group: dist.ProcessGroup) -> None:
    """They step once, on the mean, whether they were applied before or after wrapping; unused ones do not."""
    for before in (True, False):
        inner = double(Branches())
        stepped = copy.deepcopy(inner)
        if before:
            _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.5})
        model = wrap(inner, group, bucket_cap_mb=SMALL_MB)
        if not before:
            _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.5})
        stepped.load_state_dict(inner.state_dict())  # rank 0's
        for step in range(3):
            expected = mean_over(group, stepped, total, own_input(step), [0, 2])
            for name, parameter in stepped.named_parameters():
                if expected[name] is not None:
                    parameter.data -= 0.5 * expected[name]  # type: ignore[operator]
            model(own_input(step), [0, 2]).sum().backward()
            same(dict(inner.named_parameters()), dict(stepped.named_parameters()))
            assert all(each is None for each in gradients(model).values())
    for strategy in ("replicate", "zero1"):
        inner = Branches()
        sgd = [torch.optim.SGD([each], lr=0.5) for each in inner.parameters()]
        model, _ = parallelize(inner, sgd, strategy, group)
        for each, one in zip(inner.parameters(), sgd, strict=True):
            each.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
        with pytest.raises(RuntimeError) as early:
            model(own_input(0).float(), [0]).sum().backward()
        assert str(early.value).startswith(
            "SGD steps layers.0.bias inside of backward, before its gradient is summed over the ranks: step "
            "when backward is over, or with DistributedDataParallel give the optimizer to torch.distributed."
        )
    for before in (True, False):
        inner = Branches()
        if before:
            _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.5})
        with pytest.raises(ValueError) as caught:
            sharded, _ = parallelize(inner, torch.optim.SGD(inner.parameters()), "zero1", group)
            assert not before
            _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.5})
            sharded(own_input(0).float(), [0])
        name = next(name for name, _ in inner.named_parameters())
        assert str(caught.value) == (
            f"parameter {name} has an optimizer that steps in backward (_apply_optimizer_in_backward), and "
            f"its gradient goes to ranks' parts: give imece.parallelize an optimizer in its place, or take "
            f"strategy='replicate'"
        )


def hooks_on_buffers(group: dist.ProcessGroup) -> None:
    """They run instead of the broadcast, before or after forward; futures are awaited by backward."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("seen").add_(dist.get_rank() + 1)
            return self.layer(x)  # type: ignore[no-any-return]

    def hook(state: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
        assert state == "state" and list(buffers) == ["seen"]
        done: torch.futures.Future[Any] = torch.futures.Future()

        def late() -> None:
            dist.all_reduce(buffers["seen"], group=group)
            done.set_result(None)

        threading.Timer(0.05, late).start()
        return [done]

    ranks = group.size()
    everyone = ranks * (ranks + 1) / 2
    for where, expected in (
        (_BufferCommHookLocation.POST_FORWARD, [everyone, everyone * ranks + everyone]),
        (_BufferCommHookLocation.PRE_FORWARD, [dist.get_rank() + 1, everyone + dist.get_rank() + 1]),
    ):
        model = wrap(double(Counting()), group)
        model._register_buffer_comm_hook(
            "state", hook if where is _BufferCommHookLocation.POST_FORWARD else waiting(hook), where
        )
        for want in expected:
            model(own_input()).sum().backward()
            assert model.module.seen.item() == want, (where, model.module.seen, want)
    with pytest.raises(TypeError, match="function"):
        model._register_buffer_comm_hook(None, "no hook")


def waiting(hook: Callable[..., Any]) -> Callable[..., None]:
    def wait(*arguments: Any) -> None:
        torch.futures.wait_all(hook(*arguments))

    return wait


CHECKS: dict[str, Check] = {
    "optimizers in backward": optimizers_in_backward,
    "hooks on buffers": hooks_on_buffers,
    "hooks on parameters": hooks_on_parameters_come_first,
    "hooks' answers": hooks_may_answer_in_several_ways,
    "hooks' buffers": hooks_may_set_another_buffer,
    "refused hooks": hooks_that_are_refused,
}

# Where the order of collectives matters.
ON_GLOO = ["hooks' answers"]


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm")) + jobs(__name__, ON_GLOO, (3, "gloo")))
def test_hooks(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
