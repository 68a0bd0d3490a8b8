"""Ring attention equals full attention, forward and backward, for any ranks; and all ranks work equally."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from imece.model_parallel import kernels, ring
from imece.model_parallel.kernels import attend, attend_backward
from imece.model_parallel.ring import positions_of, ring_attention
from tests.data_parallel.checks import Check, Job, jobs, passed

LENGTH = 48  # of 2, 3 and 4 ranks, each 2 stretches
EXACT = 1e-12
FARTHER = 1.45
"""Times as far from what is exact as torch's kernel is. Sums in the parts' own dtypes are 1.6 to 1.9."""


def drawn(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v of the whole sequence and the gradient of what comes of them; as a model has them, [B, T, ...]
    in memory. The same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, LENGTH, each, 8) for each in (heads, kv_heads, kv_heads, heads)]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [each.transpose(1, 2).requires_grad_() for each in found]


def with_gradients(attention: Any, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


def whole(drawn: list[Tensor], causal: bool, scale: float | None) -> list[Tensor]:
    """By torch, on one rank."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    return with_gradients(attention, *drawn)


def parted(
    group: dist.ProcessGroup, drawn: list[Tensor], causal: bool, scale: float | None, mine: Tensor
) -> list[Tensor]:
    """By the ring, of the positions `mine`."""
    parts = [each.detach()[:, :, mine].requires_grad_() for each in drawn]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(
            q, k, v, group, causal=causal, scale=1 / math.sqrt(8) if scale is None else scale
        )

    return with_gradients(attention, *parts)


def furthest(found: list[Tensor], expected: list[Tensor], mine: Tensor) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((each.double() - full[:, :, mine].double()).abs().max()) for each, full in pairs)


def own(group: dist.ProcessGroup) -> Tensor:
    return positions_of(group.rank(), group.size(), LENGTH)


def check_full(group: dist.ProcessGroup) -> None:
    mine = own(group)
    for causal, kv_heads, scale in product((True, False), (4, 2, 1), (None, 0.7)):
        given = drawn(4, kv_heads)
        found = parted(group, given, causal, scale, mine)
        assert [each.dtype for each in found] == [torch.float64] * 4
        assert furthest(found, whole(given, causal, scale), mine) < EXACT, (causal, kv_heads, scale)


def check_any_division(group: dist.ProcessGroup) -> None:
    """Where all see all, who has what does not matter, nor an odd number of positions."""
    given = [each.detach()[:, :, : 5 * group.size()].requires_grad_() for each in drawn(2, 2)]
    mine = torch.arange(group.rank(), given[0].shape[2], group.size())
    assert furthest(parted(group, given, False, None, mine), whole(given, False, None), mine) < EXACT


