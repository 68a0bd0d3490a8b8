"""Parameters gathered by unit: the same bits as replicate, and nothing left over."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from imece import MixedPrecision, parallelize
from imece.collectives import ops
from imece.data_parallel.sharding import units
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.units import Flat, State, find_units
from imece.errors import CollectiveError, MismatchError
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.data_parallel.sharding.blocks import (
    LAYERS,
    VOCAB,
    WIDTH,
    Block,
    Routed,
    Small,
    Twice,
    accumulated,
    accumulated_in_no_sync,
    assert_freed,
    assert_freed_if_gathered,
    batch,
    full_bytes,
    loss_of,
    made,
    muon_and_adamw,
    partly_frozen,
    plain,
    there_when_blocks_run,
    two_hosts,
    units_of,
    wrap,
)


class Segments(Routed):
    """Checkpoints of two blocks each."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.reentrant is not None
        x = self.first(self.embed(tokens))
        for at in range(0, LAYERS, 2):
            x = checkpoint(nn.Sequential(*self.blocks[at : at + 2]), x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


class Viewed(Small):
    """What its blocks return are views, which are changed in place."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.head(x)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        for at in range(LAYERS):
            self.blocks[at] = nn.Sequential(Block(), nn.Flatten(0, -2), nn.Unflatten(0, (-1, 1)))


class Tree(Block):
    """Runs itself on what comes in."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return super().forward(self(x, depth - 1) if depth else x)


class Trees(Small):
    """Its blocks call themselves, and so does all of it."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__(reentrant=reentrant)
        self.blocks = nn.ModuleList(Tree() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, again: bool = True) -> torch.Tensor:
        once = super().forward(tokens)
        return once + self(tokens.roll(1), again=False) if again else once


def all_in_a_checkpoint(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """Of both kinds, around all of the model but its loss."""
    for step in range(steps):
        tokens, targets = batch(step)
        wanted = torch.zeros((), requires_grad=True)  # a re-entrant one needs an input with a gradient
        outputs = checkpoint(lambda x, _: model(x), tokens, wanted, use_reentrant=step % 2 == 0)
        loss = nn.functional.cross_entropy(outputs.view(-1, VOCAB), targets.view(-1))
        loss.backward()
        assert_freed_if_gathered(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def with_evaluation(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """A forward without gradients between forward and backward, and two forwards before it."""
    for step in range(steps):
        one = loss_of(model, 2 * step)
        two = loss_of(model, 2 * step + 1)
        with torch.no_grad():
            seen = loss_of(model, 77)
        (one + two).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack([one.detach(), two.detach(), seen])


def of_some_inputs(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """backward(inputs=...) of parameters that are freed by then."""
    named = dict(model.module.named_parameters())
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward(inputs=[named[f"blocks.{step % LAYERS}.up.weight"], named["head.weight"]])
        assert_freed_if_gathered(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


Train = Callable[[Any, Any, int], Iterator[torch.Tensor]]


def same_bits(
    make: Callable[[], nn.Module] = Small,
    train: Train = plain,
    steps: int = 2,
    against: str = "replicate",
    both: dict[str, Any] | None = None,
    **options: Any,
) -> Check:
    """Losses and parameters equal those of another strategy; on three ranks Gloo sums in another order."""

    def check(group: dist.ProcessGroup) -> None:
        whole, optimizer = wrap(made(make), group, against, **both or {})
        expected = list(train(whole, optimizer, steps))
        model, optimizer = wrap(made(make), group, **both or {}, **options)
        assert_freed(model)
        got = []
        for loss in train(model, optimizer, steps):
            assert_freed(model)
            got.append(loss)
        exact = group.size() == 2 or group.name() == "shm"
        for step, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5), (
                f"step {step}: {one}, with {against} {other}"
            )
        states = model.state_dict(), whole.state_dict()
        assert list(states[0]) == list(states[1])
        for name, each in states[0].items():
            other = states[1][name]
            assert torch.equal(each, other) if exact else torch.allclose(each, other, atol=1e-4), name
        assert_freed(model)

    return check


def test_streams_that_use_a_unit_wait_for_it_and_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of a model on streams of a GPU, which are made up."""
    told: list[str] = []
    current = "main"

    def stream(name: str) -> Any:
        event = SimpleNamespace(of=name)
        return SimpleNamespace(
            record_event=lambda: event, wait_event=lambda event: told.append(f"{name} waits for {event.of}")
        )

    def record(_: torch.Tensor, by: Any) -> None:
        told.append(f"{current} keeps")

    streams = {name: stream(name) for name in ("main", "side", "third")}
    work = SimpleNamespace(wait=lambda: told.append(f"{current} waits for the gather"))
    monkeypatch.setattr(units, "has_streams", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[current])
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(ops, "all_gather", lambda *_, **__: work)
    group: Any = SimpleNamespace(rank=lambda: 0)
    unit = find_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[1]
    unit.add(Flat(torch.zeros(20), torch.zeros(10), []))
    unit.start(group)
    for branch in ("side", "third", "main"):
        current = branch
        unit.gather(group)
    assert told == [
        "side waits for the gather", "side keeps",
        "third waits for side", "third keeps",
        "main waits for side",
    ]  # fmt: skip
    current = "third"
    unit.free()
    assert told[5:] == ["third waits for side", "third keeps"] and unit.state is State.FREED
    told.clear()
    unit.gather(group)
    unit.free()
    assert told == ["third waits for the gather", "third waits for third"], "one stream keeps it by itself"


CHECKS: dict[str, Check] = {
    "plain": same_bits(steps=8),
    "reshard late": same_bits(reshard_after_forward=False),
    "one in flight": same_bits(gathers_in_flight=1),
    "many in flight": same_bits(gathers_in_flight=9),
    "units by class": same_bits(units=(nn.Linear,)),
    "units by size": same_bits(units=300),
    "tables are units": same_bits(units=(Block, nn.Embedding, nn.Linear), steps=4),
    "muon": same_bits(both={"make": muon_and_adamw}, steps=4),
    "half": same_bits(both={"precision": MixedPrecision(param=torch.bfloat16)}, against="zero2", steps=4),
    "frozen": same_bits(partly_frozen),
    "segments": same_bits(lambda: Segments(reentrant=False)),
    "segments, re-entrant": same_bits(lambda: Segments(reentrant=True)),
    "tied": same_bits(lambda: Small(tied=True)),
    "run twice": same_bits(Twice),
    "calls itself": same_bits(Trees),
    "calls itself, checkpoint": same_bits(lambda: Trees(reentrant=False)),
    "views, changed in place": same_bits(Viewed, gathers_in_flight=1),
    "checkpoint": same_bits(lambda: Small(reentrant=False)),
    "checkpoint, re-entrant": same_bits(lambda: Small(reentrant=True)),
    "unused": same_bits(lambda: Small(spare=True)),
    "all in a checkpoint": same_bits(train=all_in_a_checkpoint),
    "unused on some ranks": same_bits(Routed, steps=4),
    "unused on some ranks, checkpoint": same_bits(lambda: Routed(reentrant=False)),
    "unused on some ranks, re-entrant": same_bits(lambda: Routed(reentrant=True)),
    "unused on some ranks, accumulated": same_bits(Routed, accumulated_in_no_sync),
    "unused on some ranks, evaluation": same_bits(Routed, with_evaluation),
    # Replicate adds to what it reduced before, and reduces the sum.
    "accumulated": same_bits(train=accumulated, against="zero2"),
    "accumulated in no_sync": same_bits(train=accumulated_in_no_sync),
    "with evaluation": same_bits(train=with_evaluation),
    "of some inputs": same_bits(train=of_some_inputs, steps=4),
    "of some inputs, checkpoint": same_bits(lambda: Small(reentrant=False), of_some_inputs, steps=3),
}

# What is there when.


def freed_parameter(group: dist.ProcessGroup) -> None:
    model, optimizer = wrap(made(), group)
    inner = model.module
    words = r"parameter blocks.3.up.weight of unit blocks.3 is freed.*model.gathered\(\)"
    for use in (
        lambda p: p + 1, lambda p: torch.cat([p, p]), lambda p: p.detach(), lambda p: p.data,
        lambda p: p.copy_(p), lambda p: p.tolist(), lambda p: nn.functional.linear(torch.ones(1, WIDTH), p),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            use(inner.blocks[3].up.weight)
    with pytest.raises(RuntimeError, match=r"parameter head.weight of the root unit is freed"):
        inner.head(torch.ones(1, WIDTH))
    with pytest.raises(RuntimeError, match="is freed"):
        inner.state_dict()
    weight = inner.blocks[3].up.weight
    assert model.to("cpu") is model and model.cpu().float() is model  # which it is already
    assert weight is inner.blocks[3].up.weight and type(weight) is FreedParameter
    for convert in (model.double, model.half, lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match="is freed"):
            convert()
    assert weight.shape == (2 * WIDTH + 1, WIDTH) and weight.numel() == WIDTH * (2 * WIDTH + 1)
    assert weight.dtype == torch.float32 and weight.grad is None and weight.is_leaf and weight.requires_grad
    assert "FreedParameter" in repr(weight) and isinstance(weight, nn.Parameter)
    inner.blocks[3](torch.ones(1, WIDTH))  # a unit by itself is gathered
    with model.gathered():
        assert type(inner.blocks[3].up.weight) is nn.Parameter
        with model.gathered():
            pass
        inner.blocks[3].up.weight + 1
        with pytest.raises(RuntimeError, match="inside of gathered"):
            optimizer.step()
    assert_freed(model)


def units_in_flight(group: dist.ProcessGroup) -> None:
    for limit in (1, 2, 3):
        model, _ = wrap(made(), group, gathers_in_flight=limit)
        there = there_when_blocks_run(model)
        loss_of(model, 0).backward()
        assert there[:LAYERS] == [[0], [1], [2], [3]], "nothing is known ahead of the first forward"
        del there[:]
        loss_of(model, 1).backward()
        kept = range(LAYERS + 1 - limit, LAYERS)  # after their forward: with these backward begins
        ahead = [
            [each for each in range(LAYERS) if at <= each < at + limit or (each < at and each in kept)]
            for at in range(LAYERS)
        ]
        behind = [list(range(max(at + 1 - limit, 0), at + 1)) for at in reversed(range(LAYERS))]
        assert there == ahead + behind, f"{limit} in flight: {there}"


def units_that_stay(group: dist.ProcessGroup) -> None:
    """With those that are there after a forward backward begins; they are what they should be for others."""
    model, optimizer = wrap(made(), group, gathers_in_flight=3)
    other, other_optimizer = wrap(made(), group, gathers_in_flight=3)
    for each, stepping in ((model, optimizer), (other, other_optimizer)):
        loss_of(each, 0).backward()
        stepping.step()
        stepping.zero_grad()
    gathers: list[str] = []
    gather = ops.all_gather

    def noted(*tensors: Any, **how: Any) -> Any:
        gathers.append(how["label"])
        return gather(*tensors, **how)

    def there(stay: list[int]) -> None:
        assert [unit.number for unit in units_of(model) if unit.is_there] == stay

    with mock.patch.object(ops, "all_gather", noted):
        loss_of(model, 1)
        there([0, LAYERS - 1, LAYERS])
        with model.gathered(write=True), other.gathered(write=True):
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.data.mul_(1.5)
        there([])
        loss_of(model, 2)
        with torch.no_grad():
            loss_of(model, 2)
        there([])
        first = loss_of(model, 2)
        del gathers[:]
        loss = loss_of(model, 3)  # a second forward frees what stays of the first one
        assert gathers == [f"parameters of unit blocks.{at}" for at in range(LAYERS)]
        del gathers[:]
        loss.backward()
        assert gathers == [f"parameters of unit blocks.{at}" for at in reversed(range(LAYERS - 2))]
    there([])
    first.backward()
    for at in (3, 2):
        loss_of(other, at).backward()
    there([])
    for part, expected in zip(model.parts, other.parts, strict=True):
        assert torch.equal(part.parameter.grad, expected.parameter.grad), part.name


def kept_memory(group: dist.ProcessGroup) -> None:
    """Besides gradients, a rank keeps its shards of parameters, and whole ones of one block and the root."""
    for reentrant, at_a_time in ((None, 1), (False, 1), (True, 2)):
        torch.manual_seed(5)
        model, _ = wrap(Routed(reentrant), group, gathers_in_flight=1)
        shards = sum(flat.own.untyped_storage().nbytes() for unit in units_of(model) for flat in unit.flats)
        whole = sum(4 * each.numel() for each in model.parameters())
        assert whole / group.size() <= shards < whole / group.size() * 1.3, "shards, with padding"
        root, *blocks = (sum(flat.full.nbytes for flat in unit.flats) for unit in units_of(model))
        assert blocks == [blocks[0]] * LAYERS
        seen: list[int] = []

        def look(*_: Any, model: Any = model, seen: list[int] = seen) -> None:
            seen.append(full_bytes(model))

        for block in model.module.blocks:
            block.up.register_forward_hook(look)
            block.up.register_full_backward_hook(look)
        loss_of(model, 0).backward()
        assert len(seen) == LAYERS * (2 if reentrant is None else 3)
        assert seen[:LAYERS] == [root + blocks[0]] * LAYERS
        assert max(seen) == root + at_a_time * blocks[0], f"re-entrant: {reentrant}"
        assert full_bytes(model) == 0
        with torch.no_grad():
            loss_of(model, 0)
        assert full_bytes(model) == 0


def late_gradient(group: dist.ProcessGroup) -> None:
    """As if backward did not go in the opposite order of forward."""
    model, _ = wrap(made(), group)

    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: model.reducer.gradients.gathering.when_over({2}))

    model.module.blocks[1].up.register_forward_hook(hook)
    words = r"parameter blocks.1.up.* got a gradient after its unit was over"
    with model.gathered(), pytest.raises(RuntimeError, match=words):
        loss_of(model, 0).backward()


def failed_forward(group: dist.ProcessGroup) -> None:
    """In calls within calls; or one that nothing is told of, as of a key that is pressed."""
    model, _ = wrap(made(Trees), group)

    def fail(*_: Any) -> None:
        raise error("on purpose")

    error: type[BaseException] = ValueError
    handle = model.module.blocks[1].up.register_forward_hook(fail)
    with torch.no_grad():
        for error, run in ((ValueError, model.module), (KeyboardInterrupt, model)):
            with pytest.raises(error, match="on purpose"):
                loss_of(model, 0)
            handle.remove()
            loss_of(run, 0)
            assert_freed(model)
            handle = model.module.blocks[1].up.register_forward_hook(fail)


def failed_backward(group: dist.ProcessGroup) -> None:
    model, optimizer = wrap(made(), group)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model.module.blocks[1].up.register_forward_hook(hook)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, 0).backward()
    handle.remove()
    with model.no_sync():  # so that it is not freed because its gradients have left
        loss_of(model, 0).backward()
    assert_freed(model)
    model.zero_grad()
    got = list(plain(model, optimizer, 2))
    other, other_optimizer = wrap(made(), group)
    expected = list(plain(other, other_optimizer, 2))
    assert torch.equal(torch.stack(got), torch.stack(expected)), "the failed backward left something behind"
    assert_freed(model)


