"""torch's own functions on a sharded model's parameters do what they promise, or say why not."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_ as by_its_own_name
from torch.nn.utils import clip_grad_value_ as value_by_its_own_name

import imece
from imece.data_parallel import other_models
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


Clip = Callable[[Any, Any], "torch.Tensor | None"]
CLIPS: list[Clip] = [
    lambda whole, _: nn.utils.clip_grad_norm_(whole.parameters(), 0.5),
    lambda _, part: nn.utils.clip_grad_norm_(part.get_submodule("2").parameters(), 0.25),
    lambda _, part: nn.utils.clip_grad_norm_(part.get_parameter("0.weight"), max_norm=0.1, norm_type=2),
    lambda whole, _: nn.utils.clip_grad_norm_(whole.parameters(), 0.02, norm_type=float("inf")),
    lambda _, part: nn.utils.clip_grad_norm_(part.get_submodule("0").parameters(), 0.5, norm_type=1),
    lambda whole, _: by_its_own_name(whole.parameters(), 0.05),
    lambda whole, _: nn.utils.clip_grad_value_(whole.parameters(), 0.01),
    lambda whole, _: value_by_its_own_name(whole.parameters(), 0.005),
    lambda _, part: nn.utils.clip_grad_value_(part.get_submodule("0").parameters(), 0.01),
]


def clip(strategy: str) -> None:
    """As a plain model's are."""
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
                torch.testing.assert_close(whole.get_parameter(name), each, rtol=1e-12, atol=1e-12)


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """The first group has one small bias, of which most ranks own nothing, and what is frozen."""
    first = [model.get_parameter(name) for name in ("2.bias", "frozen")]
    others = [each for each in model.parameters() if not any(each is one for one in first)]
    return torch.optim.SGD([{"params": first}, {"params": others}], lr=0.1)


def in_groups(optimizer: torch.optim.Optimizer, groups: slice) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups[groups] for each in group["params"]]


def in_two_calls(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    given = in_groups(optimizer, slice(1))
    norm = nn.utils.get_total_norm([each.grad for each in given if each.grad is not None])
    nn.utils.clip_grads_with_norm_(given, 0.02, norm)
    return norm


BY_GROUPS: list[Callable[[torch.optim.Optimizer], torch.Tensor | None]] = [
    lambda optimizer: nn.utils.clip_grad_norm_(in_groups(optimizer, slice(2)), 0.05),
    lambda optimizer: by_its_own_name(in_groups(optimizer, slice(1)), 0.03, norm_type=float("inf")),
    lambda optimizer: by_its_own_name(
        [each for each in in_groups(optimizer, slice(1)) if each.grad is not None], 0.02
    ),
    lambda optimizer: nn.utils.clip_grad_value_(in_groups(optimizer, slice(2)), 0.001),
    in_two_calls,
]


def clip_by_groups(strategy: str, gather: bool) -> None:
    """What an optimizer's groups hold are this rank's parts, perhaps none: the norm is over all ranks."""
    gc.collect()  # a rank without a part must know which model is meant
    alone, whole = made(), made()
    sgd = groups_of(alone)
    model, optimizer = wrap(whole, groups_of(whole), strategy, gather=gather)
    assert dist.get_rank() == 0 or len(optimizer.param_groups[0]["params"]) == 1, "rank 1 has a part of it"
    for call in BY_GROUPS:
        sgd.zero_grad()
        optimizer.zero_grad()
        loss(alone).backward()
        loss(model).backward()
        expected, norm = call(sgd), call(optimizer)
        if expected is not None:
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        sgd.step()
        optimizer.step()
        assert_alike(model, alone)
    loss(model).backward()
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    both = [*in_groups(optimizer, slice(2)), other]
    with pytest.raises(ValueError, match="models, one of them sharded or divided: call it for each model"):
        nn.utils.clip_grad_norm_(both, 1.0)
    with pytest.raises(ValueError, match="models, one of them sharded or divided: call it for each model"):
        nn.utils.get_total_norm([each.grad for each in both if each.grad is not None])
    second, _ = wrap(nn.Linear(9, 9), lambda given: torch.optim.SGD(given, lr=0.1), strategy)
    with pytest.raises(ValueError) as caught:
        nn.utils.clip_grad_norm_([], 1.0)
    assert str(caught.value) == (
        "this rank has no part of what is to be clipped, and there are several sharded models: call "
        "model.clip_grad_norm_ of the one that is meant, or give its parameters"
    )
    assert float(nn.utils.clip_grad_norm_(nn.Linear(1, 1).parameters(), 1.0)) == 0.0
    del second


def hooked(strategy: str) -> None:
    """A hook of the user's of before `parallelize` sees a whole step."""
    alone, whole = made(), made()
    seen: list[dict[str, torch.Tensor]] = []

    def stepper(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = sgd_of(model)
        optimizer.register_step_post_hook(
            lambda *_: seen.append({name: each.detach().clone() for name, each in model.named_parameters()})
        )
        return optimizer

    model, optimizer = wrap(whole, stepper(whole), strategy)
    for each, one in ((model, optimizer), (alone, stepper(alone))):
        loss(each).backward()
        one.step()
    dist.barrier()
    for name in seen[0]:
        torch.testing.assert_close(seen[0][name], seen[1][name], rtol=1e-12, atol=1e-12)


def frozen_by_groups(strategy: str, gather: bool) -> None:
    """What is frozen in an optimizer's groups gets no gradient, and keeps the one that it has."""
    alone, whole = made(), made()
    sgd = groups_of(alone)
    model, optimizer = wrap(whole, groups_of(whole), strategy, gather=gather)
    for turn in range(6):
        for each, one in ((model, optimizer), (alone, sgd)):
            for parameter in in_groups(one, slice(1, 2)):
                parameter.requires_grad = turn % 3 == 0
            if turn != 4:  # then there is one of before
                one.zero_grad()
            loss(each).backward()
            if turn != 3:
                one.step()
        assert_alike(model, alone)


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
    with says(r"model\.clip_grad_norm_\(max_norm\), or by torch\.nn\.utils\.clip_grad_norm_"):
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0))
    with says("norm_type=0.0: a norm of gradients is of a number above 0, or inf", ValueError):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)
    with says(r"clip_grad_norm_\(a generator\): the largest norm, as 1\.0, and no parameters", TypeError):
        model.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]
    for wrong in (-1.0, float("nan")):
        with says(rf"clip_grad_norm_\({wrong}\): the largest norm, from 0", ValueError):
            model.clip_grad_norm_(wrong)
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
    for synchronised_too in (False, True) if strategy != "zero3" else ():
        if synchronised_too:
            loss(model).backward()
        loss(model.module).backward()
        with says(
            r"SGD would leave out the gradient of 0\.weight, which is of this rank alone.*call model\(.*"
            r"If your own code set it, let it set those of the parts, which are in optimizer\.param_groups"
        ):
            optimizer.step()
        optimizer.zero_grad()
    loss(model).backward()
    assert isinstance(model, ShardedDataParallel)
    infinite = model.sharding.parts[0].parameter.grad
    assert infinite is not None
    for value, norm_type in (("inf", 2.0), ("nan", float("inf"))):
        infinite.fill_(float(value))
        with says(f"the norm of the gradient is {value}, on all ranks"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)


