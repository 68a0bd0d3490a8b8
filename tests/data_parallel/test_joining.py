"""Ranks that run out of inputs: the others go on with the right gradients, without hangs or crashes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils.checkpoint import checkpoint

import imece
from imece import DistributedDataParallel, convert_sync_batchnorm
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed


class Line(nn.Module):
    """y = x · weight for each layer that is picked: its gradient is x, which is easy to foresee."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(layers))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.double()

    def forward(self, x: torch.Tensor, picked: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        if self.training:
            self.seen += x.mean()
        return torch.stack([self.layers[index](x).sum() for index in picked]).sum()


class Repeated(nn.Module):
    """One layer in two re-entrant checkpoints, so that it gets two gradients; another one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        self.double()
        for each in self.parameters():
            nn.init.constant_(each, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return x.sum()


def wrap(group: dist.ProcessGroup, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Line(), process_group=group, bucket_cap_mb=20 / 2**20, **options)


def given(rank: int, step: int) -> torch.Tensor:
    """What a rank is given: float64[1, 3]."""
    return torch.tensor([[1.0 + rank, 10.0 * step, 0.5]], dtype=torch.float64)


def own(step: int) -> torch.Tensor:
    return given(dist.get_rank(), step)


def grad(model: DistributedDataParallel, layer: int = 0) -> torch.Tensor | None:
    module = model.module
    assert isinstance(module, Line)
    found = module.layers[layer].weight.grad
    assert found is None or isinstance(found, torch.Tensor)
    return found


def near(got: torch.Tensor | None, expected: torch.Tensor | None, what: str = "") -> None:
    assert got is not None and expected is not None, what
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def brought(ranks: list[int], *steps: int) -> torch.Tensor:
    """The sum of what these ranks were given in these steps."""
    return torch.stack([given(rank, step) for rank in ranks for step in steps]).sum(0)


def plain_steps(model: DistributedDataParallel, group: dist.ProcessGroup, count: int = 3) -> None:
    """Steps that all ranks make, outside of join."""
    for step in range(count):
        model.zero_grad()
        model(own(step)).backward()
        expected = torch.stack([given(rank, step) for rank in range(group.size())]).mean(0)
        for layer in (0, 1):
            near(grad(model, layer), expected, f"plain step {step}, layer {layer}")


def lengths(world_size: int, shift: int = 0) -> list[int]:
    """Steps of each rank: rank 0 none, the next three more than the one before it."""
    found = [3 * rank for rank in range(world_size)]
    return found[shift:] + found[:shift]


def divided_as_asked(group: dist.ProcessGroup) -> None:
    """From the very first step on, whoever has none; plain steps follow."""
    for shift in range(group.size()):
        for divide in (True, False):
            model = wrap(group)
            steps = lengths(group.size(), shift)
            with model.join(divide_by_initial_world_size=divide):
                for step in range(steps[dist.get_rank()]):
                    there = [rank for rank in range(group.size()) if step < steps[rank]]
                    model.zero_grad()
                    model(own(step)).backward()
                    expected = brought(there, step) / (group.size() if divide else len(there))
                    for layer in (0, 1):
                        near(grad(model, layer), expected, f"steps {steps}, step {step}, layer {layer}")
            assert not model.reducer.average.present_only, "or each later step asks how many ranks are there"
            plain_steps(model, group)


def buckets_are_rebuilt_after_it(group: dist.ProcessGroup) -> None:
    model = wrap(group)
    steps, first = lengths(group.size()), model.reducer.buckets
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model(own(step)).backward()
    plain_steps(model, group)
    assert model.reducer.buckets is not first
    orders = gathered([[slot.name for slot in bucket.slots] for bucket in model.reducer.buckets], group)
    assert orders == [orders[0]] * group.size()


def the_last_ones_model_is_everybodys(group: dist.ProcessGroup) -> None:
    for shift in range(group.size()):
        model = wrap(group)
        steps = lengths(group.size(), shift)
        longest = max(range(group.size()), key=lambda rank: steps[rank])
        with model.join():
            for step in range(steps[dist.get_rank()]):
                model.zero_grad()
                model(own(step)).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(0.1 * parameter.grad + dist.get_rank())  # ranks drift apart
            mine = [each.tolist() for each in model.state_dict().values()]
        after = gathered([each.tolist() for each in model.state_dict().values()], group)
        assert after == [after[0]] * group.size()
        assert after[0] == gathered(mine, group)[longest]


def buffers_come_from_who_is_there(group: dist.ProcessGroup) -> None:
    """Rank 0, from which buffers come elsewhere, runs out first: now they are the last rank's."""
    model = wrap(group)
    module = model.module
    assert isinstance(module, Line)
    steps, last = lengths(group.size()), group.size() - 1
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model(own(step)).backward()
            before = torch.stack([given(last, each).mean() for each in range(step)]).sum() if step else 0.0
            near(module.seen, (before + own(step).mean()).expand(2), f"step {step}")
    after = gathered(module.seen.tolist(), group)
    assert after == [after[0]] * group.size()
    mean = torch.stack([given(last, step).mean() for step in range(steps[last])]).sum()
    near(module.seen, mean.expand(2))


def a_hook_on_buffers_comes_in_its_turn(group: dist.ProcessGroup) -> None:
    """Before or after forward, as the ranks that go on call it."""

    def largest(_: None, buffers: dict[str, torch.Tensor]) -> None:
        dist.all_reduce(buffers["seen"], dist.ReduceOp.MAX, group=group)

    for where in _BufferCommHookLocation:
        model = wrap(group)
        model._register_buffer_comm_hook(None, largest, where)
        steps = lengths(group.size())
        with model.join():
            for step in range(steps[dist.get_rank()]):
                model.zero_grad()
                model(own(step)).backward()
                there = [rank for rank in range(group.size()) if step < steps[rank]]
                near(grad(model), brought(there, step) / group.size(), f"{where}, step {step}")
        plain_steps(model, group)


def accumulating(group: dist.ProcessGroup) -> None:
    """Two micro-batches a step; whole steps run out."""
    model = wrap(group)
    steps = lengths(group.size())
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model.zero_grad()
            with model.no_sync():
                model(own(2 * step)).backward()
            near(grad(model), own(2 * step), f"step {step}, before")
            model(own(2 * step + 1)).backward()
            there = [rank for rank in range(group.size()) if step < steps[rank]]
            near(grad(model), brought(there, 2 * step, 2 * step + 1) / group.size(), f"step {step}")
    plain_steps(model, group)


def unused(group: dist.ProcessGroup) -> None:
    """Used by one of those present: the mean, with zeros of all others. By none: left alone."""
    model = wrap(group)
    steps, last = lengths(group.size()), group.size() - 1
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model.zero_grad()
            picked = (0, 1) if step % 2 and dist.get_rank() == last else (0,)
            model(own(step), picked).backward()
            if step % 2:
                near(grad(model, 1), given(last, step) / group.size(), f"step {step}")
            else:
                assert grad(model, 1) is None
    plain_steps(model, group)


def unused_after_an_accumulation(group: dist.ProcessGroup) -> None:
    """What a rank accumulated before it ran out is not used by anybody in later steps."""
    model = wrap(group)
    plain_steps(model, group)
    with model.join():
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                model(own(step), (0, 1) if step == 0 else (0,)).backward()
            if dist.get_rank() == 0:
                break
            model(own(step), (0,)).backward()
            if step:
                assert grad(model, 1) is None, f"step {step}: {grad(model, 1)}"
    plain_steps(model, group)


def ending_early(group: dist.ProcessGroup) -> None:
    """throw_on_early_termination: all ranks raise in the step in which the first one has ended."""
    model = wrap(group)
    done = 0
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        for step in range(2 + dist.get_rank()):
            model(own(step)).backward()
            done += 1
    assert done == 2


def optimizers_go_on_alike(group: dist.ProcessGroup) -> None:
    """Those of ranks that ended get what the others' keep: with its own momentum a rank would drift away."""
    for make in (
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
        lambda given: torch.optim.AdamW(given, lr=0.1),
        lambda given: torch.optim.SGD(given, lr=0.1),  # keeps nothing
    ):
        model, optimizer = imece.parallelize(Line(), make, "replicate", group)
        for epoch in range(2):
            steps = lengths(group.size(), shift=epoch)
            with model.join():
                for step in range(steps[dist.get_rank()]):
                    optimizer.zero_grad()
                    model(own(step)).backward()
                    optimizer.step()
        plain_steps(model, group)
        optimizer.step()
        model.check_parameters()
        kept = optimizer.state_dict()["state"]
        kinds = [[str(value) for value in each.values()] for each in kept.values()]
        assert gathered(kinds, group) == [kinds] * group.size()


def what_an_optimizer_keeps_besides(group: dist.ProcessGroup) -> None:
    """Plain values go along; of others the rank that has them warns, and each keeps its own."""

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for each in self.param_groups[0]["params"]:
                self.state[each] |= {"count": self.state[each].get("count", 0) + 1, "kind": "odd", "own": [1]}
            return super().step(closure)

    model, optimizer = imece.parallelize(
        Line(), lambda given: Odd(given, lr=0.1, momentum=0.9), "replicate", group
    )
    steps, last = lengths(group.size()), dist.get_rank() == group.size() - 1
    warns = pytest.warns(UserWarning, match=r"^Odd keeps own, which") if last else contextlib.nullcontext()
    with warns, model.join():
        for step in range(steps[dist.get_rank()]):
            optimizer.zero_grad()
            model(own(step)).backward()
            optimizer.step()
    for each in optimizer.param_groups[0]["params"]:
        state = optimizer.state[each]
        assert (state["count"], state["kind"]) == (steps[-1], "odd")
        assert ("own" in state) == bool(steps[dist.get_rank()])


def not_enabled(group: dist.ProcessGroup) -> None:
    model = wrap(group)
    first = model.reducer.buckets
    with model.join(enable=False):
        plain_steps(model, group)
    assert model.reducer.buckets is not first


def an_error_inside(group: dist.ProcessGroup) -> None:
    """An error of all ranks comes out as it is; steps after it are right."""
    model = wrap(group)
    with pytest.raises(ZeroDivisionError), model.join():
        model(own(0)).backward()
        raise ZeroDivisionError
    plain_steps(model, group)


def evaluating_inside(group: dist.ProcessGroup) -> None:
    """Forwards without gradients, whose turns those who have run out take part in."""
    model = wrap(group)
    steps = lengths(group.size())
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model.eval()
            with torch.no_grad():
                model(own(step))
            model.train()
            model.zero_grad()
            model(own(step)).backward()
            there = [rank for rank in range(group.size()) if step < steps[rank]]
            near(grad(model), brought(there, step) / group.size(), f"step {step}")
    plain_steps(model, group)


def two_models(group: dist.ProcessGroup) -> None:
    """torch's Join with two of ours."""
    first, second = wrap(group), wrap(group)
    steps = lengths(group.size())
    with Join([first, second]):
        for step in range(steps[dist.get_rank()]):
            there = [rank for rank in range(group.size()) if step < steps[rank]]
            expected = brought(there, step) / group.size()
            for model in (first, second):
                model.zero_grad()
                model(own(step)).backward()
                near(grad(model), expected, f"step {step}")
    plain_steps(first, group)
    plain_steps(second, group)


def uneven_steps(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    steps = lengths(group.size())
    with model.join():
        for step in range(steps[dist.get_rank()]):
            there = [rank for rank in range(group.size()) if step < steps[rank]]
            model.zero_grad()
            model(own(step)).backward()
            near(grad(model), brought(there, step) / group.size(), f"step {step}")
    plain_steps(model, group)


def with_a_hook(group: dist.ProcessGroup) -> None:
    """Hooks take the mean over all ranks, as torch's do."""
    model = wrap(group)
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    uneven_steps(model, group)


def ranks_that_ended_hear_who_is_not_finite(group: dist.ProcessGroup) -> None:
    """All ranks ask each other who brought it, those without inputs too."""
    model = wrap(group, check_finite=True)
    steps = lengths(group.size())
    last = group.size() - 1
    with model.join():
        for step in range(steps[dist.get_rank()]):
            model.zero_grad()
            model(own(step) * (torch.nan if step == steps[last] - 2 else 1.0)).backward()
            brought = {last: ["layers.0.weight", "layers.1.weight"]} if step == steps[last] - 2 else {}
            found = {rank: sorted(names) for rank, names in model.nonfinite.items()}
            assert found == brought, f"step {step}: {found}"
    plain_steps(model, group)


def with_a_static_graph(group: dist.ProcessGroup) -> None:
    """The first backward, in which the graph is learnt, is without some ranks."""
    uneven_steps(wrap(group, static_graph=True), group)
    inner = Repeated()
    model = DistributedDataParallel(inner, process_group=group, static_graph=True)
    with model.join():
        for step in range(lengths(group.size())[dist.get_rank()]):
            model(own(step)).backward()
    model.zero_grad()
    model(own(1)).backward()  # the ranks that had none learn it now
    alone = Repeated()
    sum(alone(given(rank, 1)) for rank in range(group.size())).div(group.size()).backward()
    near(inner.layer.weight.grad, alone.layer.weight.grad)
    assert inner.unused.weight.grad is None


def with_a_synchronised_batch_norm(group: dist.ProcessGroup) -> None:
    """Refused before training, on whatever group it is; not where it talks to nobody."""
    norm, linear = nn.BatchNorm1d(3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
    model = DistributedDataParallel(convert_sync_batchnorm(nn.Sequential(norm, linear), group))
    with pytest.raises(ValueError, match=r"join\(\) with a synchronised batch norm, 0: .*eval\(\)"):
        model.join()
    with model.join(enable=False):
        model(own(0).repeat(2, 1)).sum().backward()
    model.module.eval()
    with model.join():
        for step in range(lengths(group.size())[dist.get_rank()]):
            model(own(step)).sum().backward()


def where_units_are_gathered(group: dist.ProcessGroup) -> None:
    """Refused, by the name of the call and with what to do instead."""
    line = Line()
    optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
    model, _ = imece.parallelize(line, optimizer, "zero3", group, gather=True)
    with pytest.raises(RuntimeError, match=r"^join: strategy 'zero3' gathers .*uneven='drop'.*'zero2'$"):
        model.join()
    with model.join(enable=False):  # nothing, so a script may leave it there
        model(own(0)).backward()
        optimizer.step()


def drift_is_noticed_after_it(group: dist.ProcessGroup) -> None:
    """The comparison every so many steps goes on once join is over."""
    model = wrap(group, drift_check_every=2)
    with model.join():
        for step in range(lengths(group.size())[dist.get_rank()]):
            model(own(step)).backward()
    plain_steps(model, group)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.layers[1].weight[0, 2] += 1e-3  # type: ignore[union-attr, index]
    with pytest.raises(MismatchError, match=r"layers\.1\.weight"):
        plain_steps(model, group)


CHECKS: dict[str, Check] = {
    "divided as asked": divided_as_asked,
    "buckets are rebuilt": buckets_are_rebuilt_after_it,
    "the last one's model": the_last_ones_model_is_everybodys,
    "buffers": buffers_come_from_who_is_there,
    "a hook on buffers": a_hook_on_buffers_comes_in_its_turn,
    "accumulating": accumulating,
    "unused": unused,
    "unused after an accumulation": unused_after_an_accumulation,
    "ending early": ending_early,
    "optimizers": optimizers_go_on_alike,
    "optimizers that keep more": what_an_optimizer_keeps_besides,
    "not enabled": not_enabled,
    "an error inside": an_error_inside,
    "evaluating inside": evaluating_inside,
    "two models": two_models,
    "with a hook": with_a_hook,
    "who is not finite": ranks_that_ended_hear_who_is_not_finite,
    "with a static graph": with_a_static_graph,
    "with a synchronised batch norm": with_a_synchronised_batch_norm,
    "where units are gathered": where_units_are_gathered,
    "drift after it": drift_is_noticed_after_it,
}


ON_GLOO = [
    "divided as asked",
    "the last one's model",
    "buffers",
    "accumulating",
    "two models",
    "optimizers",
    "drift after it",
]


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (3, "shm")) + jobs(__name__, ON_GLOO, (3, "gloo")))
def test_joining(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
