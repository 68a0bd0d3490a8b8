"""With average="tokens" or "samples", .grad equals that of one process on all ranks' data, to 1e-12.

Every rank knows what all ranks were given, and computes the same alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from imece import DistributedDataParallel, GradScaler, parallelize
from imece.data_parallel.average import OVER, Over
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, jobs, passed

CLASSES = 5
Part = tuple[torch.Tensor, torch.Tensor]  # float64[tokens, 3], int64[tokens]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.seldom = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return (self.seldom if seldom else self.last)(hidden)  # type: ignore[no-any-return]


def part(count: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def wrap(group: dist.ProcessGroup, over: Over = "tokens") -> DistributedDataParallel:
    cap_mb = 100 / 2**20  # three buckets
    return DistributedDataParallel(Net(), process_group=group, average=over, bucket_cap_mb=cap_mb)


def whole(module: nn.Module, parts: list[Part]) -> nn.Module:
    """A copy with the gradient of the mean over everything."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    functional.cross_entropy(alone(x), y).backward()
    return alone


def same(model: DistributedDataParallel, alone: nn.Module, what: str = "") -> None:
    for (name, expected), got in zip(alone.named_parameters(), model.module.parameters(), strict=True):
        if expected.grad is None or got.grad is None:
            assert got.grad is expected.grad, f"{what}: {name} is {got.grad}, expected {expected.grad}"
            continue
        apart = (got.grad - expected.grad).abs().max().item()
        assert apart <= 1e-12, f"{what}: {name} is off by {apart}"


def bring(model: DistributedDataParallel, mine: Part) -> None:
    """Forward and backward of one micro-batch, whose loss is a mean, NaN if it is empty."""
    x, y = mine
    model.weigh(functional.cross_entropy(model(x), y), len(y)).backward()


# Counts of each rank: of micro-batches, of which all but the last are in no_sync.
COUNTS: dict[int, list[list[list[int]]]] = {
    2: [[[5], [2]], [[7], [0]], [[5, 1], [2, 6]], [[4, 0, 3], [0, 0, 9]], [[0, 3], [8, 0]]],
    3: [[[5], [2], [9]], [[0], [4], [0]], [[5, 1], [2, 0], [9, 4]], [[0, 0], [1, 0], [3, 2]]],
}


