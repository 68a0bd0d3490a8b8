"""Attention between some queries and some keys, by fused kernels that also return the log-sum-exp.

Shapes: q [B, heads, Q, width], k and v [B, kv_heads, K, width] with heads a multiple of kv_heads; out is like
q; lse [B, heads, Q] is the logarithm of the softmax's denominator, in fp32 or wider. `diagonal`: query i sees
the keys up to i, and Q = K; otherwise it sees all keys.

Given out and lse of a softmax over more keys than these, `attend_backward` returns exactly these keys' part
of the gradient, so code that merges parts needs no other formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_HALF = (torch.float16, torch.bfloat16)
_CUDA_WIDEST = 256  # channels of a head, in multiples of 8
_CUDA_OLDEST = (8, 0)  # compute capability: Ampere


def attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    q, k, v = map(_in_rows, (q, k, v))
    if q.device.type == "cpu":
        out, lse = _CPU(q, k, v, 0.0, diagonal, scale=scale)
    elif _is_for_flash(q):
        out, lse, *_ = _CUDA(q, k, v, 0.0, diagonal, scale=scale)
    else:
        out, lse = _attend(q, k, v, diagonal, scale)
    return out, lse


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    diagonal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of out."""
    q, k, v = map(_in_rows, (q, k, v))
    if q.device.type == "cpu":
        found = _CPU_BACKWARD(gradient, q, k, v, out, lse, 0.0, diagonal, scale=scale)
    elif _is_for_flash(q):
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of dropout's generator
        found = _CUDA_BACKWARD(
            gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
            0.0, diagonal, unused, unused, scale=scale,
        )  # fmt: skip
    else:
        return _attend_backward(gradient, q, k, v, out, lse, diagonal, scale)
    d_q, d_k, d_v = found
    return d_q, d_k, d_v


def _in_rows(x: Tensor) -> Tensor:
    """x with the channels of a position side by side in memory. The CPU's kernel assumes that and reads wrong
    memory otherwise; a GPU's kernel refuses."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _is_for_flash(q: Tensor) -> bool:
    if not q.is_cuda or q.dtype not in _HALF or q.shape[-1] % 8 or q.shape[-1] > _CUDA_WIDEST:
        return False
    return torch.cuda.get_device_capability(q.device) >= _CUDA_OLDEST


# Without a fused kernel: computes all scores [B, heads, Q, K] at once.


def _attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k, diagonal, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ _for_each_head(v, q)
    return out.to(q.dtype), lse


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        softmax = (_scores(q, k, diagonal, scale) - lse[..., None]).exp()
        gradient = gradient.to(lse.dtype)
        inner = (gradient * out).sum(-1, keepdim=True)
        d_scores = softmax * (gradient @ _for_each_head(v, q).mT - inner) * scale
        d_q = d_scores @ _for_each_head(k, q)
        d_k, d_v = d_scores.mT @ q.to(lse.dtype), softmax.mT @ gradient
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    return d_q, d_k.unflatten(1, heads).sum(2), d_v.unflatten(1, heads).sum(2)


def _scores(q: Tensor, k: Tensor, diagonal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _for_each_head(k, q).mT * scale
    if diagonal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated for each head of queries, in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return x.to(wide).repeat_interleave(q.shape[1] // x.shape[1], 1)
