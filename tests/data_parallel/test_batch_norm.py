"""Synchronised batch norm equals torch's BatchNorm on the whole batch, over "shm" and Gloo.

Every rank draws the whole batch from the same seed, runs torch's BatchNorm on it alone, and compares with
its own part of what the ranks did together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imece  # noqa: F401 - registers "shm"
from imece.collectives import ops, recorder
from imece.data_parallel.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from tests.ranks import run_ranks

CHANNELS = 5
# Samples of each rank, by the number of ranks.
SPLITS = {2: [[3, 3], [5, 1], [0, 4], [7, 0]], 3: [[2, 2, 2], [1, 6, 3], [4, 0, 1], [0, 5, 0]]}
PLAIN: dict[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
SPATIAL: dict[int, tuple[int, ...]] = {2: (), 3: (7,), 4: (4, 3), 5: (2, 3, 2)}


class Case:
    """One setting of the layer, the whole batches of several steps, and which rows are this rank's."""

    def __init__(self, dims: int, split: list[int], steps: int = 1, **options: Any) -> None:
        torch.manual_seed(dims)
        self.rows = slice(sum(split[: dist.get_rank()]), sum(split[: dist.get_rank() + 1]))
        shape = (sum(split), CHANNELS, *SPATIAL[dims])
        self.inputs = [torch.randn(shape, dtype=torch.float64) * 3 + 1 for _ in range(steps)]
        self.slopes = [torch.randn(shape, dtype=torch.float64) for _ in range(steps)]  # of the loss
        self.plain = PLAIN[dims](CHANNELS, **options).double()
        with torch.no_grad():
            for parameter in self.plain.parameters():
                parameter.uniform_(-2, 2)
        self.ours = convert_sync_batchnorm(copy.deepcopy(self.plain))
        assert type(self.ours) is SyncBatchNorm

    def check(
        self,
        tolerance: float = 1e-12,
        dtype: torch.dtype = torch.float64,
        rounding: float = 0.0,
        **layout: Any,
    ) -> None:
        """tolerance: of all results; those in dtype may be off by `rounding` too. layout: of the inputs."""

        def near(got: torch.Tensor, expected: torch.Tensor, what: str, more: float = 0.0) -> None:
            atol = tolerance + more
            torch.testing.assert_close(
                got.double(), expected.double(), rtol=atol, atol=atol, msg=lambda text: f"{what}: {text}"
            )

        for whole, slope in zip(self.inputs, self.slopes, strict=True):
            whole, slope = whole.to(dtype).double().requires_grad_(), slope.to(dtype).double()
            expected = self.plain(whole)
            (expected * slope).sum().backward()
            own = whole[self.rows].to(dtype, **layout).detach().requires_grad_()
            got = self.ours(own)
            (got * slope[self.rows].to(dtype)).sum().backward()
            assert got.dtype == dtype and own.grad is not None and whole.grad is not None
            if layout and own.numel():
                assert got.is_contiguous(**layout) and own.grad.is_contiguous(**layout)
            near(got, expected[self.rows], "output", rounding)
            near(own.grad, whole.grad[self.rows], "input's gradient", rounding)
        for (name, one), other in zip(self.plain.named_parameters(), self.ours.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None, (
                "a rank without samples has a gradient too: zero"
            )
            near(ops.all_reduce(other.grad.double()), one.grad, f"gradient of {name}")
        for (name, one_buffer), other_buffer in zip(
            self.plain.named_buffers(), self.ours.buffers(), strict=True
        ):
            near(other_buffer, one_buffer, name)


def equals_the_whole_batch() -> None:
    splits = SPLITS[dist.get_world_size()]
    for dims in PLAIN:
        for split in splits:
            Case(dims, split, steps=3).check()
    uneven = splits[1]
    Case(4, uneven).check(memory_format=torch.channels_last)
    Case(5, uneven).check(memory_format=torch.channels_last_3d)
    Case(4, uneven, steps=4, momentum=None).check()
    Case(3, uneven, steps=2, momentum=0.7, eps=0.1).check()
    Case(4, uneven, affine=False).check()
    Case(2, uneven, track_running_stats=False).check()
    no_bias = Case(4, uneven)
    for module in (no_bias.plain, no_bias.ours):
        module.register_parameter("bias", None)
    no_bias.check()


def keeps_low_precision_apart() -> None:
    """Statistics of bf16 and fp16 inputs are fp32, whatever the parameters and buffers are."""
    split = SPLITS[dist.get_world_size()][1]
    for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        case = Case(4, split, steps=2)
        case.plain.float().double()
        case.ours.float()
        case.check(1e-5, dtype, rounding)
    halved = Case(4, split).ours.bfloat16()
    assert halved(torch.randn(2, CHANNELS, 4, 3).bfloat16()).dtype == torch.bfloat16
    assert halved.running_var.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        net = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, CHANNELS), nn.BatchNorm1d(CHANNELS)))
        output = net(torch.randn(4, 3))
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and net[1].weight.grad.dtype == torch.float32  # type: ignore[index]