def any_counts(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    for over in OVER[1:]:
        model = wrap(group, over)
        for step, counts in enumerate(COUNTS[group.size()]):
            parts = [
                [part(count, 100 * step + 10 * at + micro) for micro, count in enumerate(each)]
                for at, each in enumerate(counts)
            ]
            alone = whole(model.module, [one for each in parts for one in each])
            model.zero_grad(set_to_none=step % 2 == 0)
            *before, last = parts[rank]
            with model.no_sync():
                for one in before:
                    bring(model, one)
            bring(model, last)
            if step % 2:
                alone.seldom.weight.grad = alone.seldom.bias.grad = None  # type: ignore[union-attr]
                for each in model.module.seldom.parameters():  # type: ignore[union-attr]
                    assert each.grad is None or not each.grad.any()
                    each.grad = None
            same(model, alone, f"{over}, counts {counts}")


# As `bring`, but the total is said, and each micro-batch is reduced unless it is in no_sync.
def bring_of(model: DistributedDataParallel, mine: Part, total: float, scaler: GradScaler) -> None:
    x, y = mine
    loss = model.weigh(functional.cross_entropy(model(x), y), len(y), total)
    scaler.scale(loss).backward()


def of_a_total(group: dist.ProcessGroup) -> None:
    """Micro-batches that are reduced one by one add up to the mean over all of them, under every strategy,
    with some of them in no_sync, fp16's scale, and a rank that has run out."""
    rank, last = dist.get_rank(), group.size() - 1
    for strategy, step in itertools.product(("replicate", "zero1", "zero2", "zero3"), range(4)):
        net = Net()
        sgd = torch.optim.SGD(net.parameters())
        model, optimizer = parallelize(net, sgd, strategy, group, average="tokens", bucket_cap_mb=1e-4)
        with model.gathered():
            begun = copy.deepcopy(model.module)
        leaves = step == 3 and strategy != "zero3"  # the last rank, before its third micro-batch
        parts = [
            [part((3 * at + 5 * micro + step) % 7, 100 * step + 10 * at + micro) for micro in range(4)]
            for at in range(group.size())
        ]
        if leaves:
            del parts[last][2:]
        alone = whole(begun, [one for each in parts for one in each])
        total = sum(len(y) for each in parts for _, y in each)
        scaler = GradScaler("cpu", init_scale=2.0**step, enabled=step > 0)
        with model.join(enable=leaves):
            for micro, mine in enumerate(parts[rank]):
                local = (step == 1 and micro == 1) or (step == 2 and micro in (0, 2))
                with model.no_sync() if local else contextlib.nullcontext():
                    bring_of(model, mine, total, scaler)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        assert model.strategy == strategy
        wanted = dict(alone.named_parameters())
        if strategy == "replicate" and not (leaves and rank == last):  # that has gradients of its own
            same(model, alone, f"{strategy}, step {step}")
        for each in model.parts:
            grad = wanted[each.name].grad
            grad = torch.zeros_like(wanted[each.name]) if grad is None else grad
            got = torch.zeros(each.stop - each.start) if each.parameter.grad is None else each.parameter.grad
            expected = grad.flatten()[each.start : each.stop]
            torch.testing.assert_close(got.flatten().double(), expected, rtol=1e-12, atol=1e-12)


def totals_that_differ(group: dist.ProcessGroup) -> None:
    """All ranks learn of it, those that have run out too."""
    rank, (x, y) = dist.get_rank(), part(3, 0)
    first, *others = range(group.size())
    model = wrap(group)

    def backward(*totals: float | None, count: int = 3) -> None:
        losses = [functional.cross_entropy(model(x), y) for _ in totals]
        weighed = [model.weigh(loss, count, each) for loss, each in zip(losses, totals, strict=True)]
        torch.stack(weighed).sum().backward()

    with pytest.raises(MismatchError, match=rf"the total of tokens .* 17 on rank {first}, 18 on rank.* Give"):
        backward(17 if rank == first else 18)
    with pytest.raises(MismatchError, match=rf"20 on rank {first}, none on rank"):
        backward(20 if rank == first else None)
    with pytest.raises(MismatchError, match=rf"30 and 31 on rank {first}, 30 on rank"):
        backward(30, 31 if rank == first else 30)
    if len(others) > 1:
        with pytest.raises(MismatchError, match=f"{others[0] + 40} on rank {others[0]}"), model.join():
            if rank in others:
                backward(40 + rank)
    with pytest.raises(ValueError, match=rf"brought {3 * group.size()} tokens.* a total of 4: "):
        backward(4)
    for total in (2, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"over 3 of {total} tokens: total is the number in the whole"):
            model.weigh(torch.tensor(1.0), 3, total)
    wrong: Any = "3"
    with pytest.raises(TypeError, match=r"weigh\(loss, count, total\): a number of tokens, not"):
        model.weigh(torch.tensor(1.0), 3, wrong)
    model.zero_grad()
    backward(0, count=0)
    assert all(each.grad is None or not each.grad.any() for each in model.parameters())


def fractions(group: dist.ProcessGroup) -> None:
    """Weights need not be whole: the mean of losses, each with its own."""
    weights = [0.25, 3.5, 1e-3][: group.size()]
    model = wrap(group, "samples")
    parts = [part(4, seed) for seed in range(group.size())]
    alone = copy.deepcopy(model.module)
    losses = [functional.cross_entropy(alone(x), y) * w for (x, y), w in zip(parts, weights, strict=True)]
    (torch.stack(losses).sum() / sum(weights)).backward()
    x, y = parts[dist.get_rank()]
    loss = functional.cross_entropy(model(x), y)
    model.weigh(loss, weights[dist.get_rank()]).backward()
    same(model, alone)


WAYS = ("ignored", "empty", "masked", "masked, a mean over 0")


def nothing_to_predict(way: str) -> Check:
    """A rank whose tokens are all padding, in the ways in which the loss of none is written."""

    def check(group: dist.ProcessGroup) -> None:
        idle = dist.get_rank() == 0
        model = wrap(group)
        x, y = part(6, 7)
        alone = whole(model.module, [(x, y)] * (group.size() - 1))
        for _ in range(2):
            if not idle:
                loss = functional.cross_entropy(model(x), y)
            elif way == "ignored":
                loss = functional.cross_entropy(model(x), torch.full_like(y, -100))
            elif way == "empty":
                loss = functional.cross_entropy(model(x[:0]), y[:0])
            else:
                each, mask = functional.cross_entropy(model(x), y, reduction="none"), torch.zeros(6)
                loss = (each * mask).sum() / mask.sum().clamp(min=way == "masked")
            assert loss.isnan() == (idle and way != "masked")
            model.zero_grad()
            model.weigh(loss, 0 if idle else 6).backward()
            same(model, alone)

    return check


def reduced_before(group: dist.ProcessGroup) -> None:
    """A second backward that is reduced is added to the first, as with the mean over ranks; and so is one
    after others in no_sync, unless all of that was thrown away."""
    model, rank = wrap(group), dist.get_rank()
    cases = ((True, 0, False), (False, 0, False), (True, 2, False), (False, 2, False), (True, 1, True))
    for clears, in_no_sync, thrown_away in cases:
        model.zero_grad(set_to_none=clears)
        sums: list[torch.Tensor] = []
        for step in range(3):
            *local, last = (
                [part(2 + 3 * at + step, 100 * step + 10 * micro + at) for at in range(group.size())]
                for micro in range(in_no_sync + 1)
            )
            for each in local:
                with model.no_sync():
                    bring(model, each[rank])
            if thrown_away:
                model.zero_grad()
                sums, local = [], []
            alone = whole(model.module, [*itertools.chain(*local, last)])
            now = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
            sums = [older + newer for older, newer in zip(sums, now, strict=True)] if sums else now
            bring(model, last[rank])
        for expected, p in zip(sums, model.module.parameters(), strict=True):
            got = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def left_out(group: dist.ProcessGroup) -> None:
    """What no backward came of does not count, nor what was thrown away."""
    model = wrap(group)
    for step in range(3):
        parts = [part(2 + at + step, 10 * step + at) for at in range(group.size())]
        x, y = parts[dist.get_rank()]
        model.weigh(functional.cross_entropy(model(x), y), 100)  # a loss that was not finite, say
        with model.no_sync():
            bring(model, part(7, step))
        model.zero_grad()
        alone = whole(model.module, parts)
        bring(model, (x, y))
        same(model, alone, f"step {step}")


def several_losses(group: dist.ProcessGroup) -> None:
    """In one backward, of forwards in no_sync or not; and one of them that is left out."""
    model = wrap(group)
    for step, quiet in enumerate((False, True, False)):
        parts = [[part(1 + 2 * at + step + two, 10 * at + two) for two in range(2)]
                 for at in range(group.size())]  # fmt: skip
        alone = whole(model.module, [one for each in parts for one in each])
        model.zero_grad()
        losses = []
        for (x, y), local in zip(parts[dist.get_rank()], (quiet, False), strict=True):
            with model.no_sync() if local else contextlib.nullcontext():
                losses.append(model.weigh(functional.cross_entropy(model(x), y), len(y)))
        _left = model.weigh(functional.cross_entropy(model(x), y), 100)
        (losses[0] + losses[1]).backward()
        same(model, alone, f"step {step}")


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        raise MemoryError


def lost_in_backward(group: dist.ProcessGroup) -> None:
    """A backward that raises does not count, before it has reached the model or after, reduced or not."""
    model = wrap(group)
    for step, (behind, local) in enumerate([(True, False), (False, False), (True, True), (False, True)]):
        parts = [part(2 + at, 10 * step + at) for at in range(group.size())]
        alone = whole(model.module, parts)
        x, y = parts[dist.get_rank()]
        with model.no_sync() if local else contextlib.nullcontext():
            logits = model(Failing.apply(x.clone().requires_grad_()) if behind else x)  # type: ignore[no-untyped-call]
            loss = functional.cross_entropy(logits if behind else Failing.apply(logits), y)  # type: ignore[no-untyped-call]
            with pytest.raises(MemoryError):
                model.weigh(loss, 100).backward()
        if step % 2:  # of no tokens, and it has said so
            with pytest.raises(MemoryError):
                model.weigh(functional.cross_entropy(Failing.apply(model(x)), y), 0).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            model.weigh(model(x).sum() * float("nan"), 1).backward()
            assert all(each.grad.isnan().all() for each in model.module.first.parameters())  # type: ignore[union-attr]
        model.zero_grad()
        bring(model, (x, y))
        same(model, alone, f"behind: {behind}, local: {local}")


def counted_by_autograd_grad(group: dist.ProcessGroup) -> None:
    """Gradients that are asked for write no .grad and do not count: nor is a number asked for."""
    model = wrap(group)
    for step in range(3):
        parts = [part(2 + at, 10 * step + at) for at in range(group.size())]
        alone = whole(model.module, parts)
        x, y = parts[dist.get_rank()]
        model.zero_grad()
        asked = x.clone().requires_grad_()
        torch.autograd.grad(model(asked).sum(), asked)
        for local in (True, False):
            with model.no_sync() if local else contextlib.nullcontext():
                loss = model.weigh(functional.cross_entropy(model(asked), y), 50)
                torch.autograd.grad(loss, asked)
        bring(model, (x, y))
        same(model, alone, f"step {step}")


def zeroed_in_place(group: dist.ProcessGroup) -> None:
    """What a sharded model's zero_grad throws away does not count, whether to None or to zeros."""
    model: Any
    for zeroes in ("optimizer", "model"):
        net = Net()
        sgd = torch.optim.SGD(net.parameters())
        model, optimizer = parallelize(net, sgd, "zero2", group, average="tokens")
        parts = [part(2 + at, at) for at in range(group.size())]
        with model.gathered():
            alone = whole(model.module, parts)
        with model.no_sync():
            bring(model, part(7, 9))
        (optimizer if zeroes == "optimizer" else model).zero_grad(set_to_none=False)
        bring(model, parts[dist.get_rank()])
        grads = [each.grad for each in alone.parameters() if each.grad is not None]
        torch.testing.assert_close(model.gradient_norm(), nn.utils.get_total_norm(grads))


def zeroed_after_the_forward(group: dist.ProcessGroup) -> None:
    """What is thrown away between a forward and its backward does not count."""
    model = wrap(group)
    parts = [part(2 + at, at) for at in range(group.size())]
    alone = whole(model.module, parts)
    with model.no_sync():
        bring(model, part(7, 9))
    x, y = parts[dist.get_rank()]
    loss = model.weigh(functional.cross_entropy(model(x), y), len(y))
    model.zero_grad()
    loss.backward()
    same(model, alone)


def unused_here(group: dist.ProcessGroup) -> None:
    """A branch that one rank takes: its gradient is over all tokens, too."""
    rank = dist.get_rank()
    model = wrap(group)
    parts = [part(2 + seed, seed) for seed in range(group.size())]
    alone = copy.deepcopy(model.module)
    total = sum(len(y) for _, y in parts)
    for at, (x, y) in enumerate(parts):
        (functional.cross_entropy(alone(x, at == 0), y) * len(y) / total).backward()
    x, y = parts[rank]
    for _ in range(2):
        model.zero_grad()
        model.weigh(functional.cross_entropy(model(x, rank == 0), y), len(y)).backward()
        same(model, alone)


# Ranks that run out: micro-batches of each rank.
RAGGED: dict[int, list[list[int]]] = {
    2: [[3, 1, 4, 1, 5], [2, 6]],
    3: [[3, 1], [], [2, 7, 1, 8]],
}


def ranks_that_run_out(group: dist.ProcessGroup) -> None:
    for divide in (True, False):
        lengths = RAGGED[group.size()]
        model = wrap(group)
        parts = [
            [part(count, 10 * at + micro) for micro, count in enumerate(each)]
            for at, each in enumerate(lengths)
        ]
        with model.join(divide_by_initial_world_size=divide):
            for step, mine in enumerate(parts[dist.get_rank()]):
                alone = whole(model.module, [each[step] for each in parts if step < len(each)])
                model.zero_grad()
                bring(model, mine)
                same(model, alone, f"step {step}")
        for step in range(2):
            parts_now = [part(2 + at, 50 + 10 * at + step) for at in range(group.size())]
            alone = whole(model.module, parts_now)
            model.zero_grad()
            bring(model, parts_now[dist.get_rank()])
            same(model, alone, f"step {step} after it")


def ranks_that_run_out_in_an_accumulation(group: dist.ProcessGroup) -> None:
    """Two micro-batches a step, and the last rank has only the first of the second step.

    What it has computed is in the mean with its gradient, as with its count.
    """
    rank, last = dist.get_rank(), group.size() - 1
    model = wrap(group)
    parts = [[part(2 + at + micro, 10 * at + micro) for micro in range(3 if at == last else 6)]
             for at in range(group.size())]  # fmt: skip
    with model.join():
        for step in range(3):
            now = [each[2 * step : 2 * step + 2] for each in parts]
            if not now[rank]:
                break
            alone = whole(model.module, [one for each in now for one in each])
            model.zero_grad()
            with model.no_sync():
                bring(model, now[rank][0])
            if len(now[rank]) == 2:
                bring(model, now[rank][1])
                same(model, alone, f"step {step}")


def trained_together(group: dist.ProcessGroup) -> None:
    """Ten optimizer steps with changing counts end where one process ends."""
    model = wrap(group)
    alone = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    for step in range(10):
        parts = [part((3 * at + 5 * step) % 7, 10 * step + at) for at in range(group.size())]
        expected = whole(alone, parts)
        for mine, other in zip(alone.parameters(), expected.parameters(), strict=True):
            mine.grad = other.grad
        model.zero_grad()
        bring(model, parts[dist.get_rank()])
        for optimizer in optimizers:
            optimizer.step()
    for got, expected_value in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected_value, rtol=1e-12, atol=1e-12)


