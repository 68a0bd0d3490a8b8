"""imece's DistributedDataParallel alone: where gradients lie, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import distribute_tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from imece import DistributedDataParallel, convert_sync_batchnorm, parallelize
from imece.collectives import ops
from imece.collectives.shared_memory.arena import ARENAS
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.reducer import _factor
from imece.errors import MismatchError
from tests.data_parallel.branches import (
    SMALL_MB,
    Branches,
    Broken,
    Fuse,
    Fused,
    Gradients,
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
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed

# Where gradients lie.


def gradients_are_views(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
    assert len(model.reducer.buckets) > 2
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        model(own_input(step)).sum().backward()
        flats = [bucket.flat for bucket in model.reducer.buckets]
        for name, grad in gradients(model).items():
            assert grad is not None
            holders = [
                flat for flat in flats
                if flat.data_ptr() <= grad.data_ptr() and
                grad.data_ptr() + grad.nbytes <= flat.data_ptr() + flat.nbytes
            ]  # fmt: skip
            assert len(holders) == 1, f"step {step}: {name} lies in {len(holders)} buckets"
        shared = [ARENAS.locate(flat.data_ptr(), flat.nbytes) is not None for flat in flats]
        assert shared == [group.name() == "shm"] * len(flats)


def rebuilt_once_in_the_order_of_arrival(group: dist.ProcessGroup) -> None:
    module = double(Branches())
    came: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    model = wrap(module, group, bucket_cap_mb=SMALL_MB)

    def laid() -> list[list[str]]:
        return [[slot.name for slot in bucket.slots] for bucket in model.reducer.buckets]

    before = laid()
    # Ranks disagree about the order, and layer 3 comes on no rank.
    train_step(model, group, 0, [1, 0, 2] if dist.get_rank() == 0 else [2, 1, 0])
    arrived = gathered(came, group)[0]
    assert laid() == before
    train_step(model, group, 1, [3, 2, 1, 0])
    after = laid()
    assert after != before and gathered(after, group) == [after] * group.size()
    flat = [name for bucket in after for name in bucket]
    assert len(arrived) == 6 and flat[:6] == arrived
    assert set(flat[6:]) == {"layers.3.weight", "layers.3.bias"}
    for step in range(2, 4):
        train_step(model, group, step, [0, 1, 2, 3])
        assert laid() == after


def static_graph_in_the_order_of_arrival(group: dist.ProcessGroup) -> None:
    """The first backward of a static graph learns how often each gradient comes: the last time counts."""
    laid = []
    for static in (False, True):
        model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB, static_graph=static)
        for step in range(2):
            train_step(model, group, step, [0, 2, 1, 3])
        laid.append([slot.name for bucket in model.reducer.buckets for slot in bucket.slots])
    assert laid[0] == laid[1]
    assert [name.removeprefix("layers.")[0] for name in laid[1]] == list("33112200")


def order_after_two_backwards(group: dist.ProcessGroup) -> None:
    """The first order is that of one backward, though two have passed before the next forward."""
    model = wrap(double(Branches()), group)
    first, second = model(own_input(0)), model(own_input(1), [2, 0])
    first.sum().backward()
    second.sum().backward()
    for step in range(2):
        train_step(model, group, step)


def a_rank_that_uses_nothing(group: dist.ProcessGroup) -> None:
    """In the first backward one rank's output has a gradient, but no parameter has."""
    model = wrap(double(Branches(2)), group)
    for step in range(3):
        picked = [] if dist.get_rank() == 0 and step == 0 else [0, 1]
        x = own_input(step).requires_grad_()
        alone = copy.deepcopy(model.module)
        expected = mean_over(group, alone, lambda alone, *inputs: (alone(*inputs) * 1.0).sum(), x, picked)
        model.zero_grad()
        (model(x * 1.0, picked) * 1.0).sum().backward()
        same(gradients(model), expected)


# no_sync, failures.


def fail_if_blown(_: torch.Tensor) -> None:
    if Fuse.blown:
        raise Broken


