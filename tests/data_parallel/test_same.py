"""If ranks hold different models, every rank soon raises an error that names rank and parameter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece import DistributedDataParallel
from imece.data_parallel import same
from imece.data_parallel.same import digest
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, jobs, passed

ODD = 1  # the rank that is not like the others
SOON_S = 30.0  # and not the 60 of the group (tests/data_parallel/checks.py)


def net(**changes: Any) -> nn.Module:
    """Two layers with a BatchNorm; `changes` by the odd rank."""
    odd = dist.get_rank() == ODD
    width = changes.get("width", 4) if odd else 4
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, width))
    if odd and "change" in changes:
        changes["change"](module)
    return module


def half(module: Any) -> None:
    module[2].half()


def one_more(module: Any) -> None:
    module.append(nn.Linear(2, 2))


def no_bias(module: Any) -> None:
    module[0].register_parameter("bias", None)


def freeze(module: Any) -> None:
    module[0].weight.requires_grad_(False)


def rename(module: Any) -> None:
    module.register_parameter("last", module[2].weight)
    del module[2].weight


def transpose(module: Any) -> None:
    module[2].weight = nn.Parameter(torch.randn(4, 4).t())


def other_buffer(module: Any) -> None:
    module[1].register_buffer("running_mean", torch.zeros(5))


def fewer_buffers(module: Any) -> None:
    module[1].num_batches_tracked = None


# What the odd rank's model is, and what the error names.
DIFFERENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shape": ({"width": 5}, ["2.weight: float32[4, 4] on ranks 0, 2", "2.weight: float32[5, 4] on rank 1"]),
    "dtype": (
        {"change": half},
        ["2.weight: float32[4, 4] on ranks 0, 2", "2.weight: float16[4, 4] on rank 1"],
    ),
    "more": ({"change": one_more}, ["3.weight: float32[2, 2]", "on ranks 0, 2", "on rank 1"]),
    "fewer": ({"change": no_bias}, ["0.bias: float32[4] on ranks 0, 2", "1.weight: float32[4] on rank 1"]),
    "name": ({"change": rename}, ["0.weight: float32[4, 3] on ranks 0, 2", "last: float32[4, 4] on rank 1"]),
    "strides": ({"change": transpose}, ["2.weight: float32[4, 4] strides [1, 4] on rank 1"]),
    "frozen": ({"change": freeze}, ["0.weight: float32[4, 3] on ranks 0, 2", "on rank 1"]),
}
# Not trained, but broadcast at construction.
DIFFERENT_BESIDE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "buffer": ({"change": other_buffer}, ["1.running_mean", "[5]"]),
    "buffers": ({"change": fewer_buffers}, ["1.num_batches_tracked"]),
    "frozen shape": (
        {
            "change": lambda module: setattr(
                module[0], "weight", nn.Parameter(torch.ones(4, 6), requires_grad=False)
            )
        },
        ["0.weight"],
    ),
}


def refused(changes: dict[str, Any], words: list[str], *, everywhere_frozen: bool = False) -> Any:
    def check(group: dist.ProcessGroup) -> None:
        module: Any = net(**changes)
        if everywhere_frozen:
            module[0].weight.requires_grad_(False)
        dist.barrier()
        began = time.perf_counter()
        with pytest.raises(MismatchError) as caught:
            DistributedDataParallel(module, process_group=group)
        took = time.perf_counter() - began
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert took < SOON_S, f"after {took:.1f} s"
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, texts

    return check


def many_parameters(group: dist.ProcessGroup) -> None:
    """The difference may be the last of many."""
    module = nn.ParameterDict({f"layers_{at:04}_weight": nn.Parameter(torch.zeros(2)) for at in range(3000)})
    if dist.get_rank() == ODD:
        module["last"] = nn.Parameter(torch.zeros(3))
    with pytest.raises(MismatchError, match=r"no parameter on ranks 0, 2, last: float32\[3\] on rank 1"):
        DistributedDataParallel(module, process_group=group)


def unsynchronised_on_request(group: dist.ProcessGroup) -> None:
    """init_sync=False: each rank keeps what it has, which check_parameters then tells."""
    torch.manual_seed(dist.get_rank())
    module: Any = net()
    before = module[0].weight.detach().clone()
    model = DistributedDataParallel(module, process_group=group, init_sync=False)
    assert torch.equal(module[0].weight, before)
    with pytest.raises(MismatchError, match=r"0\.weight on all ranks"):
        model.check_parameters()


def sparse(group: dist.ProcessGroup) -> None:
    """What does not travel is the user's own to make alike."""
    module: Any = net()
    module.register_buffer("mask", torch.eye(4).to_sparse())
    with pytest.raises(ValueError) as caught:
        DistributedDataParallel(module, process_group=group)
    assert str(caught.value) == (
        "the model has a sparse_coo tensor of shape [4, 4], and ranks send each other dense ones: name it in "
        "the module's _ddp_params_and_buffers_to_ignore, and make it alike on all ranks"
    )
    DistributedDataParallel(module, process_group=group, broadcast_buffers=False)
    module._ddp_params_and_buffers_to_ignore = ["mask"]
    DistributedDataParallel(module, process_group=group)(torch.ones(2, 3)).sum().backward()