def gradient_penalty(group: dist.ProcessGroup) -> None:
    """The second backward needs what the first one frees, unless all is held."""

    def penalised(model: nn.Module) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        y: torch.Tensor = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        other: torch.Tensor = model(torch.full((2, 4), 0.5)).square().sum()  # its backward comes first
        return slope.square().sum() + other

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    model, _ = wrap(layers(), group, gather=True)
    with model.gathered():
        penalised(model).backward()
    alone = layers()
    penalised(alone).backward()
    grads = [each.grad for each in alone.parameters() if each.grad is not None]
    torch.testing.assert_close(model.gradient_norm(), nn.utils.get_total_norm(grads))
    with pytest.raises(RuntimeError) as caught:
        penalised(model)
    assert str(caught.value) == (
        "a backward with create_graph=True came to unit 2, which is freed before the backward of its "
        "result: run the forward and both of them inside of `with model.gathered():`"
    )


def autocast_for_long(group: dist.ProcessGroup) -> None:
    """Several forwards and backwards inside of one autocast, which keeps the casts of the first forward."""

    def weights(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for step in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    loss_of(model, 9)
                for micro in range(2):
                    loss_of(model, 2 * step + micro).backward()
            optimizer.step()
        return [each.clone() for each in model.state_dict().values()]

    for got, expected in zip(
        weights(*wrap(made(), group)), weights(*wrap(made(), group, "replicate")), strict=True
    ):
        assert torch.equal(got, expected)


def same_steps(group: dist.ProcessGroup, backward: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """Two steps end in the same weights as without units."""

    def weights(strategy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model, optimizer = wrap(layers, group, strategy)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, torch.ones(2, 4))
            optimizer.step()
        if strategy == "zero3":
            assert_freed(model)
        return [each.clone() for each in model.state_dict().values()]

    for got, expected in zip(weights("zero3"), weights("replicate"), strict=True):
        assert torch.equal(got, expected)


def within_torch_func(group: dist.ProcessGroup) -> None:
    """Units stay for the backward of a transform, which no hook sees, and for that of its result."""
    same_steps(
        group, lambda model, at: torch.func.grad(lambda x: model(x).sum())(at).square().sum().backward()
    )


def forward_mode(group: dist.ProcessGroup) -> None:
    """A unit is there for the backward of its tangents, which have a graph of their own."""

    def of_tangents(model: nn.Module, at: torch.Tensor) -> None:
        with forward_ad.dual_level():
            slope = forward_ad.unpack_dual(model(forward_ad.make_dual(at, torch.ones_like(at))))
            slope.tangent.square().sum().backward()

    same_steps(group, of_tangents)


def resized(group: dist.ProcessGroup) -> None:
    model, optimizer = wrap(made(), group)
    with pytest.raises(RuntimeError, match=r"blocks.2.up.bias was"), model.gathered(write=True):
        model.module.blocks[2].up.bias.data = torch.zeros(5)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "parameter blocks.2.up.bias was [25], torch.float32 on cpu, in parallelize, and is [5], "
        "torch.float32 on cpu, in other memory now: change it before, or write into it"
    )
    model, optimizer = wrap(made(), group, "zero1")
    model.half()
    with pytest.raises(
        RuntimeError, match=r"was \[.*\], torch.float32 on cpu, .* torch.float16 on cpu, in oth"
    ):
        optimizer.step()
    model, optimizer = wrap(made(), group, "zero1")
    model.module.blocks[2].up.bias.data = torch.zeros(25)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "parameter blocks.2.up.bias was given other memory (`p.data = ...`) after parallelize: write into "
        "what it has, `p.copy_(...)`, or do it inside of `with model.gathered(write=True):`"
    )