def no_sync_ends_with_its_body(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    with pytest.raises(Broken), model.no_sync():
        assert not model.require_backward_grad_sync
        raise Broken
    assert model.require_backward_grad_sync
    with model.no_sync():
        with pytest.raises(Broken), model.no_sync():
            raise Broken
        assert not model.require_backward_grad_sync
    train_step(model, group)


def no_sync_stays_local(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    for step in range(3):
        alone = copy.deepcopy(model.module)
        alone(own_input(step)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(own_input(step)).sum().backward()
        same(gradients(model), gradients(alone))
        train_step(model, group, step)


def a_step_after_a_failed_backward(group: dist.ProcessGroup) -> None:
    for fails_at in (0, 2):
        for cap in (25, SMALL_MB):  # no bucket has left, some have left
            model = wrap(double(Fused()), group, bucket_cap_mb=cap)
            for step in range(fails_at + 3):
                if step == fails_at:
                    model.zero_grad()
                    with blown():
                        model(own_input(step)).sum().backward()
                else:
                    train_step(model, group, step)


def a_failed_backward_again(group: dist.ProcessGroup) -> None:
    """Its graph goes through once more, without a forward between: as if it had not been tried."""
    for cap, module in ((25, Branches()), (25, Fused()), (SMALL_MB, Fused())):  # fails before all, or within
        model = wrap(double(module), group, bucket_cap_mb=cap)
        for step in range(3):
            x = own_input(step)
            expected = mean_over(group, model.module, total, x)
            model.zero_grad()
            output = model(x)
            if not isinstance(module, Fused):
                output.register_hook(fail_if_blown)
            loss = output.sum()
            with blown():
                loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
            same(gradients(model), expected)


def no_sync_after_a_failed_backward(group: dist.ProcessGroup) -> None:
    for cap in (25, SMALL_MB):
        model = wrap(double(Fused()), group, bucket_cap_mb=cap)
        train_step(model, group)
        model.zero_grad()
        with blown():
            model(own_input(1)).sum().backward()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        alone(own_input(2)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(own_input(2)).sum().backward()
        same(gradients(model), gradients(alone))
        train_step(model, group, 3)


def a_second_gradient_is_refused(group: dist.ProcessGroup) -> None:
    """Re-entrant checkpoints that share a parameter: refused by name; right with static_graph."""

    class Twice(Branches):
        def forward(self, x: torch.Tensor, picked: list[int] | None = None) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for index in (0, 1, 0):
                x = checkpoint(self.layers[index], x, use_reentrant=True)
            return x

    model = wrap(double(Twice(2)), group)
    words = r"layers\.0\.\w+ got a second gradient.*use_reentrant=False to checkpoint\(\)"
    with pytest.raises(RuntimeError, match=f"{words}, or static_graph=True to DistributedDataParallel$"):
        model(own_input()).sum().backward()
    sharded, _ = parallelize(double(Twice(2)), lambda given: torch.optim.SGD(given, lr=0.1), "zero1", group)
    with pytest.raises(RuntimeError, match=f"{words}$"):  # parallelize has no such argument
        sharded(own_input()).sum().backward()
    model = wrap(double(Twice(2)), group, static_graph=True)
    for step in range(3):
        train_step(model, group, step)


def a_static_graph_that_changes(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches(2)), group, static_graph=True)
    train_step(model, group, 0, [0, 1])
    train_step(model, group, 1, [0, 1])
    with pytest.raises(RuntimeError, match=r"static_graph=True, but parameter layers\.0"):
        model(own_input(), [1]).sum().backward()


# Unused parameters.


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (1,), (257,)])
def test_gradients_are_multiplied_to_the_bits_of_a_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for number in (1.0, 0.5, 1 / 3, 1 / 7, 1e-9):
        for _ in range(20):
            grad, out = torch.randn(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            torch.mul(grad, _factor(number, dtype), out=out)
            assert torch.equal(out, grad * number)


def unused_everywhere_is_left_alone(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    parameter = model.module.layers[3].weight
    for step in range(3):
        train_step(model, group, step, [0, 1, 2])
        assert parameter.grad is None
    foreign = torch.full_like(parameter, dist.get_rank() + 1.0)
    parameter.grad = foreign
    model(own_input(), [0, 1]).sum().backward()
    assert parameter.grad is foreign and foreign.eq(dist.get_rank() + 1.0).all()
    train_step(model, group, 3)
    view, values = parameter.grad, parameter.grad.clone()
    assert view is not foreign
    model(own_input(), [0]).sum().backward()
    assert parameter.grad is view and torch.equal(view, values)


def used_by_some_rank_is_the_mean(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
    rank = dist.get_rank()
    for step in range(4):
        train_step(model, group, step, [rank, 2] if step % 2 else [(rank + step) % 2, 3])
    # Not zeroed: what was there stays, once.
    before = {name: None if grad is None else grad.clone() for name, grad in gradients(model).items()}
    more = mean_over(group, model.module, total, own_input(9), [rank])
    model(own_input(9), [rank]).sum().backward()
    expected = {
        name: (before[name] if grad is None else grad + (0 if before[name] is None else before[name]))  # type: ignore[operator]
        for name, grad in more.items()
    }
    same(gradients(model), expected)


def frozen_later(group: dist.ProcessGroup) -> None:
    model = wrap(double(Branches()), group)
    train_step(model, group)
    model.module.layers[1].requires_grad_(False)
    for step in range(2):
        train_step(model, group, step)


def thawed_later(group: dist.ProcessGroup) -> None:
    module = double(Branches())
    module.layers[1].requires_grad_(False)  # type: ignore[index]
    model = wrap(module, group)
    train_step(model, group, 0, [0, 2, 3])
    module.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight was frozen when the model was wrapped"):
        model(own_input())
    with torch.no_grad():
        model(own_input())


def frozen_as_a_whole(group: dist.ProcessGroup) -> None:
    """Before its first forward, as a discriminator is while the generator takes its step."""
    made, judge = wrap(double(Branches(2)), group), wrap(double(Branches(2)), group)
    judge.requires_grad_(False)
    both = nn.ModuleList([copy.deepcopy(made.module), copy.deepcopy(judge.module)])
    expected = mean_over(group, both, lambda both, x: both[1](both[0](x)).sum(), own_input())
    judge(made(own_input())).sum().backward()
    got = {f"0.{name}": each for name, each in gradients(made).items()}
    same(got | {f"1.{name}": each for name, each in gradients(judge).items()}, expected)
    judge.check_parameters()
    with torch.no_grad():
        judge.module.layers[1].bias += dist.get_rank()
    with pytest.raises(MismatchError, match=r"layers\.1\.bias on all ranks \(of 4 parameters\)"):
        judge.check_parameters()
    judge.requires_grad_(True)
    train_step(judge, group)


def gradients_with_other_memory(group: dist.ProcessGroup) -> None:
    """`grad.data = ...` takes a gradient out of its bucket, and so does `model.to()`."""
    model = wrap(double(Branches()), group)
    for step in range(5):
        train_step(model, group, step)
        if step % 2:
            for each in model.parameters():
                each.grad.data = each.grad.data.clamp(-1e-3, 1e-3)
        else:
            model.to(torch.float32).to(torch.float64)
    expected = mean_over(group, model.module, total, own_input(9))
    for each in model.parameters():
        each.grad.data = each.grad.data.clone()
    before = {name: each.clone() for name, each in gradients(model).items() if each is not None}
    model(own_input(9)).sum().backward()  # is added to what all ranks have alike
    same(gradients(model), {name: before[name] + each for name, each in expected.items() if each is not None})
    for steps in (1, 2):  # buckets are laid anew after the first
        model = wrap(Branches(), group)
        for step in range(steps):
            model(own_input(step).float()).sum().backward()
        model.double()
        words = r"layers\.\d\.\w+ was float32\[.*\] on cpu .* is float64\[.*\] on cpu now"
        with pytest.raises(RuntimeError, match=words):
            model(own_input()).sum().backward()
    model = wrap(nn.Linear(4, 2), group)
    for steps in (0, 1, 2):
        for _ in range(steps):
            model.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
        model.zero_grad()
        kept = [each.data for each in model.parameters()]
        model.module.weight.data, model.module.bias.data = torch.ones(3, 4), torch.ones(3)
        words = (
            r"parameter weight was float32\[2, 4\] on cpu .*, and is float32\[3, 4\] on cpu now: change it"
        )
        with pytest.raises(RuntimeError, match=words):
            model(torch.randn(3, 4)).sum().backward()
        model.module.weight.data, model.module.bias.data = kept
    model.double()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"was float32\[.*\] on cpu .* is float64\[.*\] on cpu now"):
        model(torch.randn(3, 4).double()).sum().backward()


def gradients_that_are_other_objects(group: dist.ProcessGroup) -> None:
    """In the same memory: they stay, and are added to, when buckets are laid anew and after that."""
    for when in range(3):
        model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
        before: Gradients = {}
        for step in range(4):
            picked = [0, 1] if step == 2 else None  # others are unused on all ranks
            added = mean_over(group, model.module, total, own_input(step), picked)
            total(model, own_input(step), picked).backward()
            before = plus(before, added) if before else added
            same(gradients(model), before)
            if step == when:
                for each in model.parameters():
                    each.grad = each.grad.detach()


def a_step_after_a_failed_end(group: dist.ProcessGroup) -> None:
    """What ends a backward may raise: a hook's future does here."""
    fails = [False]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if fails[0]:
            future.set_exception(Broken("here"))  # type: ignore[arg-type]
        else:
            ops.all_reduce(bucket.buffer().div_(group.size()), group=group)
            future.set_result(bucket.buffer())
        return future

    model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB)
    model.register_comm_hook(None, hook)
    for step in range(4):
        train_step(model, group, step)
        fails[0] = True
        with pytest.raises(Exception, match="here"):
            model(own_input(step)).sum().backward()
        fails[0] = False


def evaluation_is_local(group: dist.ProcessGroup) -> None:
    """Without gradients one rank may call forward alone."""
    model = wrap(double(Branches()), group)
    train_step(model, group)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.eval()(own_input())
    dist.barrier(group)
    train_step(model, group, 1)


class Added(nn.Module):
    """A layer that is frozen, and a small one that is trained beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.small = base, double(nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x) + self.small(x))


def newcomers(group: dist.ProcessGroup) -> None:
    """Parameters that nobody reduces are named after the first backward, on all ranks. Those that get no
    gradient, as of a teacher that is put into the model, or that another model reduces, are not."""

    def head(model: Any) -> None:
        model.module.layers[3] = double(nn.Linear(3, 3))

    def beside(model: Any) -> None:
        model.requires_grad_(False)
        model.module.layers[3] = Added(model.module.layers[3])

    def one_more(model: Any) -> None:
        model.module.layers[3] = Added(model.module.layers[3])  # nothing goes unused

    def assigned(model: Any) -> None:
        state = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def sharded(module: nn.Module) -> Any:
        model, _ = parallelize(module, torch.optim.SGD(module.parameters()), "zero2", group)
        return model

    named = {
        head: "layers.3.weight", beside: "layers.3.small.weight", one_more: "layers.3.small.weight",
        assigned: "layers.0.weight",
    }  # fmt: skip
    for change, name in named.items():
        for make in (lambda module: wrap(module, group), sharded):
            if change is assigned and make is sharded:
                continue
            model = make(double(Branches()))
            total(model, own_input()).backward()
            total(model, own_input(), [0, 3]).backward()  # others stay unused now and then
            total(model, own_input()).backward()
            change(model)
            with pytest.raises(RuntimeError) as caught:
                total(model, own_input()).backward()
            assert str(caught.value) == (
                f"parameter {name} came after the model was wrapped, and no other rank sees its gradient: "
                f"wrap the model again, with a new optimizer, or put the name into model.parameters_to_ignore"
            )
    model = wrap(double(Branches()), group)
    head(model)
    model.parameters_to_ignore |= {"layers.3.weight", "layers.3.bias"}
    model.module.teacher = double(nn.Linear(3, 3))
    total(model, own_input()).backward()
    model = wrap(double(Branches()), group)
    model.module.layers[3] = Added(model.module.layers[3])
    model.module.layers[3].small = wrap(double(nn.Linear(3, 3)), group)
    total(model, own_input()).backward()
    model = wrap(double(nn.Linear(3, 3)), group)
    instead = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    for _ in range(2):
        torch.func.functional_call(model, instead, (own_input(),)).sum().backward()
    assert all(each.grad is not None for each in instead.values())


def complex_parameters(group: dist.ProcessGroup) -> None:
    """As with torch's class. The future of torch's hook gives real numbers, two for one."""
    for hook in (None, default_hooks.allreduce_hook):
        model = wrap(nn.Linear(3, 2, dtype=torch.complex128), group)
        if hook is not None:
            model.register_comm_hook(group, hook)
        for step in range(2):
            x = own_input(step).to(torch.complex128) * (1 + 2j)
            alone = copy.deepcopy(model.module)
            alone.zero_grad()
            alone(x).abs().sum().backward()
            model.zero_grad()
            model(x).abs().sum().backward()
            for name, parameter in alone.named_parameters():
                assert parameter.grad is not None
                parts = torch.view_as_real(parameter.grad).clone()
                dist.all_reduce(parts, group=group)
                same({name: gradients(model)[name]}, {name: torch.view_as_complex(parts / group.size())})


def a_group_of_one(group: dist.ProcessGroup) -> None:
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = wrap(double(Branches()), mine)
    for step in range(3):
        train_step(model, mine, step, [0, 1])


# Names, copies.


def names_are_torchs(group: dist.ProcessGroup) -> None:
    ours = wrap(double(Branches()), group)
    theirs = nn.parallel.DistributedDataParallel(double(Branches()), process_group=group)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert next(iter(ours.state_dict())) == "module.layers.0.weight"
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    for step in range(2):
        train_step(ours, group, step)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    nothing_like_them = {"broadcast_bucket_size", "logger", "use_side_stream_for_tensor_copies"}
    assert public - set(dir(ours)) == nothing_like_them, "docs/ddp.md names them"
    for call in ("scatter", "to_kwargs"):
        assert getattr(ours, call)(("a",), {"k": 1}, [0] if call == "scatter" else 0) == (
            (("a",),), ({"k": 1},),
        )  # fmt: skip
    assert ours.gather([{"k": None}], 0) == {"k": None}
    ours._remove_autograd_hooks()
    own = copy.deepcopy(ours.module)
    for each in (own, ours):
        each.zero_grad()
        each(own_input()).sum().backward()
    same(gradients(ours), gradients(own))


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies_train(group: dist.ProcessGroup) -> None:
    """On the default group, as torch wants it; copies share nothing with their original."""
    world = dist.group.WORLD
    assert world is not None
    options: dict[str, Any] = {"bucket_cap_mb": SMALL_MB, "static_graph": True, "average": "tokens"}
    original = DistributedDataParallel(double(Branches()), **options)
    original.weigh(original(own_input()).sum(), 1).backward()
    for twin in (copy.deepcopy(original), saved_and_loaded(original)):
        assert all(each is None for each in gradients(twin).values())
        assert twin.static_graph and len(twin.reducer.buckets) == len(original.reducer.buckets) > 1
        same(dict(twin.state_dict()), dict(original.state_dict()))
        before = {name: grad.clone() for name, grad in gradients(original).items() if grad is not None}
        for step in range(3):
            expected = mean_over(world, twin.module, total, own_input(step))
            twin.zero_grad()
            twin.weigh(twin(own_input(step)).sum(), 3).backward()
            same(gradients(twin), expected)
            with torch.no_grad():
                for parameter in twin.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
        same(gradients(original), before)
    original.zero_grad()
    expected = mean_over(world, original.module, total, own_input(1))
    original.weigh(original(own_input(1)).sum(), 2).backward()
    same(gradients(original), expected)

    model = DistributedDataParallel(double(Branches())).requires_grad_(False)
    twin = copy.deepcopy(model)
    assert not any(each.requires_grad for each in twin.parameters())
    train_step(twin.requires_grad_(True), world)

    with pytest.raises(RuntimeError, match="default process group"):
        copy.deepcopy(wrap(double(Branches()), group))


# What is refused.


def frozen() -> nn.Module:
    return Branches().requires_grad_(False)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))


def without_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def without_memory() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def divided_by_torch() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh_of((dist.get_world_size(),))))
    return layer


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple("abc"[: len(shape)]))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "nothing to train": (frozen, {}, RuntimeError, "doesn't have any parameter that requires a gradient"),
    "sparse": (sparse, {}, ValueError, "1 has sparse gradients.*sparse=False"),
    "no shape": (without_shape, {}, RuntimeError, r"parameter 1\.weight has no shape yet"),
    "no memory": (without_memory, {}, ValueError, r"1\.weight is on the meta device.*to_empty\(\)"),
    "a DTensor": (divided_by_torch, {}, ValueError, "weight is a DTensor: .*fully_shard"),
    "mixed_precision": (Branches, {"mixed_precision": object()}, ValueError, "mixed_precision.*autocast"),
    "two devices": (Branches, {"device_ids": [0, 1]}, ValueError, r"one device of this rank, not \[0, 1\]"),
    "a device, no list": (Branches, {"device_ids": 0}, TypeError, "device_ids: an int, where a list of one"),
    "a device on CPU": (Branches, {"device_ids": [0]}, ValueError, "this one is on cpu: leave both"),
    "an output device on CPU": (Branches, {"output_device": 0}, ValueError, "this one is on cpu: leave both"),
    "delayed": (
        Branches,
        {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": None},
        ValueError,
        "delay_all_reduce_named_params is not supported",
    ),
    "wire": (Branches, {"wire": "fp8"}, ValueError, "unknown wire 'fp8': None, 'bf16' or 'int8'"),
    "schedule": (Branches, {"schedule": "rings"}, ValueError, "'rings' of all_reduce: did you mean 'ring'"),
    "overlap": (Branches, {"overlap": "auto"}, ValueError, "overlap='auto': True, False, or None"),
    "average": (Branches, {"average": "words"}, ValueError, "'words'.*ranks, samples, tokens"),
    **{
        f"cap {cap}": (Branches, {"bucket_cap_mb": cap}, ValueError, re.escape(f"bucket_cap_mb={cap}"))
        for cap in (0, -1, True, float("nan"), float("inf"), [], [25, 0])
    },
    "bucket_cap_mb in words": (Branches, {"bucket_cap_mb": "large"}, ValueError, "bucket_cap_mb='large'"),
    "bucket_cap_mb in bytes": (Branches, {"bucket_cap_mb": 25 * 2**20}, ValueError, "MiB, not bytes"),
    "bucket_cap_mb_list": (Branches, {"bucket_cap_mb_list": [1, -2]}, ValueError, "more than 0"),
    "drift_check_every": (Branches, {"drift_check_every": -1}, ValueError, "drift_check_every=-1: a whole"),
}  # fmt: skip


def refused_with_the_reason(group: dist.ProcessGroup) -> None:
    assert isinstance(next(without_shape()[1].parameters()), UninitializedParameter)  # type: ignore[index]
    for name, (build, options, kind, words) in REFUSED.items():
        try:
            wrap(build(), group, **options)
        except kind as error:
            assert re.search(words, str(error)), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} is not refused")
    with pytest.raises(TypeError, match=r"^the class Branches is no model: imece\.DistributedDataParallel"):
        wrap(Branches, group)  # type: ignore[arg-type]
    late = nn.Embedding(3, 2)
    model = wrap(late, group)
    late.sparse = True  # as in a call of functional.embedding, which nobody sees before
    with pytest.raises(RuntimeError, match=r"parameter weight got a sparse gradient, .*: use sparse=False"):
        model(torch.tensor([0])).sum().backward()
    line = mesh_of((dist.get_world_size(),))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        wrap(Branches(), group, device_mesh=line)
    with pytest.raises(TypeError, match=r"device_mesh: a list is no DeviceMesh"):
        DistributedDataParallel(Branches(), device_mesh=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        DistributedDataParallel(Branches(), device_mesh=mesh_of((1, dist.get_world_size())))
    train_step(DistributedDataParallel(double(Branches()), device_mesh=line), group)


def overlapped_or_not(group: dist.ProcessGroup) -> None:
    """When buckets leave changes no bit of the gradients. By default early only where a core is free."""
    start = copy.deepcopy(Branches())
    found: dict[bool, list[Any]] = {True: [], False: []}
    for overlap in found:
        model = wrap(copy.deepcopy(start), group, bucket_cap_mb=SMALL_MB, overlap=overlap)
        model.record_trace()
        for step, picked in enumerate(([0, 1, 2, 3], [0, 2, 3], [dist.get_rank(), 3], [1, 1, 2])):
            model.zero_grad()
            model(own_input(step).float(), picked).sum().backward()
            found[overlap].append(
                {name: None if each is None else each.clone() for name, each in gradients(model).items()}
            )
            trace = model.last_trace
            early = [bucket.launched_s < trace.backward_end_s for bucket in trace.buckets]
            assert len(early) > 1 and not (any(early) and not overlap), early
            assert step or any(early) == overlap, "all are used in the first step, so nothing has to wait"
            assert all(bucket.launched_s <= bucket.done_s <= trace.end_s for bucket in trace.buckets)
    for ours, others in zip(*found.values(), strict=True):
        for name, each in ours.items():
            assert (each is None and others[name] is None) or torch.equal(each, others[name]), name
    shared = isinstance(group, SharedMemoryGroup)
    before = torch.get_num_threads()
    try:
        for threads, expected in ((1, group.size() < len(os.sched_getaffinity(0))), (64, False)):
            torch.set_num_threads(threads)
            model = wrap(copy.deepcopy(start), group)
            assert model.reducer.leaving.overlap == (expected or not shared), threads
    finally:
        torch.set_num_threads(before)


class Forked(nn.Module):
    """A batch norm, and behind it a branch that not all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.head, self.branch = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, forks: bool) -> torch.Tensor:
        x = self.norm(self.body(x))
        return self.head(x) + self.branch(x) if forks else self.head(x)  # type: ignore[no-any-return]


def beside_a_synchronised_batch_norm(group: dist.ProcessGroup) -> None:
    """Its own sum must not meet a bucket: on a rank with an unused parameter that leaves later than it."""
    ranks = range(group.size())
    beside = dist.new_group(timeout=timedelta(seconds=10))
    for norms, early in ((group, False), (beside, True)):
        module = convert_sync_batchnorm(double(Forked()), norms)
        model = wrap(module, group, bucket_cap_mb=SMALL_MB, overlap=True)
        model.record_trace()
        one: Any = double(Forked())
        one.load_state_dict(module.state_dict())
        for step in range(3):
            xs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).double() for rank in ranks]
            model.zero_grad()
            model(xs[group.rank()], forks=step == 0 or group.rank() == 0).square().sum().backward()
            left_early = [
                each.launched_s < model.last_trace.backward_end_s for each in model.last_trace.buckets
            ]
            assert any(left_early) == early or (step and group.rank()), left_early
            one.zero_grad()
            x = one.norm(one.body(torch.cat(xs)))
            forked = torch.arange(len(x)).view(-1, 1) < (4 if step else len(x))
            y = one.head(x) + one.branch(x) * forked
            (y.square().sum() / group.size()).backward()
            same(gradients(model), gradients(one))
    dist.destroy_process_group(beside)
    copied = copy.deepcopy(DistributedDataParallel(convert_sync_batchnorm(Forked())))
    assert list(copied.reducer._line.crossing) == [copied.module], "the first one is gone"
    static = DistributedDataParallel(convert_sync_batchnorm(Forked()), static_graph=True)
    assert static.module not in static.reducer._line.crossing, "all ranks use the same"