def synchronised_from_rank_0(group: dist.ProcessGroup) -> None:
    """Parameters, frozen ones and buffers, of all dtypes and sizes: of more than travels at a time, of none,
    expanded."""
    torch.manual_seed(dist.get_rank())
    module: Any = net()
    module[0].bias.requires_grad_(False)
    module.register_buffer("whole", torch.randint(1000, (3,)))
    module.register_buffer("large", torch.randn(2**18 + 1))
    module.register_buffer("none", torch.zeros(0))
    module.register_buffer("expanded", torch.randn(3, 1).expand(2, 3, 4))
    module.register_buffer("flag", torch.tensor(dist.get_rank() == 0))
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.uint64, torch.complex128):
        module.register_buffer(str(dtype).partition(".")[2], torch.full((3,), dist.get_rank() + 1).to(dtype))
    module.register_parameter("scalar", nn.Parameter(torch.randn(())))
    module.register_parameter("turned", nn.Parameter(torch.randn(4, 3).t()))
    with torch.no_grad():
        module[1].running_mean.normal_()
    digests: list[Any] = [None] * dist.get_world_size()

    def sums() -> dict[str, complex]:
        state = module.state_dict()
        return {name: each.to(torch.complex128).sum().item() for name, each in state.items()}

    dist.all_gather_object(digests, sums())
    assert digests[0] != digests[ODD]
    with mock.patch.object(same, "_FLAT_BYTES", 2**20):
        DistributedDataParallel(module, process_group=group)
    after = sums()
    assert after == digests[0]


# Drift.