def ignored(strategy: str) -> None:
    """What the model ignores is clipped apart, as each rank has its own gradient of it."""
    whole: Any = made()
    whole._ddp_params_and_buffers_to_ignore = ["2.bias"]
    model, _ = imece.parallelize(
        whole,
        torch.optim.SGD([each for name, each in whole.named_parameters() if name != "2.bias"]),
        strategy,
    )
    loss(model).backward()
    with pytest.raises(ValueError) as caught:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert str(caught.value) == (
        "parameter 2.bias is among those that the model ignores, so its gradient is this rank's own and no "
        "part of the model's norm: clip it in a call of its own"
    )
    others = [each for name, each in whole.named_parameters() if name != "2.bias"]
    assert float(nn.utils.clip_grad_norm_(others, 1.0)) > 0
    assert float(nn.utils.clip_grad_norm_(whole.get_parameter("2.bias"), 1.0)) > 0


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


def wrap(*args: Any, **options: Any) -> Any:
    return imece.parallelize(*args, **options)


def sgd_of(model: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    return kind([each for each in model.parameters() if each.requires_grad], lr=0.1, **options)


def assert_alike(model: Any, alone: nn.Module) -> None:
    with model.gathered() if isinstance(model, ShardedDataParallel) else contextlib.nullcontext():
        for name, each in alone.named_parameters():
            found = getattr(model, "module", model).get_parameter(name)
            torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)