def keeps_its_digits_far_from_zero() -> None:
    """fp32 about 10,000, and ranks about different means: E[x²] − E[x]² would be off by more than it is."""
    split = SPLITS[dist.get_world_size()][1]
    for spread in (0.0, 100.0):
        case = Case(4, split)
        far = case.inputs[0] + 1e4 + spread * torch.arange(sum(split), dtype=torch.float64).view(-1, 1, 1, 1)
        case.inputs = [far.float().double()]
        case.plain.float().double()
        case.ours.float()
        case.check(1e-5, torch.float32)


def counts_its_calls() -> None:
    layer = SyncBatchNorm(CHANNELS)
    bare = SyncBatchNorm(CHANNELS, track_running_stats=False)
    x = torch.randn(4 + dist.get_rank(), CHANNELS)
    wanting = x.clone().requires_grad_()
    assert calls(lambda: layer(x)) == ["all_gather"]
    assert calls(lambda: layer(x).sum().backward()) == ["all_gather"]
    assert calls(lambda: layer(wanting).sum().backward()) == ["all_gather", "all_reduce"]
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()
    bare.eval()
    assert calls(lambda: (layer(wanting) + bare(wanting)).sum().backward()) == []
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    torch.testing.assert_close(bare(x), nn.BatchNorm1d(CHANNELS)(x))  # this rank's own samples


def calls(run: Callable[[], object]) -> list[str]:
    """The collectives that `run` makes, as the recorder of this rank saw them."""
    ring = recorder._recorder or recorder._create()
    last = max((call.token for call in ring.recording().calls), default=0)
    run()
    return [call.op for call in ring.recording().calls if call.token > last]


def meets_in_its_group() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    pair, single = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(world_size)][rank]
    alone = SyncBatchNorm(CHANNELS, process_group=single)
    x = torch.randn(6, CHANNELS)
    assert calls(lambda: torch.testing.assert_close(alone(x), nn.BatchNorm1d(CHANNELS)(x))) == []
    if rank > 1:
        with pytest.raises(ValueError, match=f"rank {rank}: .*expected a process group that holds this rank"):
            SyncBatchNorm(CHANNELS, process_group=pair)
        return
    torch.manual_seed(0)
    whole = torch.randn(8, CHANNELS)
    layer = convert_sync_batchnorm(nn.SyncBatchNorm(CHANNELS, process_group=pair))
    for each in (layer, copy.deepcopy(layer)):
        assert each.process_group is pair
        torch.testing.assert_close(
            each(whole[rank * 4 : rank * 4 + 4]), nn.BatchNorm1d(CHANNELS)(whole)[rank * 4 : rank * 4 + 4]
        )


