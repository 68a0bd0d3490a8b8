"""Shapes by name: `tiny` to `1.3b` of our own, and Llama 3.1 as published."""

from __future__ import annotations

import difflib

from imece.models.shape import RopeScaling, TransformerConfig


def _llama(layers: int, width: int, heads: int, mlp_width: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=128256,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        mlp_width=mlp_width,
        max_seq=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=8192
        ),
    )


PRESETS: dict[str, TransformerConfig] = {
    # 0.1M parameters, for tests. The vocabulary is the bytes.
    "tiny": TransformerConfig(
        vocab_size=256, layers=2, width=64, heads=4, kv_heads=2, mlp_width=176, max_seq=64, tied_head=True
    ),
    # 4M parameters: after three minutes on two CPU cores its text resembles what it has read.
    "small": TransformerConfig(
        vocab_size=4096, layers=4, width=256, heads=4, kv_heads=2, mlp_width=768, max_seq=256, tied_head=True
    ),
    # 29M parameters.
    "medium": TransformerConfig(
        vocab_size=8192, layers=8, width=512, heads=8, kv_heads=4, mlp_width=1536, max_seq=512, tied_head=True
    ),
    # As wide and deep as GPT-3's 1.3B, with GPT-2's vocabulary rounded up to a multiple of 64.
    "1.3b": TransformerConfig(
        vocab_size=50304,
        layers=24,
        width=2048,
        heads=16,
        kv_heads=16,
        mlp_width=5504,
        max_seq=2048,
        tied_head=True,
    ),
    "llama-8b": _llama(layers=32, width=4096, heads=32, mlp_width=14336),
    "llama-70b": _llama(layers=80, width=8192, heads=64, mlp_width=28672),
    "llama-405b": _llama(layers=126, width=16384, heads=128, mlp_width=53248),
}


def preset(name: str) -> TransformerConfig:
    """The shape of this name. ValueError, with the nearest name or all of them, if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(PRESETS)}"
    raise ValueError(f"there is no preset {name!r}: {hint}")