class Summed(torch.autograd.Function):
    """The sum over ranks by imece's own calls; that of gradients is no small one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return ops.all_reduce(x.clone(), group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        room = grads[0].new_zeros(5000)
        room[: grads[0].numel()] = grads[0].flatten()
        return ops.all_reduce(room, group=ctx.group)[: grads[0].numel()].view_as(grads[0]), None


class Contrastive(nn.Module):
    """Features of all ranks, with their gradient, and heads of which each rank uses one."""

    def __init__(self, gather: Callable[[torch.Tensor, dist.ProcessGroup], Any] = all_gather) -> None:
        super().__init__()
        self.gather = gather
        self.body, self.middle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, group: dist.ProcessGroup, head: int) -> torch.Tensor:
        x = self.body(x)
        everywhere = torch.stack(tuple(self.gather(x, group))).mean((0, 1))
        return self.heads[head](self.middle(x * everywhere))  # type: ignore[no-any-return]


def beside_collectives_in_its_graph(group: dist.ProcessGroup) -> None:
    """The flag, or no overlap, says that ranks come to them and to buckets as they like."""
    for gather, options in itertools.product(
        (all_gather, lambda x, group: [Summed.apply(x, group)]),  # type: ignore[no-untyped-call]
        ({"find_unused_parameters": True, "overlap": True}, {"overlap": False}),
    ):
        model = wrap(double(Contrastive(gather)), group, bucket_cap_mb=SMALL_MB, **options)
        for step in range(4):
            loss_step(model, group, total, own_input(step), group, (step + group.rank()) % 2)
    static = wrap(Contrastive(), group, find_unused_parameters=True, static_graph=True)
    assert static.module not in static.reducer._line.crossing, "all ranks use the same"


def a_flag_out_of_habit(group: dist.ProcessGroup) -> None:
    """A model that makes no collectives in backward overlaps from the second one on."""
    for average in ("ranks", "tokens"):
        model = wrap(
            double(Forked()), group, bucket_cap_mb=SMALL_MB, overlap=True, average=average,
            find_unused_parameters=True,
        )  # fmt: skip
        model.record_trace()
        for step in range(3):
            loss = model(own_input(step), forks=True).square().mean()
            (model.weigh(loss, 1) if average == "tokens" else loss).backward()
            trace = model.last_trace
            early = [each.launched_s < trace.backward_end_s for each in trace.buckets]
            assert any(early) == (step > 0), (average, step, early)


def one_rank_alone_evaluates(group: dist.ProcessGroup) -> None:
    """Through the wrapper it broadcasts buffers, which the others do not: the error says what to call."""
    model = DistributedDataParallel(nn.BatchNorm1d(4), process_group=group)
    model.eval()
    if dist.get_rank() == 0:
        model.module(torch.ones(2, 4))
    with pytest.raises(
        MismatchError, match=r"\(buffers before forward; one rank alone calls model\.module\)"
    ):
        if dist.get_rank() == 0:
            model(torch.ones(2, 4))
        else:
            model.check_parameters()


def rows_that_forward_shortens(group: dist.ProcessGroup) -> None:
    """Each rank shortens the rows that it looks up: a warning says so, and its cure keeps ranks alike."""
    with pytest.warns(
        UserWarning, match=r"^0 has max_norm=1\.0: .* drift apart.*weight\.renorm_\(2\.0, 0, 1"
    ):
        model = wrap(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), group)
    words = torch.arange(2) + 2 * dist.get_rank()
    model(words).sum().backward()
    with pytest.raises(MismatchError, match=r"drifted apart: 0\.weight"):
        model.check_parameters()
    with warnings.catch_warnings(action="error"):
        model = wrap(nn.Sequential(nn.Embedding(9, 4)), group)
    model(words).sum().backward()
    with model.gathered(write=True), torch.no_grad():
        model.module[0].weight.renorm_(2.0, 0, 1.0)
    assert model.module[0].weight.norm(dim=1).max() < 1.001
    model.check_parameters()


CHECKS: dict[str, Check] = {
    "rows that forward shortens": rows_that_forward_shortens,
    "one rank alone evaluates": one_rank_alone_evaluates,
    "beside collectives in its graph": beside_collectives_in_its_graph,
    "a flag out of habit": a_flag_out_of_habit,
    "beside a synchronised batch norm": beside_a_synchronised_batch_norm,
    "overlapped or not": overlapped_or_not,
    "gradients are views": gradients_are_views,
    "rebuilt once": rebuilt_once_in_the_order_of_arrival,
    "order after two backwards": order_after_two_backwards,
    "order of a static graph": static_graph_in_the_order_of_arrival,
    "no_sync ends with its body": no_sync_ends_with_its_body,
    "no_sync stays local": no_sync_stays_local,
    "a failed backward": a_step_after_a_failed_backward,
    "a failed backward again": a_failed_backward_again,
    "no_sync after a failed backward": no_sync_after_a_failed_backward,
    "a second gradient": a_second_gradient_is_refused,
    "a static graph that changes": a_static_graph_that_changes,
    "unused everywhere": unused_everywhere_is_left_alone,
    "used by some rank": used_by_some_rank_is_the_mean,
    "frozen later": frozen_later,
    "thawed later": thawed_later,
    "frozen as a whole": frozen_as_a_whole,
    "gradients with other memory": gradients_with_other_memory,
    "gradients that are other objects": gradients_that_are_other_objects,
    "a failed end": a_step_after_a_failed_end,
    "evaluation": evaluation_is_local,
    "complex parameters": complex_parameters,
    "a group of one": a_group_of_one,
    "names": names_are_torchs,
    "copies": copies_train,
    "refused": refused_with_the_reason,
    "a rank that uses nothing": a_rank_that_uses_nothing,
    "newcomers": newcomers,
}

# Where the order of collectives matters.
ON_GLOO = [
    "a flag out of habit", "beside collectives in its graph", "beside a synchronised batch norm",
    "overlapped or not", "gradients are views", "rebuilt once", "order after two backwards",
    "no_sync stays local", "a failed backward", "no_sync after a failed backward", "unused everywhere",
    "used by some rank", "a rank that uses nothing",
]  # fmt: skip


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm")) + jobs(__name__, ON_GLOO, (3, "gloo")))
def test_replicate(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
