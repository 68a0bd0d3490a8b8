"""Mixtures of experts: what their files say of the MLPs beside experts and in place of them, in the fields of
families.py and fields.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imece.plan.models.fields import (
    DENSE_LAYERS,
    LATENT,
    ROUTING,
    SHARED_WIDTH,
    WINDOW,
    number,
    one_of,
)

_MOST_LAYERS = 100_000


def experts(content: Mapping[str, Any]) -> dict[str, Any]:
    """As Mixtral's."""
    return {**content, "num_experts": one_of(content, "num_experts", "num_local_experts")}


def _layers(content: Mapping[str, Any]) -> int:
    """Their number. ValueError for more than can be looked at one by one."""
    layers = number(content, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {_MOST_LAYERS:,}")
    return layers


def _dense_between(content: Mapping[str, Any]) -> dict[str, Any]:
    """As Qwen's name them: some by number, and all but every n-th."""
    step, named = number(content, "decoder_sparse_step", 1), content.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise ValueError(f"mlp_only_layers is {named!r}, not a list")
    layers = range(_layers(content))
    return {DENSE_LAYERS: sum(at in named or not step or (at + 1) % step > 0 for at in layers)}


def qwen_2_moe(content: Mapping[str, Any]) -> dict[str, Any]:
    """One MLP beside the experts, with a gate."""
    gate = {ROUTING: content.get("hidden_size"), SHARED_WIDTH: content.get("shared_expert_intermediate_size")}
    return experts(content) | _dense_between(content) | gate


def qwen_3_moe(content: Mapping[str, Any]) -> dict[str, Any]:
    """None beside them."""
    return experts(content) | _dense_between(content)


def first_dense(content: Mapping[str, Any]) -> dict[str, Any]:
    """As DeepSeek's: some experts are for all tokens, and the first layers have none."""
    shared = number(content, "n_shared_experts") * number(content, "moe_intermediate_size")
    routed = one_of(content, "n_routed_experts", "num_experts", "num_local_experts")
    dense = number(content, "first_k_dense_replace")
    return {**content, "n_routed_experts": routed, SHARED_WIDTH: shared, DENSE_LAYERS: dense}


def deep_seek(content: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention, too. Keys of all heads have the same turned channels."""
    turned = number(content, "qk_rope_head_dim")
    latent = {
        "queries": number(content, "q_lora_rank"), "keys": number(content, "kv_lora_rank"),
        "turned": turned, "value_width": number(content, "v_head_dim"),
    }  # fmt: skip
    head = {
        "head_dim": number(content, "qk_nope_head_dim") + turned,
        "num_key_value_heads": content.get("num_attention_heads"),
    }
    return first_dense(content) | head | {LATENT: latent}


def gpt_oss(content: Mapping[str, Any]) -> dict[str, Any]:
    """Biases of router and experts, and a sink for each head."""
    found, inner = experts(content), number(content, "intermediate_size")
    biases = 1 + 2 * inner + number(content, "hidden_size")  # for each expert; 1 is the router's
    sinks = number(content, "num_attention_heads")
    return found | {ROUTING: number(found, "num_experts") * biases + sinks}


def llama_4(content: Mapping[str, Any]) -> dict[str, Any]:
    """One MLP beside the experts; some layers attend to chunks."""
    layers, step = _layers(content), number(content, "interleave_moe_layer_step", 1)
    named, types = content.get("moe_layers"), content.get("layer_types")
    dense = layers - (len(named) if isinstance(named, list) else layers // max(1, step))
    every = number(content, "no_rope_layer_interval", 4)
    if not isinstance(types, list):
        types = ["full" if every and (at + 1) % every == 0 else "chunked_attention" for at in range(layers)]
    # A chunk's tokens see half of it in the mean, so it leaves as many scores as a window half as long.
    window = {
        WINDOW: number(content, "attention_chunk_size", 8192) // 2,
        "layer_types": ["sliding_attention" if kind == "chunked_attention" else "full" for kind in types],
    }
    beside = {SHARED_WIDTH: content.get("intermediate_size"), DENSE_LAYERS: dense}
    return experts(content) | beside | window


def ernie_moe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Experts from one layer to another, every n-th. ValueError with biases, which not all matrices have."""
    if content.get("use_bias"):
        raise ValueError("it has biases")
    layers, inner = _layers(content), number(content, "moe_intermediate_size")
    first = number(content, "moe_layer_start_index", 1)
    last, every = content.get("moe_layer_end_index"), number(content, "moe_layer_interval", 1)
    end = last if isinstance(last, int) and last >= 0 else layers - 1
    sparse = sum((at + 1) % max(1, every) == 0 for at in range(first, min(end, layers - 1) + 1))
    return {
        **content, SHARED_WIDTH: number(content, "moe_num_shared_experts", 2) * inner,
        ROUTING: content.get("moe_num_experts"), DENSE_LAYERS: layers - sparse,
    }  # fmt: skip