def one_rank_alone(group: dist.ProcessGroup) -> None:
    """A block that one rank leaves out is an error on all, and no hang."""
    model, _ = wrap(made(), group)
    loss_of(model, 0).backward()
    blocks = model.module.blocks
    if group.rank() == 1:
        model.module.blocks = nn.ModuleList([blocks[0], *blocks[2:]])
    with pytest.raises((MismatchError, CollectiveError), match=r"differs? between"):
        loss_of(model, 1).backward()


def another_unit_on_each_rank(group: dist.ProcessGroup) -> None:
    """Of the same size, so that what comes would be of two units."""
    model, _ = wrap(made(), group)
    blocks = model.module.blocks
    model.module.blocks = nn.ModuleList([blocks[group.rank()]])
    said = r"unit blocks.0.*unit blocks.1.*run the same units in one order \(units= says which"
    with pytest.raises(MismatchError, match=said):
        loss_of(model, 1)


# The whole for a while.


def written(group: dist.ProcessGroup) -> None:
    for options in ({}, {"gather": False}, {"precision": MixedPrecision(param=torch.bfloat16)}):
        model, optimizer = wrap(made(), group, **options)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        with model.gathered(write=True), torch.no_grad():
            model.module.blocks[2].up.weight.add_(1)
        with model.gathered(), torch.no_grad():
            weight = model.module.blocks[2].up.weight
            assert torch.equal(weight, before["module.blocks.2.up.weight"].to(weight.dtype) + 1)
        if "precision" in options:
            masters = {part.name: part for part in model.sharding.parts}
            assert all(part.parameter.dtype is torch.float32 for part in masters.values())
        optimizer.step()
        now = model.state_dict()
        changed = {name for name, each in now.items() if not torch.equal(each, before[name])}
        assert changed == {"module.blocks.2.up.weight"}, (options, changed)


