"""Frozen parameters sharded with the trained ones: the same bits, and less memory per rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from imece import DistributedDataParallel, MixedPrecision
from imece.data_parallel.footprint import counted, expected
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.units import State
from tests.data_parallel.checks import Check, Job, jobs, passed
from tests.data_parallel.sharding.blocks import (
    VOCAB,
    WIDTH,
    Block,
    Small,
    assert_freed,
    batch,
    loss_of,
    made,
    plain,
    units_of,
    wrap,
)


class Adapter(nn.Module):
    """Beside a layer that is frozen, as LoRA's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(last_layer: bool = True) -> Small:
    """All is frozen but adapters; beside the last layer of a block their gradients are the block's first."""
    model = Small()
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        name = "down" if last_layer else "up"
        setattr(block, name, Adapter(getattr(block, name)))
    return model


def whole_modules() -> Small:
    model = Small()
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)  # gradients go through it
    model.blocks[2].requires_grad_(False)
    return model


def single_parameters() -> Small:
    model = Small()
    for name, each in model.named_parameters():
        each.requires_grad_(not name.endswith(("up.weight", "norm.bias", "head.weight")))
    return model


def the_first_ones() -> Small:
    """No gradient comes to what is frozen."""
    model = Small()
    for module in (model.embed, model.first, model.blocks[0], model.blocks[1]):
        module.requires_grad_(False)
    return model


def used_detached() -> Small:
    """The head is frozen use of a table that is trained, and a table that is frozen is used twice."""

    class Tied(Small):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.first(self.embed(tokens))
            for block in self.blocks:
                x = block(x)
            out: torch.Tensor = nn.functional.linear(x, self.embed.weight.detach()) + self.head(x)
            return out

    model = Tied()
    for block in (model.blocks[1], model.blocks[3]):
        assert isinstance(block, Block)
        block.up.requires_grad_(False)
    model.blocks[3].up = model.blocks[1].up
    return model


def in_checkpoints(reentrant: bool) -> Callable[[], Small]:
    def make() -> Small:
        model = adapted()
        model.reentrant = reentrant
        model.embed.requires_grad_(True)  # or a re-entrant one has no gradient to go to
        return model

    return make


def without_gradients() -> Small:
    """A frozen part runs in no_grad."""

    class Features(Small):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.first(self.embed(tokens)))
            for block in self.blocks[1:]:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)  # type: ignore[no-any-return]

    model = Features()
    for module in (model.embed, model.first, model.blocks[0]):
        module.requires_grad_(False)
    return model


MAKES: dict[str, Callable[[], nn.Module]] = {
    "adapters": adapted,
    "adapters beside the first layer": lambda: adapted(last_layer=False),
    "whole modules": whole_modules,
    "single parameters": single_parameters,
    "the first ones": the_first_ones,
    "used detached": used_detached,
    "in checkpoints": in_checkpoints(False),
    "in re-entrant checkpoints": in_checkpoints(True),
    "without gradients": without_gradients,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def same_as_replicate(make: Callable[[], nn.Module]) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        found, states = [], []
        for strategy, gather in (("replicate", False), ("zero3", False), ("zero3", True)):
            model, optimizer = wrap(made(make), group, strategy, gather=gather, make=adamw)
            if gather:
                assert_freed(model)
                assert all(isinstance(each, FreedParameter) for each in model.parameters())
            found.append(torch.stack(list(plain(model, optimizer, 3))))
            states.append(model.state_dict())
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), found
        assert not torch.equal(found[0][0], found[0][1])
        for state in states[1:]:
            assert list(state) == list(states[0])
            assert all(torch.equal(each, states[0][name]) for name, each in state.items())

    return check