class Assigning(torch.optim.Optimizer):
    """Gives each parameter new memory."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.data = each.data - group["lr"] * each.grad


class Outer(torch.optim.Optimizer):
    """Has another one inside, whose groups it shares."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class TakingOver(Outer):
    """Has what the other one has, and of what Optimizer.__init__ makes a part, as timm's Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self.base, self.param_groups, self.state = base, base.param_groups, base.state


def assigns(strategy: str, gather: bool) -> None:
    alone, whole = made(), made()
    optimizers = sgd_of(alone, Assigning), sgd_of(whole, Assigning)
    model, _ = wrap(whole, optimizers[1], strategy, gather=gather)
    for _ in range(2):
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss(each).backward()
            optimizer.step()
    assert_alike(model, alone)
    part = model.sharding.parts[0]
    part.parameter.grad = None
    part.parameter.data = torch.zeros(part.numel + 1, dtype=torch.float64)
    message = f"an optimizer has made [{part.numel + 1}] of the {part.numel} elements that it steps of "
    with pytest.raises(RuntimeError, match=re.escape(f"{message}parameter {part.name}")):
        model.sharding.stores[part.bucket].bring_back()


def inside(strategy: str, gather: bool, kind: type[Outer] = Outer) -> None:
    """An optimizer inside of the one that was given, inside of its step and by itself."""
    alone, whole = made(), made()
    sgd, base = sgd_of(alone, momentum=0.9), sgd_of(whole, momentum=0.9)
    model, outer = wrap(whole, kind(base), strategy, gather=gather)
    gathers = []
    after = model.sharding.after_step

    def noted(kinds: Any) -> None:
        gathers.append(kinds)
        after(kinds)

    model.sharding.after_step = noted
    for stepper in (base, outer, base):
        for each, optimizers in ((alone, (sgd, sgd)), (model, (outer, stepper))):
            optimizers[0].zero_grad()
            loss(each).backward()
            optimizers[1].step()
        assert_alike(model, alone)
    assert gathers == [(0,)] * 3
    dist.barrier()  # the others compare what lies in memory in common
    with torch.no_grad():
        for each in alone.parameters():
            each.add_(float(each.requires_grad))
        for group in outer.param_groups:
            for each in group["params"]:
                each += 1
    name = model.sharding.parts[0].name
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 6, dtype=torch.float64))
    assert str(caught.value) == (
        f"this rank's part of parameter {name} was written into outside of its optimizer's step, and the "
        "other ranks do not have that: call imece.barrier() before it and model.take_over_masters() after "
        "it, on all ranks"
    )
    model.take_over_masters()
    loss(model)
    assert_alike(model, alone)


def inside_whole() -> None:
    """An optimizer without what Optimizer.__init__ makes steps whole parameters too."""
    alone, whole = made(), made()
    sgd = sgd_of(alone, momentum=0.9)
    model, outer = wrap(whole, TakingOver(sgd_of(whole, momentum=0.9)), "replicate")
    for each, optimizer in ((alone, sgd), (model, outer)) * 2:
        optimizer.zero_grad()
        loss(each).backward()
        optimizer.step()
    assert_alike(model, alone)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).square().sum(), self.b(x).square().sum()


def old_graphs(strategy: str, gather: bool) -> None:
    """A graph of before a step has saved what is other values now; not what had no gradient."""
    whole = made()
    model, optimizer = wrap(whole, sgd_of(whole), strategy, gather=gather)
    before = loss(model)
    before.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    before = loss(model)
    model.take_over_masters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    heads = Heads()
    model, optimizer = wrap(heads, torch.optim.SGD(heads.parameters(), lr=0.1), strategy)
    first, second = model(torch.ones(1, 6, dtype=torch.float64, requires_grad=True))
    first.backward()
    optimizer.step()
    second.backward()


def again(strategy: str, following: str) -> None:
    """The module goes on, plain or wrapped anew, at once."""
    alone, whole = made(), made()
    model, optimizer = wrap(whole, sgd_of(whole), strategy)
    sgd = sgd_of(alone)
    for turn in range(2):
        if turn:
            optimizer, sgd = sgd_of(whole, torch.optim.AdamW), sgd_of(alone, torch.optim.AdamW)
            kept = model if following.startswith("zero") else None  # the old one may be there as well
            if following:
                model, optimizer = wrap(whole, optimizer, following)
            else:
                model = whole
        for _ in range(2):
            for each, stepper in ((model, optimizer), (alone, sgd)):
                stepper.zero_grad()
                loss(each).backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                stepper.step()
        assert not turn or kept is not model
        dist.barrier()
        with model.gathered() if turn == 0 or following.startswith("zero") else contextlib.nullcontext():
            for name, each in alone.named_parameters():
                torch.testing.assert_close(whole.get_parameter(name), each, rtol=1e-5, atol=1e-6)
        dist.barrier()


def gone(strategy: str, gather: bool) -> None:
    """What is made goes when nobody has it, and not when something looks for cycles."""
    whole = made()
    model, optimizer = wrap(whole, sgd_of(whole, momentum=0.9), strategy, gather=gather)
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss(model).backward()
    known = [weakref.ref(each) for each in (model, model.reducer)]
    rest = [weakref.ref(each) for each in (whole, optimizer, model.sharding)]
    gc.disable()
    del model
    assert [each() for each in known] == [None] * 2
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"parallelize returned with this SGD is gone.*: keep it"):
        optimizer.step()
    del whole, optimizer
    assert [each() for each in rest] == [None] * 3
    gc.enable()


def shared(strategy: str) -> None:
    torch.manual_seed(0)
    both = nn.Linear(6, 6)
    one, other = nn.Sequential(both, nn.Linear(6, 1)), nn.Sequential(nn.Linear(6, 6), both)
    model, _ = wrap(one, torch.optim.SGD(one.parameters(), lr=0.1), strategy)
    with pytest.raises(ValueError) as caught:
        wrap(other, torch.optim.SGD(other[0].parameters(), lr=0.1), strategy)
    assert str(caught.value) == (
        "parameter 1.weight is of another wrapped model too, and one of the two is sharded: make one module "
        "that has both and give that to imece.parallelize, wrap a copy of it, or drop the other model before"
    )
    del model
    wrap(other, torch.optim.SGD(other[0].parameters(), lr=0.1), strategy)


def of_whole(strategy: str, group: dist.ProcessGroup | None = None) -> None:
    """A plain optimizer's state goes into one that steps parts: with groups, names and frozen ones."""

    def groups(model: nn.Module) -> Any:
        named: Any = list(model.named_parameters())
        return torch.optim.AdamW([{"params": named[:1]}, {"params": named[1:], "lr": 0.03}], lr=0.1)

    alone = made()
    adamw = groups(alone)
    loss(alone).backward()
    adamw.step()
    whole = made()
    whole.load_state_dict(alone.state_dict())
    model, optimizer = wrap(whole, groups(whole), strategy, group)
    names = [group["param_names"] for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))  # torch takes counts of steps as they are
    assert [group["param_names"] for group in optimizer.param_groups] == names
    for each, stepper in ((model, optimizer), (alone, adamw)):
        stepper.zero_grad()
        loss(each).backward()
        stepper.step()
    assert_alike(model, alone)
    optimizer.load_state_dict({key: each for key, each in optimizer.state_dict().items() if key != "imece"})
    model.sharding.trained.blocks[0] = 256
    with pytest.raises(ValueError, match=r"the state of whole parameters, .* AdamW keeps in blocks cannot"):
        optimizer.load_state_dict(adamw.state_dict())