def check_narrow(group: dist.ProcessGroup) -> None:
    """Parts in 8 and 11 bits, merged and summed in fp32: about as near as torch's own kernel is."""
    mine = own(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = drawn(4, 2, dtype)
        exact = whole([each.detach().double().requires_grad_() for each in given], True, None)
        found = parted(group, given, True, None, mine)
        assert {each.dtype for each in found} == {dtype}
        for name, one, other, true in zip("oqkv", found, whole(given, True, None), exact, strict=True):
            away = [(each.double() - true[:, :, mine]).norm() for each in (one, other[:, :, mine])]
            assert away[0] < FARTHER * away[1], (dtype, name, float(away[0] / away[1]))


def check_other_orders(group: dist.ProcessGroup) -> None:
    """Of what is not zigzag the causal ring makes something else: the checks above would see it."""
    mine = torch.arange(LENGTH).chunk(group.size())[group.rank()]
    given = drawn(2, 2)
    away = furthest(parted(group, given, True, None, mine), whole(given, True, None), mine)
    assert _largest(away, group) > 0.1


def check_a_missed_block(group: dist.ProcessGroup) -> None:
    turns = ring._Ring.turns

    def but_one(self: Any, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        for source, each in turns(self, kv):
            if (self.rank - source) % self.size != 1:
                yield source, each

    given, mine = drawn(2, 2), own(group)
    with mock.patch.object(ring._Ring, "turns", but_one), mock.patch.object(ring._Travelling, "hand_on"):
        found = parted(group, given, True, None, mine)
    assert _largest(furthest(found[:1], whole(given, True, None)[:1], mine), group) > 0.1


def check_balance(group: dist.ProcessGroup) -> None:
    """Scores that a rank computes: the same number on all, forward and backward, and no more than are seen
    but within stretches."""
    scores = {"attend": 0, "attend_backward": 0}

    def counting(name: str) -> Any:
        kernel = getattr(kernels, name)

        def count(*args: Any) -> Any:
            q, k = args[:2] if name == "attend" else args[1:3]
            diagonal = args[-2]
            scores[name] += q.shape[2] * (k.shape[2] + 1) // 2 if diagonal else q.shape[2] * k.shape[2]
            return kernel(*args)

        return mock.patch.object(ring, name, count)

    with counting("attend"), counting("attend_backward"):
        parted(group, drawn(2, 2), True, None, own(group))
    total = torch.tensor(list(scores.values()))
    mine = total.tolist()
    dist.all_reduce(total, group=group)
    assert mine == (total // group.size()).tolist(), "all alike"
    assert total.tolist() == [LENGTH * (LENGTH + 1) // 2] * 2, "each pair once"


def check_once(group: dist.ProcessGroup) -> None:
    q, k, v, _ = (each.detach()[:, :, own(group)].requires_grad_() for each in drawn(2, 2))
    out = ring_attention(q, k, v, group, causal=True, scale=1.0)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def _largest(number: float, group: dist.ProcessGroup) -> float:
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.item()


CHECKS: dict[str, Check] = {
    "full": check_full,
    "any_division": check_any_division,
    "narrow": check_narrow,
    "other_orders": check_other_orders,
    "a_missed_block": check_a_missed_block,
    "balance": check_balance,
    "once": check_once,
}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm"), (3, "gloo"), (4, "shm")))
def test_ring(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_channels_may_lie_apart_in_memory(which: str) -> None:
    """The CPU's kernel takes for granted that they do not, and reads elsewhere."""
    q, k, v, gradient = (each.detach().contiguous() for each in drawn(4, 2))
    out, lse = attend(q, k, v, True, 0.3)
    backward = attend_backward(gradient, q, k, v, out, lse, True, 0.3)
    given = {"q": q, "k": k, "v": v}
    given[which] = given[which].mT.contiguous().mT
    torch.testing.assert_close(attend(**given, diagonal=True, scale=0.3), (out, lse), rtol=0, atol=EXACT)
    again = attend_backward(gradient, **given, out=out, lse=lse, diagonal=True, scale=0.3)
    torch.testing.assert_close(again, backward, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "fused"),
    [
        ((9, 0), torch.bfloat16, 64, True),
        ((8, 0), torch.float16, 256, True),
        ((7, 5), torch.float16, 64, False),  # T4
        ((7, 0), torch.bfloat16, 64, False),  # V100
        ((9, 0), torch.float32, 64, False),
        ((9, 0), torch.bfloat16, 20, False),
        ((9, 0), torch.bfloat16, 264, False),
    ],
)
def test_a_gpu_gets_the_kernel_that_it_has(
    capability: tuple[int, int], dtype: torch.dtype, width: int, fused: bool
) -> None:
    """Asked with tensors that have no memory; what each kernel takes is that of torch's sources."""
    called: list[str] = []
    plain = mock.Mock()

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.overloadpacket.__name__)
            if "flash_attention" in called[-1]:
                assert all(
                    each.stride(-1) == 1 for each in args if isinstance(each, Tensor) and each.ndim > 3
                )
            return func(*args, **(kwargs or {}))

    asked = mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
    with (
        FakeTensorMode(),
        Called(),  # type: ignore[no-untyped-call]
        asked,
        mock.patch.multiple(kernels, _attend=plain, _attend_backward=plain),
    ):
        q, k, v, gradient = (
            torch.empty(2, heads, 16, width, dtype=dtype, device="cuda") for heads in (4, 2, 2, 4)
        )
        plain.return_value = (q, q)
        q = torch.empty(2, 4, width, 16, dtype=dtype, device="cuda").mT  # channels lie apart
        out, lse = attend(q, k, v, True, 0.3)
        found = attend_backward(gradient, q, k, v, out, lse, True, 0.3)
    if fused:
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, q.shape[:-1], torch.float32)
        assert [each.shape for each in found] == [q.shape, k.shape, v.shape]
    assert plain.call_count == (0 if fused else 2)
    assert ("_scaled_dot_product_flash_attention" in called) == fused
    assert ("_scaled_dot_product_flash_attention_backward" in called) == fused


@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_position_is_somebodys(length: int, ranks: int) -> None:
    parts = [positions_of(rank, ranks, length) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_where_there_is_no_kernel(diagonal: bool, kv_heads: int) -> None:
    q, k, v, gradient = (each.detach() for each in drawn(4, kv_heads))
    out, lse = attend(q, k, v, diagonal, 0.3)
    plain_out, plain_lse = kernels._attend(q, k, v, diagonal, 0.3)
    torch.testing.assert_close([plain_out, plain_lse], [out, lse], rtol=0, atol=EXACT)
    # As of a softmax over more keys than these: their part of the gradient.
    lse, out = lse + 0.5, out * 0.8
    fused = attend_backward(gradient, q, k, v, out, lse, diagonal, 0.3)
    plain = kernels._attend_backward(gradient, q, k, v, out, lse, diagonal, 0.3)
    torch.testing.assert_close(plain, fused, rtol=0, atol=EXACT)


@pytest.mark.parametrize("diagonal", [True, False])
def test_attention_without_a_kernel_is_as_wide_under_autocast(diagonal: bool) -> None:
    q, k, v, gradient = (each.detach().float() for each in drawn(4, 2))
    plain = kernels._attend(q, k, v, diagonal, 0.3)
    backward = kernels._attend_backward(gradient, q, k, v, *plain, diagonal, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, kernels._attend(q, k, v, diagonal, 0.3), plain))
        again = kernels._attend_backward(gradient, q, k, v, *plain, diagonal, 0.3)
    assert all(map(torch.equal, again, backward))