def exact(group: dist.ProcessGroup) -> None:
    """In fp64, that of one process on the whole batch."""
    for make in (adapted, single_parameters):
        model, alone = made(make).double(), made(make).double()
        wrapped, optimizer = wrap(model, group, make=adamw)
        stepped = adamw(alone)
        for step in range(4):
            batches = [torch.empty_like(batch(step)[0]) for _ in range(group.size())]
            dist.all_gather(batches, batch(step)[0], group=group)
            tokens = torch.cat(batches)
            targets = torch.cat([each.roll(1) for each in batches])
            whole = nn.functional.cross_entropy(alone(tokens).view(-1, VOCAB), targets.view(-1))
            whole.backward()
            stepped.step()
            stepped.zero_grad()
            loss = loss_of(wrapped, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            assert abs(float(mean) / group.size() - float(whole.detach())) < 1e-12


def in_halves(group: dist.ProcessGroup) -> None:
    """Each rank keeps its part, of every dtype, and no more units are there at a time than are to be."""
    model = made(whole_modules)
    model.register_parameter("codes", nn.Parameter(torch.arange(40, dtype=torch.int8), requires_grad=False))
    model.register_parameter("wave", nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False))
    sizes = {name: each.numel() * each.itemsize for name, each in model.named_parameters()}
    for gather in (False, True):
        inner = made(whole_modules)
        for name in ("codes", "wave"):
            inner.register_parameter(name, nn.Parameter(model.get_parameter(name).data, requires_grad=False))
        wrapped, optimizer = wrap(inner, group, gather=gather, make=adamw)
        dtypes = {store.parameters.dtype for store in wrapped.sharding.frozen}
        assert dtypes == {torch.float32, torch.int8, torch.complex64}
        predicted = expected(wrapped, [optimizer])
        list(plain(wrapped, optimizer, 2))
        held = counted(wrapped, [optimizer])
        assert predicted is not None and held.parameters == predicted.parameters
        padding = 128 * group.size() * 16
        assert sum(sizes.values()) <= group.size() * held.parameters <= sum(sizes.values()) + padding
        state = wrapped.state_dict()
        assert torch.equal(state["module.codes"], torch.arange(40, dtype=torch.int8))
        if gather:
            root, *others = [unit.nbytes for unit in units_of(wrapped)]
            assert wrapped.sharding.gathering.most_bytes <= root + 2 * max(others)


def freed_before_the_end(group: dist.ProcessGroup) -> None:
    """In backward too, though no gradient of theirs says that they are over."""
    wrapped, _ = wrap(made(whole_modules), group, make=adamw)
    there: list[int] = []
    units = units_of(wrapped)

    def look(*_: Any) -> None:
        there.append(sum(unit.state is not State.FREED for unit in units[1:]))

    for block in wrapped.module.blocks:
        block.down.register_full_backward_hook(look)
    loss_of(wrapped, 0).backward()
    assert len(there) == 4 and max(there) <= 2, there


def written(group: dist.ProcessGroup) -> None:
    for gather in (False, True):
        model, optimizer = wrap(made(adapted), group, gather=gather, make=adamw)
        with model.gathered(write=True):
            model.module.first.weight.mul_(2)
        twice = 2 * made(adapted).get_parameter("first.weight").detach()
        assert torch.equal(model.state_dict()["module.first.weight"], twice)
        state = {name: torch.full_like(each, 3) for name, each in model.state_dict().items()}
        model.load_state_dict(state)
        list(plain(model, optimizer, 1))
        assert bool((model.state_dict()["module.first.weight"] == 3).all())
        if gather:
            with pytest.raises(RuntimeError, match=r"parameter first.weight of the root unit is freed"):
                model.module.first.weight.mul_(2)
        elif group.size() > 1:
            with torch.no_grad():
                model.module.first.weight.mul_(1)
            with pytest.raises(RuntimeError, match=r"first.weight was written into, and the ranks of this"):
                list(plain(model, optimizer, 1))
        dist.barrier(group)