class Clamped(Small):
    """Writes into its own parameters as it runs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)
        return super().forward(tokens)


class Supervised(nn.Module):
    """A block with a loss of its own, which it returns, keeps, or puts into a list."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.head, self.way = nn.Linear(4, 4), nn.Linear(4, 2), way
        self.scale, self.kept = nn.Parameter(torch.ones(2)), torch.empty(0)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> Any:
        if self.way == "input":
            self.kept = x
        x = self.body(x).tanh()
        loss = (self.head(x) * self.scale).square().mean()
        if self.way == "kept":
            self.kept = loss
        elif self.way in ("listed", "first"):
            losses.append(loss)
        return (x, loss) if self.way in ("returned", "input") else x


class Deep(nn.Module):
    """Its loss is that of its blocks, and one of what comes out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Supervised(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            out = block(x, losses)
            x, loss = out if isinstance(out, tuple) else (out, block.kept)
            if block.way not in ("listed", "first"):
                losses.append(loss)
        return losses[0] if block.way == "first" else sum(losses, x.mean())


def losses_that_blocks_keep(group: dist.ProcessGroup) -> None:
    """Their backward comes past the output of the block, whose parameters may not have come yet."""

    most: dict[str, int] = {}

    def gradients(way: str, whole: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, optimizer = wrap(Deep(way), group)
        with model.gathered() if whole else contextlib.nullcontext():
            model(torch.ones(3, 4)).backward()
        most[way] = model.sharding.gathering.most_bytes
        return [each.grad for those in optimizer.param_groups for each in those["params"]]

    expected = gradients("returned")
    for found in (gradients("kept"), gradients("input"), gradients("listed", whole=True)):
        assert all(map(torch.equal, found, expected))
    assert most["input"] == most["returned"], "nothing comes back for a gradient that goes on to other units"
    said = r"used blocks\.\d\.\S+ while unit blocks\.\d was .* Return it"
    with pytest.raises(RuntimeError, match=said):
        gradients("listed")
    with pytest.raises(RuntimeError, match="is at version"):  # and not the end of the process
        gradients("first")


def written_and_freed(group: dist.ProcessGroup) -> None:
    """What is written outside of gathered(write=True) would be lost, and says so; the rest goes on."""

    def lost(name: str, unit: str) -> str:
        return (
            f"parameter {name} was written into, which is lost as {unit} is freed: do it inside of `with "
            "model.gathered(write=True):`"
        )

    model, _ = wrap(made(Clamped), group)
    loss = loss_of(model, 0)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()  # the root stays until then
    assert str(caught.value) == lost("head.weight", "the root unit")
    assert_freed(model)

    def halve(module: Any, _inputs: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    model, optimizer = wrap(made(), group)
    handle = model.module.blocks[2].up.register_forward_pre_hook(halve)
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, 0)
    assert str(caught.value) == lost("blocks.2.up.weight", "unit blocks.2")
    handle.remove()
    weight = model.module.blocks[0].up.weight
    with pytest.raises(RuntimeError) as caught, model.gathered(), torch.no_grad():
        weight.add_(1)
    assert str(caught.value) == lost("blocks.0.up.weight", "unit blocks.0")
    with pytest.raises(ArithmeticError), model.gathered(), torch.no_grad():
        weight.add_(1)
        raise ArithmeticError
    assert_freed(model)
    with model.gathered():
        with model.gathered(write=True), torch.no_grad():
            weight.mul_(1.0)
        weight.sum()
    other, other_optimizer = wrap(made(), group)
    for got, expected in zip(plain(model, optimizer, 2), plain(other, other_optimizer, 2), strict=True):
        assert torch.equal(got, expected)


def wrapped_again(group: dist.ProcessGroup) -> None:
    """A model that is gathered belongs to its wrapper: of a copy another may be made."""
    model, _ = wrap(made(), group)
    for strategy in ("zero3", "zero1", "replicate"):
        for whole in (contextlib.nullcontext, model.gathered):
            with whole(), pytest.raises(ValueError) as caught:
                wrap(model.module, group, strategy)
            assert str(caught.value) == (
                "parameter embed.weight is of a sharded model that gathers and frees it: wrap a copy of the "
                "module, made inside of its `with model.gathered():` by copy.deepcopy(model.module)"
            )
    saved = io.BytesIO()
    with model.gathered():
        inner = copy.deepcopy(model.module)
        torch.save(model.module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loss_of(loaded, 0), loss_of(inner, 0)), "it runs without what gathers and frees"
    again, optimizer = wrap(inner, group)
    other, other_optimizer = wrap(made(), group)
    for got, expected in zip(plain(again, optimizer, 2), plain(other, other_optimizer, 2), strict=True):
        assert torch.equal(got, expected)


def masters_keep_bits(group: dist.ProcessGroup) -> None:
    """What is not written keeps more bits than it has in the parameters."""
    model, _ = wrap(made(), group, precision=MixedPrecision(param=torch.bfloat16))
    before = [part.parameter.detach().clone() for part in model.sharding.parts]
    with model.gathered(write=True), torch.no_grad():
        model.module.head.weight.fill_(0.5)
    for part, old in zip(model.sharding.parts, before, strict=True):
        new = torch.full_like(old, 0.5) if part.name == "head.weight" else old
        assert torch.equal(part.parameter, new), part.name


def states(group: dist.ProcessGroup) -> None:
    plain_model = made()
    expected = {f"module.{name}": each for name, each in plain_model.state_dict().items()}
    model, _ = wrap(made(lambda: Small(tied=True)), group)
    state = model.state_dict()
    assert state["module.head.weight"] is state["module.embed.weight"]
    assert_freed(model)
    torch.manual_seed(99)
    model, _ = wrap(Small(), group)
    loss_of(model, 0).backward()
    assert not torch.equal(model.state_dict()["module.head.weight"], expected["module.head.weight"])
    model.load_state_dict(expected)
    assert_freed(model)
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, each in state.items():
        assert torch.equal(each, expected[name]) and not each.requires_grad, name
    model.check_parameters()


# Hosts, and compiled blocks.


def hybrid(group: dist.ProcessGroup) -> None:
    """Two hosts of two ranks: the same bits as shards without gathering."""
    wrapped = []
    with two_hosts(group) as mesh:
        for strategy in ("hybrid_zero2", "hybrid"):
            model = made()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wrapped.append(parallelize(model, optimizer, strategy, mesh))
        whole, gathered = (torch.stack(list(plain(*each, 3))) for each in wrapped)
        assert torch.equal(whole, gathered)
        model = wrapped[1][0]
        assert_freed(model)
        model.check_parameters()


def compiled(group: dist.ProcessGroup) -> None:
    model, optimizer = wrap(made(), group)
    expected = list(plain(model, optimizer, 3))
    model, optimizer = wrap(made(), group)
    for block in model.module.blocks:
        block.compile(backend="aot_eager")
    got = list(plain(model, optimizer, 3))
    assert torch.allclose(torch.stack(got), torch.stack(expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert_freed(model)


CHECKS |= {
    "freed parameter": freed_parameter,
    "units in flight": units_in_flight,
    "units that stay": units_that_stay,
    "kept memory": kept_memory,
    "late gradient": late_gradient,
    "failed forward": failed_forward,
    "failed backward": failed_backward,
    "gradient penalty": gradient_penalty,
    "autocast for long": autocast_for_long,
    "within torch.func": within_torch_func,
    "forward mode": forward_mode,
    "resized": resized,
    "written": written,
    "losses that blocks keep": losses_that_blocks_keep,
    "written and freed": written_and_freed,
    "wrapped again": wrapped_again,
    "masters keep bits": masters_keep_bits,
    "states": states,
    "one rank alone": one_rank_alone,
    "another unit on each rank": another_unit_on_each_rank,
}

SLOW = ["unused on some ranks, accumulated", "units by size", "units by class", "many in flight"]
EACH = [name for name in CHECKS if name not in SLOW]
CHECKS |= {"hybrid": hybrid, "compiled": compiled}

MORE = [
    "plain", "tied", "checkpoint, re-entrant", "unused on some ranks", "written", "another unit on each rank",
]  # fmt: skip
JOBS = [
    *jobs(__name__, EACH, (2, "gloo")),
    *jobs(__name__, MORE, (2, "shm")),
    *jobs(__name__, ["unused on some ranks", "written"], (3, "gloo")),
    *jobs(__name__, ["hybrid"], (4, "gloo")),
    *slow(jobs(__name__, ["plain", "tied", "checkpoint, re-entrant"], (3, "gloo"))),
    *slow(jobs(__name__, SLOW, (2, "gloo")) + jobs(__name__, ["compiled"], (1, "gloo"))),
]


@pytest.mark.parametrize("job", JOBS)
def test_units(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