def lookups(strategy: str) -> None:
    whole = made()
    model, optimizer = wrap(whole, sgd_of(whole, momentum=0.9), strategy)
    loss(model).backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            optimizer.state[whole[0].weight]
        assert str(caught.value) == (
            "SGD keeps nothing of parameter 0.weight: it steps this rank's parts, which are in "
            "optimizer.param_groups. imece.checkpoint.TrainingState saves and loads what it keeps of whole "
            "parameters"
        )
        optimizer.load_state_dict(optimizer.state_dict())
    assert type(copy.deepcopy(optimizer).state) is defaultdict
    assert optimizer.state[nn.Parameter(torch.ones(1))] == {}


def judged(strategy: str) -> None:
    """The usual loop of a GAN: the judge's gradients of the maker's backward are zeroed, and not stepped."""
    torch.manual_seed(0)
    modules = nn.Linear(6, 6), nn.Linear(6, 1)
    (maker, makes), (judge, judges) = [
        wrap(each, torch.optim.SGD(each.parameters(), lr=0.1), strategy) for each in modules
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(4):
            judges.zero_grad(set_to_none=False) if turn % 2 else judge.zero_grad()
            made_up = maker(torch.ones(2, 6))
            judge(made_up.detach()).sum().backward()
            judges.step()
            maker.zero_grad()
            judge(made_up).sum().backward()
            makes.step()


def go() -> None:
    imece.init()
    for strategy in ("zero1", "zero2", "zero3"):
        for check in (clip, refuse, ignored, adversaries, shared, of_whole, lookups, judged, hooked):
            check(strategy)
        for following in ("zero1", "zero2", "zero3", "replicate", ""):
            again(strategy, following)
    for way in (("zero1", False), ("zero2", False), ("zero3", False), ("zero3", True)):
        for each in (assigns, inside, old_graphs, gone, clip_by_groups, frozen_by_groups):
            each(*way)
        inside(*way, TakingOver)
    inside_whole()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    of_whole("zero1", alone)  # parts of as many elements, flat
    gc.collect()
    assert len(other_models.wrapped()) <= 1, "wrapped models stay for ever"


def test_torch_calls() -> None:
    run_ranks(go, 2, backend=None)


def state_dict_of_rank_0() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    mesh = imece.init()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, _ = imece.parallelize(model, optimizer, "zero3", mesh, gather=True, units=(nn.Linear,))
    if mesh.rank == 0:
        wrapped.state_dict()
    else:
        wrapped(torch.ones(1, 8))


def test_a_state_dict_of_one_rank_names_the_call() -> None:
    run_ranks(state_dict_of_rank_0, 2, backend=None, expect=r"whole for state_dict\(\), which all ranks call")