def frozen_later(group: dist.ProcessGroup) -> None:
    """What was trained stays in its bucket; what was frozen wants no gradient later."""
    losses = []
    for strategy, gather in (("replicate", False), ("zero3", False), ("zero3", True)):
        model, optimizer = wrap(made(adapted), group, strategy, gather=gather, make=adamw)
        list(plain(model, optimizer, 1))
        model.module.blocks[0].down.down.weight.requires_grad_(False)
        before = model.state_dict()["module.blocks.0.down.down.weight"].clone()
        losses.append(torch.stack(list(plain(model, optimizer, 2))))
        assert torch.equal(before, model.state_dict()["module.blocks.0.down.down.weight"])
        model.module.first.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"first.weight was frozen when the model was wrapped"):
            loss_of(model, 0)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def in_one_memory(group: dist.ProcessGroup) -> None:
    """A frozen parameter in the memory of a trained one would not follow it; two frozen ones may."""
    model: Any = made(adapted)
    model.head.weight.data = model.embed.weight.data
    wrapped, _ = wrap(model, group, make=adamw)
    state = wrapped.state_dict()
    assert torch.equal(state["module.head.weight"], state["module.embed.weight"])
    model = made(adapted)
    model.embed.weight.requires_grad_(True)
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(ValueError, match=r"embed.weight and head.weight share memory"):
        wrap(model, group, make=adamw)


def in_bf16(group: dist.ProcessGroup) -> None:
    """Frozen ones are cast, and have no masters; integers stay."""
    for gather in (False, True):
        inner = made(adapted)
        inner.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
        model, _ = wrap(
            inner, group, gather=gather, make=adamw, precision=MixedPrecision(param=torch.bfloat16)
        )
        dtypes = {store.parameters.dtype for store in model.sharding.frozen}
        assert dtypes == {torch.bfloat16, torch.int64}
        loss_of(model, 0).backward()
        first = made(adapted).get_parameter("first.weight").detach().bfloat16()
        assert torch.equal(model.state_dict()["module.first.weight"], first)


def two_with_one_base() -> tuple[Any, Any]:
    """A parameter that the root has, and whole modules inside of units."""
    one: Any = made(adapted)
    other: Any = made(adapted)
    other.head = one.head
    for mine, theirs in zip(one.blocks, other.blocks, strict=True):
        theirs.down.base = mine.down.base
    return one, other


def shared_by_two(group: dist.ProcessGroup) -> None:
    """Whichever is wrapped first, and wherever that lies: refused where one of them shares it out, on all
    ranks and before anything is changed; else both train."""
    ways = [("replicate", False), ("zero1", False), ("zero3", False), ("zero3", True)]
    for first, second in itertools.product(ways, ways):
        one, other = two_with_one_base()
        model, optimizer = wrap(one, group, first[0], gather=first[1], make=adamw)
        if "zero3" in (first[0], second[0]):
            before = torch.clone(other.first.weight)
            with pytest.raises(ValueError, match=r"parameter blocks.0.down.base.weight is of a"):
                wrap(other, group, second[0], gather=second[1], make=adamw)
            assert torch.equal(other.first.weight, before)
            list(plain(model, optimizer, 1))
        else:
            both = [(model, optimizer), wrap(other, group, second[0], make=adamw)]
            alone = wrap(made(adapted), group, "replicate", make=adamw)
            losses = [torch.stack(list(plain(m, o, 2))) for m, o in (*both, alone)]
            assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[2])
    one, other = two_with_one_base()
    model, _ = wrap(one, group, make=adamw)
    with pytest.raises(ValueError, match=r"parameter blocks.0.down.base.weight is of another wrapped model"):
        DistributedDataParallel(other, process_group=group)
    del model, one
    one, other = two_with_one_base()
    wrap(one, group, "replicate", make=adamw)  # nobody has it
    wrap(other, group, make=adamw)


def test_width_is_no_multiple_of_the_ranks() -> None:
    assert (WIDTH * (2 * WIDTH + 1)) % 8, "or no part ends within a matrix"


CHECKS: dict[str, Check] = {
    **{name: same_as_replicate(make) for name, make in MAKES.items()},
    "exact": exact,
    "in halves": in_halves,
    "freed before the end": freed_before_the_end,
    "written": written,
    "frozen later": frozen_later,
    "in one memory": in_one_memory,
    "in bf16": in_bf16,
    "shared by two": shared_by_two,
}
JOBS = [
    *jobs(__name__, CHECKS, (2, "shm")),
    *jobs(__name__, ["adapters", "whole modules"], (4, "shm")),
    *jobs(__name__, ["adapters", "single parameters", "in halves", "exact"], (2, "gloo")),
]


@pytest.mark.parametrize("job", JOBS)
def test_frozen(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
