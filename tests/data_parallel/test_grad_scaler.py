"""Scaled losses: if one rank finds Inf in its part of the gradient, no rank steps."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from imece import GradScaler, parallelize
from tests.data_parallel.checks import Check, Job, jobs, passed
from tests.data_parallel.sharding.blocks import adamw, mesh_of
from tests.data_parallel.test_sharded_options import WAYS, Way, two_layers


def spoil(optimizer: torch.optim.Optimizer) -> None:
    gradients = [each.grad for each in optimizer.param_groups[0]["params"] if each.grad is not None]
    gradients[0].fill_(torch.inf)


def scaled_steps(way: Way, fused: bool, group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """Parameters and scale after each of three steps, in the second of which AdamW's gradient has Inf."""

    def make(model: Any) -> list[torch.optim.Optimizer]:
        """Muon's one matrix is one rank's: the other has nothing to look at."""
        muon = torch.optim.Muon([model[0].weight], lr=0.1)
        return [muon, torch.optim.AdamW(model[1].parameters(), lr=0.1, fused=fused)]

    inner = two_layers()
    model, optimizers = parallelize(inner, make(inner), way.strategy, mesh_of(group), gather=way.gather)
    scaler = GradScaler("cpu", init_scale=4.0)
    found = []
    for step in range(3):
        for each in optimizers:
            each.zero_grad()
        inputs = torch.full((2, 16), 1.0 + group.rank() + step)
        scaler.scale(model(inputs).square().mean()).backward()
        if step == 1 and (group.rank() == 1 or way.strategy == "replicate"):
            spoil(optimizers[1])
        if not fused:
            for each in optimizers:
                scaler.unscale_(each)
            model.clip_grad_norm_(0.5)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        state = {name: each.clone() for name, each in model.state_dict().items()}
        found.append(state | {"scale": torch.tensor(scaler.get_scale())})
    return found


@pytest.mark.filterwarnings("error")
def test_a_scaler_is_for_what_there_is() -> None:
    """torch's own is for CUDA, and warns and does nothing where there is none."""
    assert GradScaler(init_scale=4.0).scale(torch.ones(())).item() == 4.0
    assert not GradScaler(enabled=False).is_enabled()


def one_scale(group: dist.ProcessGroup) -> None:
    """If one rank has Inf in its part, all do what ranks of replicate do, which have it all of them."""
    for way, fused in product(WAYS, (False, True)):
        expected = scaled_steps(Way("replicate"), fused, group)
        assert [each["scale"].item() for each in expected] == [4.0, 2.0, 2.0]
        last = "module.1.weight"
        assert torch.equal(expected[0][last], expected[1][last])
        assert not torch.equal(expected[1][last], expected[2][last])
        for one, other in zip(scaled_steps(way, fused, group), expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other), (way, fused)


def torch_scaler(group: dist.ProcessGroup) -> None:
    """Refused on all ranks, in their first step, whether this one's part is finite or not."""
    for way, fused, bad in product(WAYS, (False, True), (False, True)):
        inner = two_layers()
        optimizer = torch.optim.AdamW(inner.parameters(), fused=fused)
        model, _ = parallelize(inner, optimizer, way.strategy, mesh_of(group), gather=way.gather)
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 16)).mean()).backward()
        if bad and group.rank() == 1:
            spoil(optimizer)
        with pytest.raises(RuntimeError, match=r"would not step together: use imece\.GradScaler"):
            scaler.step(optimizer)


def scaled_in_join(group: dist.ProcessGroup) -> None:
    inner = two_layers()
    model, optimizer = parallelize(inner, adamw(inner), "zero1", group)
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match=r"GradScaler inside of join\(\)"), model.join():
        scaler.scale(model(torch.ones(2, 16)).mean()).backward()
        scaler.step(optimizer)


def complex_gradients(group: dist.ProcessGroup) -> None:
    """They are unscaled, and an Inf in one rank's imaginary part stops all ranks."""
    inputs = torch.full((2, 16), 1.0 + group.rank(), dtype=torch.complex64)
    for way in (Way("replicate"), *WAYS):
        inner = two_layers().to(torch.complex64)
        model, optimizer = parallelize(inner, adamw(inner), way.strategy, mesh_of(group), gather=way.gather)
        model(inputs).abs().mean().backward()
        expected = model.gradient_norm()
        scaler = GradScaler("cpu", init_scale=4.0)
        for bad in (True, False):
            optimizer.zero_grad()
            scaler.scale(model(inputs).abs().mean()).backward()
            if bad and (group.rank() == 1 or way.strategy == "replicate"):
                next(each.grad for each in optimizer.param_groups[0]["params"]).imag.fill_(torch.inf)
            scaler.unscale_(optimizer)
            assert bad or torch.equal(model.gradient_norm(), expected), way
            before = [each.clone() for each in model.state_dict().values()]
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, model.state_dict().values())) == bad, way
            assert scaler.get_scale() == 2.0, way


class OnGpu(torch.Tensor):
    """A scalar that is taken for one on a GPU. What is copied from there without waiting is not there yet."""

    device = torch.device("cuda")

    def to(self, *where: Any, non_blocking: bool = False, **__: Any) -> torch.Tensor:
        if where and torch.device(where[0]).type == "cuda":
            return self
        return torch.tensor(torch.nan) if non_blocking else self.cpu()

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("value", "found"), [(8.0, 0.0), (torch.inf, 1.0)])
def test_gradients_on_the_host_wait_for_the_scale(value: float, found: float, fused: bool) -> None:
    """As with offload, while the loss and its scale are on the GPU."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._scale = cast(torch.Tensor, scaler._scale).as_subclass(OnGpu)
    weight.grad = torch.full((2,), value)
    inverse, flag = (torch.tensor(each).as_subclass(OnGpu) for each in (0.25, 0.0))
    (told,) = scaler._unscale_grads_(optimizer, inverse, flag, False).values()
    assert (weight.grad.tolist(), told.item()) == ([value / 4] * 2, found)
    scaler._per_optimizer_states[id(optimizer)] |= {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {OnGpu.device: told.as_subclass(OnGpu)},  # as of sharded models
    }
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([0.0 if found else -0.5] * 2)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_fused_step_on_the_host_waits_for_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it takes the gradient by where nobody has called `unscale_`."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([weight], lr=0.5, fused=True, initial_accumulator_value=0.25, eps=0.0)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip("this torch's fused Adagrad takes no scale")
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._scale = cast(torch.Tensor, scaler._scale).as_subclass(OnGpu)
    weight.grad = torch.full((2,), 8.0)
    found = {"found_inf_per_device": {OnGpu.device: torch.tensor(0.0).as_subclass(OnGpu)}}
    ask = scaler._per_optimizer_states[id(optimizer)].update
    monkeypatch.setattr(scaler, "_check_inf_per_device", lambda _: ask(found))
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([-0.5 * 2 / (0.25 + 4) ** 0.5] * 2)


CHECKS: dict[str, Check] = {
    "one scale": one_scale,
    "complex gradients": complex_gradients,
    "torch's scaler": torch_scaler,
    "scaled in join": scaled_in_join,
}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "gloo")))
def test_grad_scaler(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
