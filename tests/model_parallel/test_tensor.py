"""A divided model trains like the whole one on one rank, in every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import imece
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.boundary import Boundary
from imece.model_parallel.divided import divided_parameters
from imece.models.generate import generate
from imece.models.shape import TransformerConfig
from imece.models.transformer import KVCache, Transformer
from tests.dropped import left_of
from tests.ranks import run_ranks

EXACT = 1e-12
STEPS = 3
SEQUENCES = 4
PLAIN = TransformerConfig(
    vocab_size=32, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, max_seq=16
)  # fmt: skip
FULL = replace(PLAIN, head_norms=True, qkv_bias=True, out_bias=True, mlp_bias=True)
TIED = replace(FULL, tied_head=True)
ODD = replace(FULL, vocab_size=33)


class Net(nn.Module):
    """Not one of ours: learned positions, post-norms with biases, dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 8, padding_idx=20), nn.Embedding(8, 8)
        self.start = nn.Identity()
        self.wide, self.wide_gate, self.narrow = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.start(x)
        x = self.norm(x + self.narrow(F.gelu(self.wide(x)) * self.wide_gate(x)))
        return torch.as_tensor(self.head(x))


class Drops(nn.Module):
    """Drops where all ranks have the same, by no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.up(x)), 0.5, self.training)


NET_PLAN = {
    "wide*": "column", "narrow": "row", "norm": "sequence", "start": "scatter", "head": "vocab"
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to train."""

    make: Callable[[], nn.Module]
    strategy: str = "replicate"
    recompute: bool = False
    frozen: bool = False  # while it is divided
    dividing: dict[str, Any] = field(default_factory=dict)
    wrapping: dict[str, Any] = field(default_factory=dict)


def ours(
    config: TransformerConfig, strategy: str = "replicate", recompute: bool = False, **wrapping: Any
) -> Case:
    return Case(lambda: Transformer(config), strategy, recompute, wrapping=wrapping)


def by_positions(case: Case) -> Case:
    return replace(case, dividing=case.dividing | {"sequence": True})


def by_vocabulary(case: Case) -> Case:
    return replace(case, dividing=case.dividing | {"divided_logits": True})


