"""Sequences divided among ranks with a GPU's attention: its kernels, and autograd's threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import imece
from tests.gpu.devices import DEVICES, run_on

NEAR = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-5, "float64": 1e-12}
WIDTHS = (64, 20)  # of heads: the second is none that GPUs have a kernel for


def attended(device: str, dtype: str) -> list[float]:
    """How far outputs and gradients are from those of full attention in fp64, with recomputation."""
    context = imece.ContextParallel(imece.init({"context": 2}, device=device, backend="gloo"))
    cases = [(width, causal) for width in WIDTHS for causal in (True, False)]
    return [far for case in cases for far in _attended(context, device, dtype, *case)]


def _attended(
    context: imece.ContextParallel, device: str, dtype: str, width: int, causal: bool
) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 64, width) for heads in (4, 2, 2, 4)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
    parts = [context.part(each, dim=2).to(getattr(torch, dtype)) for each in whole]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    leaves = [each.requires_grad_() for each in whole[:3]]
    expected = attend(*leaves)
    gradients = torch.autograd.grad(expected, leaves, whole[3])
    own = [each.requires_grad_() for each in parts[:3]]
    with context:
        out = checkpoint(attend, *own, use_reentrant=False)
        out.backward(parts[3])
    pairs = zip((expected, *gradients), (out, *(each.grad for each in own)), strict=True)
    return [float((context.part(one, dim=2) - other).abs().max()) for one, other in pairs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NEAR)
def test_attention_of_parts_is_that_of_the_whole(device: str, dtype: str) -> None:
    for found in run_on(attended, 2, device, args=(dtype,)):
        assert len(found) == 4 * 2 * len(WIDTHS) and max(found) < NEAR[dtype], found
