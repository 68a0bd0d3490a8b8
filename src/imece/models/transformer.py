"""A decoder-only transformer like Llama: RMSNorm before each part, rotary positions, SwiGLU, grouped queries.

Related models differ by options of `TransformerConfig`: biases, norms of queries and keys, a window of
positions, layers without rotary positions.

    block    attention, then mlp; each reads a norm of the residual and adds to it
    head     one of the `heads` queries; `heads / kv_heads` neighbours share one key and one value
    pair     channels i and i + head_width / 2 of a head, which rotary positions turn together. Hugging Face's
             Llama pairs them so too; in the interleaved order exported weights would need a permutation
    rotation the cosines and sines of all pairs at some positions, each float32 [T, head_width / 2]

Shapes: B sequences, T positions, V = vocab_size. Nothing here knows of ranks. No module has a buffer, so a
model made on the meta device is complete once it has memory and `reset_parameters` was called.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from imece.models.cross_entropy import Reduction, cross_entropy
from imece.models.shape import TransformerConfig

Rotation = tuple[Tensor, Tensor]

INIT_STD = 0.02
LARGE_TABLE = 2**22  # elements: above this, moving a table takes longer than starting a gather


class Transformer(nn.Module):
    """The model. Weights are drawn from `generator` or torch's own; on the meta device there are none.

    checkpoint_blocks: keep only the input of each block for backward, and recompute the rest there.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False
        self.embed = _Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        if not config.tied_head:
            self.head = _Linear(config.width, config.vocab_size)
        if not self.embed.weight.is_meta:
            self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Fill all weights in one fixed order. `generator` must be on the device of the weights.

        Weights whose output is added to the residual start smaller, so that its variance does not grow with
        depth.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                parameter.normal_(std=residual_std if adds else INIT_STD, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        last_only: bool = False,
        positions: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the token that follows each of `tokens` (int64 [B, T]).

        cache: the tokens come after those that it holds, and are added to it; such logits have no gradient.
        last_only: logits of the last position only, [B, 1, V]. positions: where in a longer sequence the
        tokens are (int64 [T]), if the caller arranges that attention sees the rest. begins: for sequences of
        several documents, the position where that of each token begins (int64 [B, T], at most its own), which
        is as far back as attention sees; logits are then those of each document alone.

        ValueError if tokens is not 2D, or for more positions than max_seq or the cache has room for. With
        positions: ValueError if their number is not T, with a cache, or if layers have windows. With begins:
        ValueError if their shape is not that of tokens, with a cache or with positions.
        """
        self.check_room(tokens, cache)
        visible = None
        if begins is not None:
            self._check_begins(begins, tokens, cache, positions)
            visible = visible_from(begins)
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        else:
            self._check_positions(positions, tokens, cache)
        # The cache is written in place, so a gradient through it would miss all older tokens.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            x = self.embed(tokens)
            rotation = rotation_at(self.config, positions)
            for block in self.blocks:
                x = self.through(block, x, rotation, cache, visible)
            x = self.norm(x[:, -1:] if last_only else x)
            logits = self.embed.as_head(x) if self.config.tied_head else self.head(x)
        if cache is not None:
            cache.length += tokens.shape[1]
        return cast(Tensor, logits)

    def through(
        self,
        block: nn.Module,
        x: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """The residual x after `block`, computed as in `forward`."""
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(block, x, rotation, None, visible, use_reentrant=False))
        return cast(Tensor, block(x, rotation, cache, visible))

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` positions of one sequence."""
        weight = self.embed.weight
        return KVCache(self.config, 1, capacity, device=weight.device, dtype=weight.dtype)

    def loss(
        self, tokens: Tensor, targets: Tensor, ignore: int = -100, reduction: Reduction = "mean"
    ) -> Tensor:
        """`cross_entropy` of `targets` (int64 [B, T]) after `tokens` (int64 [B, T])."""
        return cross_entropy(self(tokens), targets, ignore, reduction)

    def check_room(self, tokens: Tensor, cache: KVCache | None) -> None:
        """ValueError if tokens is not 2D, or for more positions than max_seq or the cache has room for."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {list(tokens.shape)}; it must be [batch, positions]")
        held = 0 if cache is None else cache.length
        after = f" after the {held} in the cache" if held else ""
        if held + tokens.shape[1] > self.config.max_seq:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions{after}; max_seq is {self.config.max_seq}"
            )
        if cache is None:
            return
        if held + tokens.shape[1] > cache.capacity:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions{after}; the cache's capacity is {cache.capacity}"
            )
        if tokens.shape[0] != cache.batch:
            raise ValueError(f"tokens has {tokens.shape[0]} sequences; the cache has {cache.batch}")

    def _check_begins(
        self, begins: Tensor, tokens: Tensor, cache: KVCache | None, positions: Tensor | None
    ) -> None:
        if cache is not None or positions is not None:
            other = "a cache" if cache is not None else "positions"
            raise ValueError(f"begins beside {other}, whose tokens see others than these: leave one out")
        if begins.shape != tokens.shape:
            raise ValueError(
                f"begins has shape {list(begins.shape)}; tokens have {list(tokens.shape)}, and so must it"
            )

    def _check_positions(self, positions: Tensor, tokens: Tensor, cache: KVCache | None) -> None:
        if cache is not None:
            raise ValueError("positions beside a cache, whose length says where tokens are: leave one out")
        if positions.shape != tokens.shape[1:]:
            raise ValueError(
                f"positions has shape {list(positions.shape)}; tokens of shape {list(tokens.shape)} have "
                f"[{tokens.shape[1]}]"
            )
        window = self.config.window
        if window is not None and window < self.config.max_seq:
            raise ValueError(
                f"positions for layers with a window of {window}, which counts neighbours: leave them out"
            )
        last = int(positions.max())  # waits for the GPU, once per forward
        if last >= self.config.max_seq:
            raise ValueError(f"positions go up to {last}; max_seq is {self.config.max_seq}")


class Block(nn.Module):
    """Residual [B, T, width] -> residual of the same shape."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: KVCache | None = None, visible: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(x, rotation, cache, visible)
        return cast(Tensor, x + self.mlp(x))


class Attention(nn.Module):
    """Each position attends to itself and those before it, or of these to the `visible` ones (bool [B, 1, T,
    T], of queries and keys). `layer` is this module's part of a cache."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_width = config.head_width
        self.window = config.window_of(layer)
        self.turns = layer not in config.nope_layers
        self.head_norms = config.head_norms
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.q = _Linear(config.width, config.q_width, config.qkv_bias)
        self.k = _Linear(config.width, config.kv_width, config.qkv_bias)
        self.v = _Linear(config.width, config.kv_width, config.qkv_bias)
        if config.head_norms:
            self.q_norm = _HeadNorm(config.head_width, eps=config.norm_eps)
            self.k_norm = _HeadNorm(config.head_width, eps=config.norm_eps)
        self.out = _Linear(config.q_width, config.width, config.out_bias)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: KVCache | None = None, visible: Tensor | None = None
    ) -> Tensor:
        x = self.norm(x)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, heads or kv_heads, T, ...]
            for project in (self.q, self.k, self.v)
        )
        if self.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.turns:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        new, seen = q.shape[2], k.shape[2]
        mask, windowed = visible, self.window is not None and seen > self.window
        # is_causal counts from the first key, so it would hide most of the cache from the new tokens.
        if mask is None and (windowed or (cache is not None and 1 < new < seen)):
            mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        if mask is not None and self.window is not None:
            mask = mask.triu(seen - new - self.window + 1)
        if mask is not None and cache is None and q.shape[1] != k.shape[1]:
            # On a GPU only the kernel that writes all scores to memory takes a mask and fewer heads of keys.
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        # Without a cache nothing is compared: torch.compile cannot decide the comparison for dynamic lengths.
        causal = mask is None and (cache is None or new == seen)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.gate = _Linear(config.width, config.mlp_width, config.mlp_bias)
        self.up = _Linear(config.width, config.mlp_width, config.mlp_bias)
        self.down = _Linear(config.mlp_width, config.width, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class KVCache:
    """Keys and values of the positions that a model has seen, for all layers.

    Setting `length` to a smaller number forgets the positions from there on. `capacity`: positions, by
    default max_seq. ValueError if capacity or `batch` is below 1, or capacity above max_seq.
    """

    def __init__(
        self,
        config: TransformerConfig,
        batch: int = 1,
        capacity: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.batch = batch
        self.capacity = config.max_seq if capacity is None else capacity
        self.length = 0  # positions held
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        if not 1 <= self.capacity <= config.max_seq:
            raise ValueError(f"capacity is {self.capacity}; it must be from 1 to max_seq = {config.max_seq}")
        shape = (config.layers, batch, config.kv_heads, self.capacity, config.head_width)
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [B, kv_heads, T, head_width]; return all of them in the new
        ones' dtype.

        `length` does not change here: it grows once every layer has written.
        """
        end = self.length + keys.shape[2]
        heads = keys.shape[1]  # may be fewer than there is room for: other ranks have the other heads
        self._keys[layer, :, :heads, self.length : end] = keys
        self._values[layer, :, :heads, self.length : end] = values
        # Under autocast the new ones are narrower than the cache, but attention needs one dtype.
        return (
            self._keys[layer, :, :heads, :end].to(keys.dtype),
            self._values[layer, :, :heads, :end].to(values.dtype),
        )


def visible_from(begins: Tensor) -> Tensor:
    """Whether each position sees each other, bool [B, 1, T, T]: those before it, back to its `begins` (int64
    [B, T])."""
    at = torch.arange(begins.shape[1], device=begins.device)
    return ((at <= at[:, None]) & (at >= begins[:, :, None]))[:, None]


def rotation_at(config: TransformerConfig, positions: Tensor) -> Rotation:
    """The rotation at `positions` (int64 [T]), always in float32.

    It is recomputed in each forward, which costs next to nothing. A buffer would have to survive the meta
    device, `model.bfloat16()` and loading, and each of these can spoil it.
    """
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float32, device=positions.device)
    exponents = pairs / config.head_width
    frequencies = 1.0 / config.rope_theta**exponents  # radians per position
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_seq * frequencies / (2 * math.pi)
        spread = scaling.high_freq_factor - scaling.low_freq_factor
        fast = ((turns - scaling.low_freq_factor) / spread).clamp(0, 1)
        frequencies = frequencies * (fast + (1 - fast) / scaling.factor)
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of x [..., T, head_width]. Computed in float32 or wider, returned in the dtype of x."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _HeadNorm(nn.RMSNorm):
    """RMSNorm of x [..., head_width] that returns x's dtype; computed in the weight's, because autocast makes
    x bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class _Linear(nn.Linear):
    """Left unfilled at construction: filling it here too would draw from torch's generator for nothing."""

    def __init__(self, in_width: int, out_width: int, bias: bool = False) -> None:
        super().__init__(in_width, out_width, bias=bias)

    def reset_parameters(self) -> None:
        """`Transformer.reset_parameters` does it."""


class _Embedding(nn.Embedding):
    """Left unfilled, as `_Linear` is."""

    def as_head(self, x: Tensor) -> Tensor:
        """Logits [B, T, V] of x [B, T, width], computed with the embedding's weights."""
        return F.linear(x, self.weight)

    def reset_parameters(self) -> None:
        """`Transformer.reset_parameters` does it."""


def units_of(config: TransformerConfig) -> tuple[type[nn.Module], ...] | None:
    """The units for `imece.parallelize(units=)`: blocks, and embedding and head if they are large and not
    tied, so that they are in memory only while they are used. None: they stay with the norm, in the unit of
    whatever is in no block."""
    large = config.vocab_size * config.width >= LARGE_TABLE
    return (Block, _Embedding, _Linear) if large and not config.tied_head else None