class Flat(nn.Module):
    """Parameters of many shapes and dtypes, two of them in one piece of memory that begins at `offset`."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        memory = (torch.arange(30, dtype=torch.float32) / 7)[offset:]
        self.first = nn.Parameter(memory[:7])
        self.second = nn.Parameter(memory[8:20].view(3, 4).t())
        self.scalar = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.narrow = nn.Parameter(torch.linspace(-1, 1, 5).bfloat16())
        self.wide = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return torch.stack([each.double().square().sum() for each in self.parameters()]).sum()


def bit_of(name: str, at: int, bit: int) -> Callable[[Any], None]:
    """Flips one bit of one element."""

    def change(module: Any) -> None:
        flat = getattr(module, name).data.view(-1) if name != "second" else module.second.data.t().reshape(-1)
        raw = flat.clone().view(torch.uint8)
        raw[at * flat.itemsize + bit // 8] ^= 1 << bit % 8
        value = raw.view(flat.dtype)
        if name == "second":
            module.second.data.copy_(value.view(3, 4).t())
        else:
            getattr(module, name).data.view(-1).copy_(value)

    return change


def swap(name: str, one: int, other: int) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        flat = getattr(module, name).data.view(-1)
        flat[[one, other]] = flat[[other, one]].clone()

    return change


def bytes_swapped(module: Any) -> None:
    """The same bytes in another order: 1.1 is cd cc 8c 3f."""
    raw = module.scalar.data.view(1).view(torch.uint8)
    raw[[0, 1]] = raw[[1, 0]].clone()


DRIFTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    **{f"{name}, element {at}, bit {bit}": (name, bit_of(name, at, bit)) for name, at, bit in [
        ("first", 0, 0), ("first", 5, 31), ("first", 6, 0), ("first", 6, 31), ("second", 11, 0),
        ("scalar", 0, 0), ("scalar", 0, 31), ("narrow", 4, 0), ("narrow", 2, 15), ("wide", 0, 63),
    ]},
    "two elements of first": ("first", swap("first", 0, 2)),
    "the last elements of first": ("first", swap("first", 5, 6)),
    "the last elements of narrow": ("narrow", swap("narrow", 3, 4)),
    "the first elements of narrow": ("narrow", swap("narrow", 0, 1)),
    "two elements of wide": ("wide", swap("wide", 1, 4)),
    "two bytes of scalar": ("scalar", bytes_swapped),
}  # fmt: skip


def names_the_drifted(group: dist.ProcessGroup) -> None:
    unnoticed = []
    for at, (what, (name, change)) in enumerate(DRIFTS.items()):
        odd = at % dist.get_world_size()
        module = Flat()
        model = DistributedDataParallel(module, process_group=group)
        model.check_parameters()
        if dist.get_rank() == odd:
            change(module)
        try:
            model.check_parameters()
        except MismatchError as error:
            assert f": {name} on rank {odd} (of 6 parameters)" in str(error), str(error)
        else:
            unnoticed.append(what)
    assert not unnoticed, unnoticed


def names_all_that_drifted(group: dist.ProcessGroup) -> None:
    module = Flat()
    model = DistributedDataParallel(module, process_group=group)
    if dist.get_rank() == 2:
        module.first.data[3] += 1
        module.wide.data[0] += 1
    with pytest.raises(MismatchError, match="first on rank 2; wide on rank 2"):
        model.check_parameters()


def at_odd_places(group: dist.ProcessGroup) -> None:
    """Parameters that are views of one flat tensor, as some libraries make them, need not lie at 8 bytes."""
    for offset in (1, 2, 3):
        module = Flat(offset)
        assert module.first.storage_offset() == offset
        model = DistributedDataParallel(module, process_group=group)
        model.check_parameters()
        if dist.get_rank() == 2:
            module.first.data[3] += 1
        with pytest.raises(MismatchError, match="first on rank 2"):
            model.check_parameters()


def tells_two_odd_ranks(group: dist.ProcessGroup) -> None:
    module = Flat()
    model = DistributedDataParallel(module, process_group=group)
    module.scalar.data += dist.get_rank()
    with pytest.raises(MismatchError, match="scalar on all ranks"):
        model.check_parameters()
    module.scalar.data.fill_(1)
    model.check_parameters()


def every_so_many_steps(group: dist.ProcessGroup) -> None:
    module = Flat()
    model = DistributedDataParallel(module, process_group=group, drift_check_every=3)
    for step in range(1, 9):
        if step == 4 and dist.get_rank() == 2:
            module.first.data[3] += 1e-3
        if step == 6:
            with pytest.raises(MismatchError, match=r"step 6: .*drifted apart: first on rank 2 \(of"):
                model()
            return
        with model.no_sync():
            model()  # does not count
        model().backward()


def equal_nans_are_the_same(group: dist.ProcessGroup) -> None:
    module = Flat()
    model = DistributedDataParallel(module, process_group=group)
    module.first.data[0] = float("nan")
    model.check_parameters()


# NaN and Inf.


def names_who_brought_it(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    for cap in (25.0, 40 / 2**20):
        module: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model = DistributedDataParallel(module, process_group=group, check_finite=True, bucket_cap_mb=cap)

        def step(brought: dict[int, list[str]], value: float) -> None:
            handles = [
                parameter.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), value))
                for name, parameter in module.named_parameters()  # noqa: B023
                if name in brought.get(rank, [])
            ]
            model.zero_grad()  # noqa: B023
            model(torch.randn(2, 3)).sum().backward()  # noqa: B023
            for handle in handles:
                handle.remove()
            found = {each: sorted(names) for each, names in model.nonfinite.items()}  # noqa: B023
            assert found == brought, f"{found}, expected {brought}"

        step({}, 0.0)
        step({1: ["0.weight"]}, float("nan"))
        step({}, 0.0)
        step({0: ["0.bias", "1.weight"], 2: ["0.bias"]}, float("inf"))
        step({2: ["1.bias"]}, float("-inf"))
        step({}, 0.0)
        # Finite, though their sum is not.
        step({}, 3e38)


def finite_in_an_accumulation(group: dist.ProcessGroup) -> None:
    """It came inside no_sync."""
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(module, process_group=group, check_finite=True)
    x = torch.ones(2, 3)
    with model.no_sync():
        model(x * (float("inf") if dist.get_rank() == 1 else 1)).sum().backward()
    assert model.nonfinite == {}
    model(x).sum().backward()
    assert set(model.nonfinite) == {1} and "0.weight" in model.nonfinite[1]


def finite_after_a_backward_that_raised(group: dist.ProcessGroup) -> None:
    """What was found in it went with it: the next finding names only who brought that."""
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(module, process_group=group, check_finite=True, bucket_cap_mb=20 / 2**20)
    rank = dist.get_rank()

    def broken(_: torch.Tensor) -> None:
        raise ValueError("broken")

    for _ in range(2):  # the first backward that is over lays out the buckets anew
        handles = [module[0].weight.register_hook(broken)]
        if rank == 0:
            handles.append(module[1].bias.register_hook(lambda grad: grad * float("nan")))
        with pytest.raises(ValueError, match="broken"):
            model(torch.ones(2, 3)).sum().backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()
        model(torch.full((2, 3), float("inf") if rank == 1 else 1.0)).sum().backward()
        assert set(model.nonfinite) == {1}, model.nonfinite
        model.zero_grad()


def finite_is_off_unless_asked_for(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    model(torch.full((1, 2), float("nan"))).sum().backward()
    assert model.nonfinite == {}


def names_ranks_of_the_world(group: dist.ProcessGroup) -> None:
    """As along an axis of a mesh, where the place in the group is another number."""
    part = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        return
    with pytest.raises(MismatchError, match=r"on rank 1, .* on rank 2\."):
        DistributedDataParallel(nn.Linear(2, rank), process_group=part)
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=part, check_finite=True)
    model(torch.full((1, 2), math.inf if rank == 2 else 1.0)).sum().backward()
    assert set(model.nonfinite) == {2}, model.nonfinite


CHECKS: dict[str, Check] = (
    {f"different {name}": refused(*case) for name, case in DIFFERENT.items()}
    | {
        f"different {name}": refused(*case, everywhere_frozen="frozen" in name)
        for name, case in DIFFERENT_BESIDE.items()
    }
    | {
        "many parameters": many_parameters,
        "unsynchronised": unsynchronised_on_request,
        "synchronised": synchronised_from_rank_0,
        "sparse": sparse,
        "drift": names_the_drifted,
        "two that drifted": names_all_that_drifted,
        "at odd places": at_odd_places,
        "two odd ranks": tells_two_odd_ranks,
        "every so many steps": every_so_many_steps,
        "equal NaNs": equal_nans_are_the_same,
        "not finite": names_who_brought_it,
        "not finite in an accumulation": finite_in_an_accumulation,
        "not finite after one that raised": finite_after_a_backward_that_raised,
        "finite is off": finite_is_off_unless_asked_for,
        "ranks of the world": names_ranks_of_the_world,
    }
)


ON_GLOO = [
    "synchronised",
    "different shape",
    "different buffers",
    "different frozen shape",
    "drift",
    "not finite",
]


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (3, "shm")) + jobs(__name__, ON_GLOO, (3, "gloo")))
def test_same(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_digest_is_of_all_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    memory = torch.arange(200).to(dtype)
    for start in range(9):
        for length in (0, 1, 2, 7, 8, 64):
            part = memory[start : start + length]
            copied = part.clone()
            assert torch.equal(digest(part), digest(copied))
            assert torch.equal(part, copied), "it only looks"
            for at in range(length):
                copied.view(torch.uint8)[at * dtype.itemsize] ^= 1
                assert not torch.equal(digest(part), digest(copied))
                copied.copy_(part)
    words = memory[:64].view(torch.int64)
    assert not torch.equal(digest(words), digest(words.flip(0)))
