"""The model whose step is measured: a small GPT, the same for every way of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    """Most tokens of a sequence."""


REFERENCE = Shape(vocabulary=512, width=384, layers=6, heads=6, length=256)
"""10.9M parameters. A step of 128 or 512 tokens takes one core of docs/benchmarks.md's machine about 140 or
440 ms."""

LARGE = Shape(vocabulary=512, width=896, layers=10, heads=14, length=256)
"""97.1M parameters, so many that a rank holds little else."""

MIDDLE = Shape(vocabulary=8192, width=512, layers=8, heads=8, length=256)
"""29.5M parameters, of which the embedding is a seventh."""

MODELS = {"10.9M": REFERENCE, "29.5M": MIDDLE, "97M": LARGE}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result: [batch, length, width]."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + torch.as_tensor(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64[batch, length + 1]; returns the mean loss of predicting each from those before it."""
        positions = torch.arange(tokens.shape[1] - 1)
        hidden = self.blocks(self.tokens(tokens[:, :-1]) + self.positions(positions))
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def new_decoder(shape: Shape) -> Decoder:
    """A decoder with the same parameters wherever it is made."""
    torch.manual_seed(0)
    return Decoder(shape)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for all ways of training."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(shape: Shape, tokens: int, seed: int) -> torch.Tensor:
    """Random int64[sequences, length + 1] with `tokens` targets, in the longest possible sequences.

    ValueError if `tokens` do not fill whole sequences.
    """
    length = min(tokens, shape.length)
    if tokens < 1 or tokens % length:
        raise ValueError(f"{tokens} tokens do not fill whole sequences of {length}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (tokens // length, length + 1), generator=generator)