def refuses() -> None:
    rank = dist.get_rank()
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(CHANNELS)))
    one = torch.randn(1 if rank == 1 else 0, CHANNELS)
    with pytest.raises(
        ValueError, match=f"rank {rank}: SyncBatchNorm 0: expected more than 1 value per channel .*got 1 ov"
    ):
        layer(one)
    layer(one[:0])  # no sample anywhere: nothing moves, nobody fails
    assert layer[0].running_mean.eq(0).all() and layer[0].running_var.eq(1).all()  # type: ignore[index]
    layer(torch.randn(1, CHANNELS))  # one on each rank is enough
    for wrong, told in (
        (torch.randn(CHANNELS), r"an input of at least 2 dims \[N, C, \*\], got 1 \(input of shape \[5\]\)"),
        (torch.randn(3, 4), r"5 channels in dim 1, got 4 \(input of shape \[3, 4\]\)"),
        (torch.ones(3, 5, dtype=torch.int64), "a floating-point input, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=f"rank {rank}: SyncBatchNorm 0 expected {told}"):
            layer(wrong)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (once,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        once.sum().backward()


class Net(nn.Module):
    """Batch norms of three kinds, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4, momentum=None)
        self.again = nn.Conv2d(4, 4, 1)
        self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.relu(self.bn(self.again(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def trains_as_one_process() -> None:
    torch.manual_seed(3)
    one = Net().double()
    ours, local = convert_sync_batchnorm(copy.deepcopy(one)), copy.deepcopy(one)
    splits = [split for split in SPLITS[dist.get_world_size()] if max(split) < sum(split)]
    for step in range(8):
        split = splits[step % len(splits)]
        images = torch.randn(sum(split), 2, 5, 5, dtype=torch.float64)
        labels = torch.randint(3, (sum(split),))
        rows = slice(sum(split[: dist.get_rank()]), sum(split[: dist.get_rank() + 1]))
        for model, part in ((one, slice(None)), (ours, rows), (local, rows)):
            if model is local and min(split) < 2:
                continue  # torch's own refuses one sample
            loss = nn.functional.cross_entropy(model(images[part]), labels[part], reduction="sum")
            model.zero_grad()
            (loss / sum(split)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if model is not one:
                    ops.all_reduce(parameter.grad)
                parameter.data -= 0.5 * parameter.grad
    for (name, expected), got in zip(one.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10), f"{name}: {got} is not {expected}"
    apart = (local.conv.weight - one.conv.weight).abs().max().item()
    assert apart > 1e-3, "without synchronisation it must come out differently, or this test shows nothing"


CHECKS = [
    equals_the_whole_batch,
    keeps_low_precision_apart,
    keeps_its_digits_far_from_zero,
    counts_its_calls,
    meets_in_its_group,
    refuses,
    trains_as_one_process,
]


def check_all(backends: list[str]) -> list[str]:
    done = []
    for backend in backends:
        dist.init_process_group(backend)
        for check in CHECKS:
            check()
            done.append(f"{backend} {check.__name__}")
        dist.destroy_process_group()
    return done


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_together_equal_one_process(world_size: int) -> None:
    done = run_ranks(check_all, world_size, args=[["shm", "gloo"]], backend=None)
    assert done == [[f"{name} {check.__name__}" for name in ("shm", "gloo") for check in CHECKS]] * world_size


def compile_and_train() -> int:
    """Steps of a compiled model that equal those of one process. Dynamo must keep out of the collectives."""
    torch.manual_seed(1)
    one = Net().double()
    ours = convert_sync_batchnorm(copy.deepcopy(one))
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(2):
        images = torch.randn(8, 2, 5, 5, dtype=torch.float64)
        own = slice(0, 3) if dist.get_rank() == 0 else slice(3, 8)
        got, expected = compiled(images[own]), one(images)
        torch.testing.assert_close(got, expected[own])
        got.square().sum().backward()
        expected.square().sum().backward()
    for parameter, reference in zip(ours.parameters(), one.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ops.all_reduce(parameter.grad), reference.grad)
    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_compiled(backend: str) -> None:
    assert min(run_ranks(compile_and_train, 2, backend=backend, timeout_s=180)) > 1


def test_without_ranks_it_is_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(CHANNELS)
    ours = SyncBatchNorm(CHANNELS)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    for _ in range(2):
        x = torch.randn(4, CHANNELS, 3, 3)
        assert torch.equal(ours(x), plain(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    with pytest.raises(ValueError, match="SyncBatchNorm expected 5 channels in dim 1, got 4"):
        ours(torch.randn(2, 4))


def test_conversion_keeps_everything_but_the_class() -> None:
    net = Net()
    net.third = nn.Sequential(nn.BatchNorm3d(2), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3))
    net.alias = net.bn
    kept = net.head[1]
    assert isinstance(kept, nn.BatchNorm1d)
    kept.weight.requires_grad_(False)
    kept.eval()
    seen: list[int] = []
    kept.register_forward_hook(lambda *_: seen.append(1))
    tensors = {name: id(value) for name, value in (*net.named_parameters(), *net.named_buffers())}
    names = [name for name, _ in net.named_modules(remove_duplicate=False)]
    assert convert_sync_batchnorm(net) is net
    assert {name: id(value) for name, value in (*net.named_parameters(), *net.named_buffers())} == tensors
    assert [name for name, _ in net.named_modules(remove_duplicate=False)] == names
    kinds = {name: type(module).__name__ for name, module in net.named_modules(remove_duplicate=False)}
    ours = {name for name, kind in kinds.items() if type(net.get_submodule(name)) is SyncBatchNorm}
    assert ours == {"bn", "alias", "head.1", "third.0", "third.1"}
    assert kinds["third.2"] == "InstanceNorm2d" and net.alias is net.bn
    assert net.bn.momentum is None and net.bn.training
    assert not net.head[1].training and not net.head[1].weight.requires_grad
    net(torch.randn(2, 2, 5, 5))
    assert seen == [1]


def test_conversion_leaves_ours_and_converts_the_root() -> None:
    ours = SyncBatchNorm(CHANNELS)
    assert convert_sync_batchnorm(ours) is ours
    root = nn.BatchNorm1d(CHANNELS)
    weight = root.weight
    converted = convert_sync_batchnorm(root)
    assert isinstance(converted, SyncBatchNorm) and converted.weight is weight


class Activated(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(input))


class Centre(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight - weight.mean()


def test_conversion_refuses_what_it_would_lose() -> None:
    parametrized = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", Centre())
    for odd, told in (
        (nn.LazyBatchNorm2d(), "1, a LazyBatchNorm2d, does not know its channels yet"),
        (Activated(3), "1, a Activated, has a forward of its own"),
        (parametrized, "1, a ParametrizedBatchNorm2d, is parametrized"),
    ):
        net = nn.Sequential(nn.BatchNorm2d(3), odd)
        with pytest.raises(ValueError, match=told):
            convert_sync_batchnorm(net)
        assert type(net[0]) is nn.BatchNorm2d, "half converted"
    lazy = nn.Sequential(nn.LazyBatchNorm2d())
    lazy(torch.randn(2, 3, 4, 4))
    assert type(convert_sync_batchnorm(lazy)[0]) is SyncBatchNorm  # type: ignore[index]


def test_a_copy_is_its_own() -> None:
    layer = SyncBatchNorm(3)
    copied = copy.deepcopy(layer)
    copied(torch.randn(4, 3))
    assert type(copied) is SyncBatchNorm and layer.running_mean is not None
    assert layer.running_mean.eq(0).all() and copied.weight is not layer.weight
