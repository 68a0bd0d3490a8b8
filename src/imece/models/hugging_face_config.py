"""Translates config.json, for Llama and models that differ from it by options, to our shapes and back.

A `model_type` is a row of `_FAMILIES`. Whether it can express a shape is tested by writing the shape and
reading it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from imece.models.shape import RopeScaling, TransformerConfig
from imece.models.transformer import INIT_STD
from imece.reading import Json

_Switch = bool | str  # a str: the key that decides

_MOST_LAYERS = 10_000  # config.json may not ask for more: every layer is built, if only in outline
_SLIDING, _FULL = "sliding_attention", "full_attention"


class OtherKindError(ValueError):
    """`Transformer` cannot be this kind of model."""


@dataclass(frozen=True)
class _Family:
    """How models of one `model_type` differ from Llama."""

    architecture: str
    qkv_bias: _Switch = False
    out_bias: _Switch = False
    mlp_bias: _Switch = False
    head_norms: bool = False
    window: Literal["never", "all", "last", "nope"] = "never"
    """Which layers have a window. The last two only if use_sliding_window is set: the layers that layer_types
    names, or without it those from max_window_layers on, or those without rotary positions."""
    nope: bool = False  # some layers have no rotary positions
    theta: float = 10000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for keys that are not in the file, as in transformers."""


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family(
        "MistralForCausalLM",
        window="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        window="last",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        "attention_bias",
        "attention_bias",
        head_norms=True,
        window="last",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        window="nope",
        nope=True,
        theta=2e6,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
}
# Values for keys that are not in the file, unless the family's own `defaults` have them.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
}


def shape_from(content: Json) -> TransformerConfig:
    """The shape that a config.json describes. OtherKindError if `Transformer` cannot have it; ValueError,
    TypeError, KeyError or AttributeError if nothing can."""
    kind = content["model_type"]
    if content.get("quantization_config") is not None:
        raise ValueError("its weights are quantised, as quantization_config says")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise OtherKindError(f"model_type is {kind!r}; there are {', '.join(_FAMILIES)}")
    family = _FAMILIES[kind]
    content = {**_DEFAULTS, **family.defaults, **content}
    if content["hidden_act"] != "silu":
        raise OtherKindError(f"hidden_act is {content['hidden_act']!r}, only 'silu' is possible")
    theta, scaling = _read_rope(content, family.theta)
    layers = _whole(content, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {_MOST_LAYERS}")
    nope = _nope_layers(content, layers) if family.nope else ()
    windowed = _windowed_layers(content, family, layers, nope)
    return TransformerConfig(
        vocab_size=_whole(content, "vocab_size"),
        layers=layers,
        width=_whole(content, "hidden_size"),
        heads=_whole(content, "num_attention_heads"),
        kv_heads=_whole(content, "num_key_value_heads", "num_attention_heads"),
        mlp_width=_whole(content, "intermediate_size"),
        max_seq=_whole(content, "max_position_embeddings"),
        rope_theta=theta,
        norm_eps=float(content["rms_norm_eps"]),
        tied_head=bool(content["tie_word_embeddings"]),
        rope_scaling=scaling,
        head_dim=None if content.get("head_dim") is None else _whole(content, "head_dim"),
        head_norms=family.head_norms,
        qkv_bias=_either(content, family.qkv_bias),
        out_bias=_either(content, family.out_bias),
        mlp_bias=_either(content, family.mlp_bias),
        window=_whole(content, "sliding_window") if windowed else None,
        full_layers=tuple(layer for layer in range(layers) if windowed and layer not in windowed),
        nope_layers=nope,
    )


def content_of(
    config: TransformerConfig, dtype: torch.dtype, end: int | None, like: str | None = None
) -> Json:
    """The content of config.json, for files in `dtype`. end: the token before and behind each document.

    like: the model_type to write if it can express this shape; else the first that can. ValueError if none
    that imece knows can.
    """
    for kind in dict.fromkeys((like, *_FAMILIES)):
        if kind in _FAMILIES:
            content = _written(kind, config, dtype, end)
            if shape_from(content) == config:
                return content
    raise ValueError(f"none of {', '.join(_FAMILIES)} has this shape: {config}")


def _written(kind: str, config: TransformerConfig, dtype: torch.dtype, end: int | None) -> Json:
    """The content in the words of this model_type, whether or not it can express the shape."""
    family, layers = _FAMILIES[kind], range(config.layers)
    rope: Json = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq,
        }
    dtype_name = str(dtype).removeprefix("torch.")
    own: Json = {}
    if family.window != "never":
        own["sliding_window"] = config.window
    if family.window in ("last", "nope"):
        own["layer_types"] = [_SLIDING if config.window_of(layer) else _FULL for layer in layers]
        own["use_sliding_window"] = config.window is not None
    if family.window == "last":
        own["max_window_layers"] = config.layers  # layer_types decides
    if family.nope:
        own["no_rope_layers"] = [int(layer not in config.nope_layers) for layer in layers]
    own |= {"attention_bias": config.out_bias} if family.out_bias else {}
    own |= {"mlp_bias": config.mlp_bias} if family.mlp_bias else {}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **own,
        "initializer_range": INIT_STD,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        # transformers 5 reads the first of these, transformers 4 the others.
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def _nope_layers(content: Json, layers: int) -> tuple[int, ...]:
    turns = content.get("no_rope_layers")  # despite its name: 1 for layers with rotary positions
    if turns is None:
        every = _whole(content, "no_rope_layer_interval")
        if every < 1:
            raise ValueError(f"no_rope_layer_interval is {every}; it must be positive")
        return tuple(layer for layer in range(layers) if (layer + 1) % every == 0)
    if not isinstance(turns, list) or len(turns) < layers:
        raise ValueError(f"no_rope_layers is not a list of {layers}")
    return tuple(layer for layer in range(layers) if not turns[layer])