CASES = {
    "plain": ours(PLAIN),
    "biases and norms of heads": ours(FULL),
    "tied": ours(TIED, recompute=True),
    "a vocabulary that stays whole": ours(ODD),
    "sequence": by_positions(ours(FULL)),
    "sequence, tied": by_positions(ours(TIED, recompute=True)),
    "frozen at first": by_positions(replace(ours(FULL), frozen=True)),
    "sequence, a vocabulary that stays whole": by_positions(ours(ODD)),
    "a plan": Case(Net, dividing={"plan": NET_PLAN | {"tokens": "vocab"}}),
    "a plan, sequence": Case(Net, dividing={"plan": NET_PLAN, "sequence": True}),
    "divided logits": by_vocabulary(ours(FULL)),
    "divided logits, sequence, tied": by_vocabulary(by_positions(ours(TIED, recompute=True))),
    "divided logits, a vocabulary that stays whole": by_vocabulary(ours(ODD)),
    "divided logits, a plan": by_vocabulary(Case(Net, dividing={"plan": NET_PLAN | {"tokens": "vocab"}})),
}
SHARDED = {
    "zero1": ours(TIED, "zero1"),
    "zero2": by_positions(ours(FULL, "zero2")),
    "zero3": by_positions(ours(TIED, "zero3")),
    "zero3, gathered": by_positions(ours(FULL, "zero3", gather=True)),
    "zero3, gathered, recomputed": ours(TIED, "zero3", recompute=True, gather=True),
    "zero1, divided logits": by_vocabulary(ours(TIED, "zero1")),
    "zero3, gathered, divided logits": by_vocabulary(by_positions(ours(FULL, "zero3", gather=True))),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """tokens and targets, int64 [SEQUENCES, 8]."""
    tokens = torch.randint(0, 32, (SEQUENCES, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def made(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = case.make().double()
    for each in model.parameters():  # biases begin at zero, and the loss near that of a guess
        nn.init.normal_(each, std=0.3)
    return model


def trained(model: nn.Module, optimizer: Any, share: int = 0, shares: int = 1) -> Iterator[Tensor]:
    for step in range(STEPS):
        tokens, targets = (each.chunk(shares)[share] for each in batch(step))
        loss = imece.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def divided(case: Case, mesh: Mesh) -> tuple[DistributedDataParallel, Any]:
    model = made(case, mesh.rank).requires_grad_(not case.frozen)
    imece.tensor_parallel(model, mesh, **case.dividing).requires_grad_(True)
    if case.recompute:
        vars(model)["checkpoint_blocks"] = True
    return imece.parallelize(model, sgd, case.strategy, mesh, **case.wrapping)


def worst(case: Case, mesh: Mesh) -> float:
    """By how much the divided model's losses and parameters differ from those of one rank."""
    whole = made(case, seed=0)  # rank 0's values count
    expected = torch.stack(list(trained(whole, sgd(whole.parameters()))))
    wrapped, optimizer = divided(case, mesh)
    group = mesh.data_group
    losses = torch.stack(list(trained(wrapped, optimizer, group.rank(), group.size())))
    imece.all_reduce(losses, "sum", group=group)
    found = (losses / group.size() - expected).abs().max().item()
    parts = divided_parameters(wrapped.module)
    assert parts
    known = dict(whole.named_parameters())
    with wrapped.gathered():
        for name, each in wrapped.module.named_parameters():
            same = parts[name].of(known[name]) if name in parts else known[name]
            found = max(found, (each - same).abs().max().item())
            if name not in parts:
                check_same_bits(each.detach(), mesh.group("tensor"), name)
    return found


def check_same_bits(tensor: Tensor, group: dist.ProcessGroup, name: str) -> None:
    every = tensor.new_empty(group.size() * tensor.numel())
    imece.all_gather(every, tensor.reshape(-1).contiguous(), group=group)
    for theirs in every.view(group.size(), -1):
        assert torch.equal(theirs, tensor.reshape(-1)), f"{name} is not the same on all ranks of the axis"


def compare(axes: dict[str, int], names: list[str]) -> int:
    mesh = imece.init(axes)
    for name in names:
        found = worst((CASES | SHARDED)[name], mesh)
        assert found < EXACT, f"{name}: {found}"
    return len(names)


@pytest.mark.parametrize(
    ("axes", "backend", "names"),
    [
        ({"tensor": 2}, "shm", list(CASES)),
        ({"tensor": 2}, "gloo", ["tied", "sequence", "a plan, sequence", "divided logits"]),
        ({"replicate": 2, "tensor": 2}, "shm", ["plain", *SHARDED]),
        ({"replicate": 2, "tensor": 2}, "gloo", ["zero1", "zero3, gathered"]),
    ],
)
def test_trains_as_one_rank(axes: dict[str, int], backend: str, names: list[str]) -> None:
    ranks = 4 if "replicate" in axes else 2
    assert run_ranks(compare, ranks, args=[axes, names], backend=backend) == [len(names)] * ranks


def four() -> None:
    mesh = imece.init({"tensor": 4})
    config = replace(FULL, kv_heads=4)
    assert worst(by_positions(ours(config)), mesh) < EXACT
    assert worst(ours(replace(config, tied_head=True)), mesh) < EXACT


def test_four_parts() -> None:
    run_ranks(four, 4)


def broken() -> None:
    """Each collective that is left out is seen by the comparison above."""
    mesh = imece.init({"tensor": 2})
    case = by_positions(ours(FULL))
    for name, instead in {
        "summed": lambda self, gradient: gradient,
        "leave": lambda self, addend: addend.chunk(2, 1)[self.index],
        "join_channels": lambda self, part: torch.cat([part, part], -1),
    }.items():
        right = getattr(Boundary, name)
        setattr(Boundary, name, instead)
        try:
            found = worst(case, mesh)
        except AssertionError as error:  # parameters that all have alike have parted
            assert "not the same on all ranks" in str(error), error
        else:
            assert found > 1e-6, f"without {name} nobody saw a difference: {found}"
        setattr(Boundary, name, right)
    enter = Boundary.enter
    Boundary.enter = lambda self, x: x  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError, match="not the same on all ranks"):
            worst(ours(PLAIN), mesh)
    finally:
        Boundary.enter = enter  # type: ignore[method-assign]


def test_what_is_left_out_is_seen() -> None:
    run_ranks(broken, 2)


def penalty(model: nn.Module) -> tuple[Tensor, ...]:
    """The gradients, in what is whole on each rank, of the square of a gradient."""
    of, norm = model.get_parameter("places.weight"), model.get_parameter("norm.weight")
    loss = model(batch(0)[0]).square().mean()
    (gradient,) = torch.autograd.grad(loss, [of], create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [of, norm])


def used() -> None:
    """A divided model in other uses than training."""
    mesh = imece.init({"tensor": 2})
    whole = made(ours(TIED), seed=0)
    assert isinstance(whole, Transformer)
    model = imece.tensor_parallel(copy.deepcopy(whole), mesh)
    tokens, targets = batch(0)
    copied = copy.deepcopy(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), whole(tokens), rtol=0, atol=EXACT)
    with torch.no_grad():
        expected = whole(tokens)
        for each in (model, copied):
            torch.testing.assert_close(each(tokens), expected, rtol=0, atol=EXACT)
        cache = KVCache(TIED, SEQUENCES, dtype=torch.float64)
        steps = [model(each, cache=cache) for each in tokens.split(3, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=EXACT)
    for bad in (32, -1):
        with pytest.raises(IndexError):
            model(tokens.clone().fill_(bad))
    assert cast(Any, model.blocks[0]).attention.q.out_features == TIED.q_width // 2
    # One input that enters once: six all-reduces of a block are three.
    moves = []
    move = Boundary._move
    Boundary._move = lambda *args, **kwargs: moves.append(1) or move(*args, **kwargs)  # type: ignore[method-assign, func-returns-value]
    model(tokens)
    Boundary._move = move  # type: ignore[method-assign]
    assert len(moves) == TIED.layers * 4 + 3
    net = made(CASES["a plan"], seed=0)
    once = penalty(net)
    again = penalty(imece.tensor_parallel(net, mesh, plan=NET_PLAN))
    torch.testing.assert_close(again, once, rtol=1e-9, atol=EXACT)
    half, exact = copy.deepcopy(model).float(), copy.deepcopy(whole).float()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (imece.cross_entropy(each(tokens), targets) for each in (half, exact))
    got.backward()
    assert abs(got.item() - want.item()) < 0.05
    assert all(each.grad is not None and each.grad.isfinite().all() for each in half.parameters())


def test_other_uses() -> None:
    run_ranks(used, 2)


def dropped() -> None:
    mesh = imece.init({"tensor": 2})

    def trained() -> list[Any]:
        model = imece.tensor_parallel(made(ours(TIED), seed=0), mesh)
        wrapped, optimizer = imece.parallelize(model, torch.optim.AdamW, "zero1", mesh)
        tokens, targets = batch(0)
        imece.cross_entropy(wrapped(tokens), targets).backward()
        optimizer.step()
        return [*model.modules(), *model.parameters(), wrapped]

    assert left_of(trained) == []


def test_a_dropped_model_gives_its_memory_back() -> None:
    run_ranks(dropped, 2, backend=None)


def compiled() -> None:
    """torch.compile leaves the collectives where they are, in backward too."""
    mesh = imece.init({"tensor": 2})
    found = []
    for compiling in (False, True):
        model: nn.Module = made(CASES["a plan"], seed=0)
        imece.tensor_parallel(model, mesh, plan=NET_PLAN)
        tokens, targets = batch(0)
        run = torch.compile(model, backend="aot_eager", dynamic=False) if compiling else model
        imece.cross_entropy(run(tokens), targets).backward()
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=EXACT)


def test_compiled() -> None:
    run_ranks(compiled, 2)


def refused() -> list[str]:
    mesh = imece.init({"tensor": 2})
    said: list[str] = []

    def refuse(call: Callable[[], object], kind: type[Exception] = UserError) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    model = imece.tensor_parallel(Transformer(PLAIN), mesh, sequence=True)
    refuse(lambda: imece.tensor_parallel(model, mesh))
    tokens = batch(0)[0]
    refuse(lambda: model(tokens[:, :7]), ValueError)
    refuse(lambda: model(tokens, last_only=True), ValueError)
    refuse(lambda: next(iter(generate(model, [1, 2], 2))), ValueError)
    wrapped = DistributedDataParallel(Transformer(PLAIN), process_group=mesh.data_group)
    refuse(lambda: imece.tensor_parallel(wrapped, mesh))
    refuse(lambda: DistributedDataParallel(model), ValueError)  # over all ranks
    with torch.device("meta"):
        bare = Transformer(PLAIN)
    refuse(lambda: imece.tensor_parallel(bare, mesh))
    apart = imece.tensor_parallel(Transformer(PLAIN), mesh)
    refuse(lambda: apart(batch(mesh.rank)[0]))
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # without an embedding
    imece.tensor_parallel(linear, mesh, plan={"0": "column", "1": "row"})
    numbers = torch.full((2, 4), 1.0 + mesh.rank)
    refuse(lambda: linear(numbers))
    adapted = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    imece.tensor_parallel(adapted, mesh, plan={"0": "column", "1": "row"})
    adapted[0] = nn.Sequential(adapted[0])  # what peft does
    refuse(lambda: adapted(torch.ones(2, 4)))
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # of positions, from outside
    imece.tensor_parallel(parts, mesh, plan={"0": "column", "1": "row"}, sequence=True)
    assert parts(numbers[None]).shape == (1, 2, 4)
    drops = Drops()
    imece.tensor_parallel(drops, mesh, plan={"up": "column", "down": "row"})
    torch.manual_seed(mesh.rank)
    drops.eval()(torch.ones(2, 4))  # draws nothing
    refuse(lambda: drops.train()(torch.ones(2, 4)))
    torch.manual_seed(7)
    drops(torch.ones(2, 4))
    drops(torch.ones(2, 4))
    if mesh.rank == 0:
        torch.rand(1)  # what an evaluation on one rank alone does
    refuse(lambda: drops(torch.ones(2, 4)))
    pipeline = imece.Pipeline(nn.Sequential(drops), mesh, micro_batches=2, loss=lambda y, _: y.sum())
    refuse(lambda: pipeline.step(torch.ones(2, 4), torch.ones(2, 4)))
    return said


def test_what_is_refused_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    for said, expected in zip(
        first,
        (
            "divided already",
            "among 2 ranks, and this has the shape [4, 7, 16]: take a multiple of 2 positions",
            "last_only: tensor_parallel(sequence=True) goes through whole sequences alone",
            "goes through whole sequences alone",
            "is wrapped already",
            "divided along the axis tensor, and ranks of the group have other parts of it",
            "embed.weight is on the meta device",
            "different inputs, and need the same: take share mesh.batch_rank of mesh.batch_ranks",
            "different inputs, and need the same",
            "0 was divided along the axis tensor, and now is in a Sequential",
            "forward 1: the ranks of a tensor group drew different random numbers",
            "forward 4: the ranks of a tensor group drew different random numbers",
            "step 1: the ranks of a tensor group drew different random numbers",
        ),
        strict=True,
    ):
        assert expected in said


def test_one_rank_changes_nothing() -> None:
    run_ranks(alone, 1)


def alone() -> None:
    mesh = imece.init({"tensor": 1})
    model = Transformer(PLAIN)
    assert imece.tensor_parallel(model, mesh) is model
    assert divided_parameters(model) == {}
    with pytest.raises(UserError, match="no module of Transformer is called 'nothing'"):
        imece.tensor_parallel(model, mesh, plan={"nothing": "row"})
    with pytest.raises(UserError, match="plan: a list, where names are to have kinds"):
        imece.tensor_parallel(model, mesh, plan=["*.up"])  # type: ignore[arg-type]