def mistakes(group: dist.ProcessGroup) -> None:
    x, y = part(3, 0)
    with pytest.raises(ValueError, match="averages over ranks"):
        DistributedDataParallel(Net(), process_group=group).weigh(torch.tensor(1.0), 3)
    model = wrap(group, "samples")
    for count in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"number of samples, not over {count}"):
            model.weigh(torch.tensor(1.0), count)
    wrong: list[Any] = [(torch.tensor(1.0), "3"), (torch.tensor(1.0), None), (3, torch.tensor(1.0))]
    for loss, of in wrong:
        with pytest.raises(TypeError, match=r"weigh\(loss, count\): a tensor and a number of samples, not"):
            model.weigh(loss, of)
    with pytest.raises(ValueError, match=r"how many samples.*weigh"):
        functional.cross_entropy(model(x), y).backward()
    for step in range(2):  # a right step after it
        parts = [part(2 + at, step) for at in range(group.size())]
        alone = whole(model.module, parts)
        model.zero_grad()
        bring(model, parts[dist.get_rank()])
        same(model, alone)


def forgotten_on_one_rank(group: dist.ProcessGroup) -> None:
    """All ranks must learn of it: the sum would be wrong on all of them."""
    x, y = part(3, 0)
    model = wrap(group)
    loss = functional.cross_entropy(model(x), y)
    with pytest.raises(ValueError, match="weigh"):
        (loss if dist.get_rank() == 0 else model.weigh(loss, 3)).backward()


CHECKS: dict[str, Check] = {
    "any counts": any_counts,
    "of a total": of_a_total,
    "totals that differ": totals_that_differ,
    "fractions": fractions,
    **{f"nothing to predict, {way}": nothing_to_predict(way) for way in WAYS},
    "several losses": several_losses,
    "lost in backward": lost_in_backward,
    "counted by autograd.grad": counted_by_autograd_grad,
    "zeroed in place": zeroed_in_place,
    "zeroed after the forward": zeroed_after_the_forward,
    "unused here": unused_here,
    "reduced before": reduced_before,
    "left out": left_out,
    "ranks that run out": ranks_that_run_out,
    "ranks that run out in an accumulation": ranks_that_run_out_in_an_accumulation,
    "trained together": trained_together,
    "mistakes": mistakes,
    "forgotten on one rank": forgotten_on_one_rank,
}


ON_GLOO = [
    "any counts",
    "ranks that run out",
    "ranks that run out in an accumulation",
    "forgotten on one rank",
    "of a total",
    "totals that differ",
]


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (3, "shm")) + jobs(__name__, ON_GLOO, (3, "gloo")))
def test_average(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
