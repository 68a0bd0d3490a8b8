"""The shape of a transformer: numbers only, so that the planner can use it without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's extension to longer sequences: slow pairs turn `factor` times slower, fast ones as before.

    A pair is slow if it turns less than low_freq_factor times in original_max_seq positions, and fast if it
    turns more than high_freq_factor times; in between the change is gradual.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq: int  # positions that the model was first trained on

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, which is "
                f"{self.low_freq_factor}"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model. ValueError, with names and values, if no model can have it."""

    vocab_size: int
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int  # heads of keys and values; equal to `heads` in plain multi-head attention
    mlp_width: int
    max_seq: int  # positions
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = False  # the embedding's weights are the head's too
    rope_scaling: RopeScaling | None = None
    head_dim: int | None = None  # channels of a head if not width / heads
    head_norms: bool = False  # RMS norms of each head's query and key, before rotation
    qkv_bias: bool = False  # biases of queries, keys and values
    out_bias: bool = False  # bias of attention's output
    mlp_bias: bool = False
    window: int | None = None  # positions that a position attends to, itself included; None: all before it
    full_layers: tuple[int, ...] = ()  # layers without a window, if there is one
    nope_layers: tuple[int, ...] = ()  # layers without rotary positions

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width is {self.width}, which cannot be divided among heads = {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, which cannot be divided among kv_heads = {self.kv_heads}"
            )
        if self.head_width % 2:
            said = "head_dim is" if self.head_dim else f"width / heads is {self.width} / {self.heads} ="
            raise ValueError(f"{said} {self.head_width}; rotary positions turn pairs, so it must be even")
        for name in ("full_layers", "nope_layers"):
            if wrong := [each for each in getattr(self, name) if not 0 <= each < self.layers]:
                raise ValueError(f"{name} has {wrong[0]}; layers are from 0 to {self.layers - 1}")
        self._say_in_one_way()

    def _say_in_one_way(self) -> None:
        """Replace values that mean the same by one of them, so that shapes of the same model are equal."""
        one: dict[str, object] = {
            name: tuple(sorted({*getattr(self, name)})) for name in ("full_layers", "nope_layers")
        }
        if self.head_dim == self.width / self.heads:
            one["head_dim"] = None
        if self.window is None or len({*self.full_layers}) == self.layers:
            one |= {"window": None, "full_layers": ()}
        for name, value in one.items():
            object.__setattr__(self, name, value)

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def q_width(self) -> int:
        """Width of all heads' queries, and of their output."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window

    @property
    def active_count(self) -> int:
        """Number of parameters that a token goes through: all."""
        return self.parameter_count

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters; a tied head counts once."""
        attention = 2 * self.width * (self.q_width + self.kv_width)
        mlp = 3 * self.width * self.mlp_width
        tables = 1 if self.tied_head else 2
        return (
            tables * self.vocab_size * self.width
            + self.layers * (attention + mlp + self.vectors)
            + self.width
        )

    @property
    def vectors(self) -> int:
        """Number of elements in a block's norms and biases."""
        return (
            2 * self.width
            + self.head_norms * 2 * self.head_width
            + self.qkv_bias * (self.q_width + 2 * self.kv_width)
            + self.out_bias * self.width
            + self.mlp_bias * (2 * self.mlp_width + self.width)
        )


def _check_positive(config: TransformerConfig | RopeScaling) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
            raise ValueError(f"{field.name} is {value}; it must be positive and finite")