def _windowed_layers(content: Json, family: _Family, layers: int, nope: tuple[int, ...]) -> frozenset[int]:
    """The layers that attend to at most `sliding_window` positions."""
    window = content.get("sliding_window") if family.window != "never" else None
    if family.window == "all":
        return frozenset(range(layers)) if window is not None else frozenset()
    asked = window is not None and bool(content["use_sliding_window"])
    types = content.get("layer_types") if family.window != "never" else None
    if types is not None:
        if (
            not isinstance(types, list)
            or len(types) < layers
            or any(each not in (_SLIDING, _FULL) for each in types)
        ):
            raise ValueError(f"layer_types is not {layers} times {_SLIDING!r} or {_FULL!r}")
        sliding = frozenset(layer for layer in range(layers) if types[layer] == _SLIDING)
        if sliding and not asked:
            raise ValueError(f"layer_types has {_SLIDING!r}, but there is no window to slide")
        return sliding
    if not asked:
        return frozenset()
    return frozenset(nope if family.window == "nope" else range(_whole(content, "max_window_layers"), layers))


def _read_rope(content: Json, default_theta: float) -> tuple[float, RopeScaling | None]:
    # In transformers 5's order; a file of version 4 has no rope_parameters.
    rope: Mapping[str, Any] = content.get("rope_scaling") or content.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or content.get("rope_theta") or default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise OtherKindError(f"its rotary positions are of the type {kind!r}, not 'default' or 'llama3'")
    for where in (rope, content):
        if where.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise OtherKindError(f"partial_rotary_factor is {where['partial_rotary_factor']}, not 1.0")
    if kind == "default":
        return theta, None
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_seq=int(
            rope.get("original_max_position_embeddings", content["max_position_embeddings"])
        ),
    )


def _whole(content: Json, key: str, otherwise: str | None = None) -> int:
    value = content[key] if otherwise is None else content.get(key) or content[otherwise]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def _either(content: Json, switch: _Switch) -> bool:
    value = switch if isinstance(switch, bool) else content[switch]
    if not isinstance(value, bool):
        raise ValueError(f"{switch} is {value!r}, not true or false")
    return value
