"""The kinds of models of which a config.json may be, by its `model_type`: how each differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from imece.plan.models import mixtures
from imece.plan.models.fields import POSITIONS, WINDOW, one_of
from imece.plan.models.model import Norm

Switch = bool | str  # a str: the field that decides


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` differ from Llama."""

    layers: str = "num_hidden_layers"
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp_width: str = "intermediate_size"
    gated: bool = True
    norm: Norm = "rms"
    norm_vectors: int = 1  # of the residual's width, in each norm. 1: weight; 2: bias, too; 0: neither
    norms: int = 2  # per layer
    one_norm: Switch = False  # per layer: attention and MLP read the same norm
    head_norms: Switch = False  # norms of queries and of keys, shared by all heads
    own_head_norms: Switch = False  # the same, with separate numbers for each head
    query_biases: Switch = False  # biases of queries, keys and values
    latent_biases: Switch = False  # the same of what these are made from, if not from the residual
    out_biases: Switch = False  # bias of attention's output
    mlp_biases: Switch = False
    head_biases: bool = False
    table_norm: bool = False  # after the embedding
    tied: bool = False  # if the file does not say
    positions: str = ""  # the field with the rows of learned positions
    fused_queries: bool = False  # one matrix for queries, keys and values
    fused_gate: bool = False  # one for gate and up
    unused_positions: int = 0  # rows of that table that no token uses
    experts: str = ""  # the field with the number of experts
    active: str = "num_experts_per_tok"  # of those that a token goes to
    uneven: bool = False  # `translated` knows MLPs beside experts, and in place of them
    dense_width: str = "intermediate_size"  # of the latter
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of absent fields, as in transformers
    ours: bool = False  # whether models/hugging_face_config.py reads such models, if they are plain
    full_every: int = 0  # of so many layers the last has no window, if the file does not say; 0: all have it
    translated: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # into the fields named above


def _bloom(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **content,
        "hidden_size": one_of(content, "hidden_size", "n_embed"),
        "num_hidden_layers": one_of(content, "num_hidden_layers", "n_layer"),
        "num_attention_heads": one_of(content, "num_attention_heads", "n_head"),
    }


def _falcon(content: Mapping[str, Any]) -> dict[str, Any]:
    if new := content.get("new_decoder_architecture"):
        key_value = content.get("num_kv_heads")
    else:
        key_value = 1 if content.get("multi_query", True) else None
    norms = one_of(content, "num_ln_in_parallel_attn") or (2 if new else 1)
    one_norm = bool(content.get("parallel_attn", True)) and norms == 1
    return _bloom(content) | {"num_key_value_heads": key_value, "one_norm": one_norm}


def _mpt(content: Mapping[str, Any]) -> dict[str, Any]:
    width, ratio = content.get("d_model"), content.get("expansion_ratio", 4)
    if not isinstance(width, int) or not isinstance(ratio, int):
        return dict(content)
    return {**content, "intermediate_size": ratio * width}


def _opt(content: Mapping[str, Any]) -> dict[str, Any]:
    if content.get("word_embed_proj_dim") not in (None, content.get("hidden_size")):
        raise ValueError("its embedding is not as wide as its layers")
    if content.get("do_layer_norm_before") is False or content.get("_remove_final_layer_norm"):
        raise ValueError("it has no norm at its end")
    return dict(content)


def _big_code(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "num_key_value_heads": 1 if content.get("multi_query", True) else None}


def _windows_of_gpt_neo(content: Mapping[str, Any]) -> dict[str, Any]:
    kinds = content.get("attention_layers")
    if not isinstance(kinds, list):
        groups = content.get("attention_types")
        try:
            kinds = [kind for names, times in groups or [] for _ in range(times) for kind in names]
        except (TypeError, ValueError):
            raise ValueError("attention_types is no list of kinds and times") from None
    types = ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds]
    return {**content, WINDOW: content.get("window_size", 256), "layer_types": types}


def _phi(content: Mapping[str, Any]) -> dict[str, Any]:
    if content.get("qk_layernorm"):
        raise ValueError("it has norms of queries and keys")
    return dict(content)


def _biases(switch: Switch) -> dict[str, Any]:
    return dict.fromkeys(("query_biases", "out_biases", "mlp_biases"), switch)


_ATTENTION_BIASES: dict[str, Any] = {"query_biases": "attention_bias", "out_biases": "attention_bias"}
_ASKED_BIASES = _ATTENTION_BIASES | {"mlp_biases": "mlp_bias"}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_vectors": 2}
_PLAIN = _LAYER_NORM | {"gated": False}


def _gpt(**differs: Any) -> Family:
    names: dict[str, Any] = {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "mlp_width": "n_inner",
    }
    return Family(**names | _PLAIN | differs)


def _kv(heads: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads} | others


def _deep_seek_family(**defaults: int) -> Family:
    latent = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }  # fmt: skip
    return Family(
        uneven=True, mlp_width="moe_intermediate_size", experts="n_routed_experts",
        latent_biases="attention_bias", out_biases="attention_bias", translated=mixtures.deep_seek,
        defaults=latent | defaults,
    )  # fmt: skip


_GLM = _kv(2, head_dim=128, attention_bias=True)
_GEMMA_3 = Family(
    norms=4, head_norms=True, **_ATTENTION_BIASES, tied=True, full_every=6,
    defaults=_kv(4, vocab_size=262208, num_attention_heads=8, head_dim=256, **{WINDOW: 4096}),
)  # fmt: skip
FAMILIES = {  # by `model_type`
    "llama": Family(**_ASKED_BIASES, ours=True),
    "granite": Family(**_ASKED_BIASES),
    "helium": Family(**_ASKED_BIASES, defaults=_kv(20, head_dim=128)),
    "phi3": Family(fused_queries=True, fused_gate=True),
    "qwen2": Family(query_biases=True, ours=True, defaults=_kv(32)),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        Family(query_biases=True, defaults=_kv(32)),
    ),
    "qwen3": Family(**_ATTENTION_BIASES, head_norms=True, ours=True, defaults=_kv(32, head_dim=128)),
    "qwen3_vl_text": Family(**_ATTENTION_BIASES, head_norms=True, defaults=_kv(32, head_dim=128)),
    "mistral": Family(ours=True, defaults=_kv(8, **{WINDOW: 4096})),
    "ministral": Family(defaults=_kv(8, **{WINDOW: 4096})),
    "smollm3": Family(**_ASKED_BIASES, tied=True, ours=True, defaults=_kv(4)),
    "ernie4_5": Family(**_biases("use_bias"), tied=True, defaults=_kv(2, head_dim=128)),
    "seed_oss": Family(
        query_biases="attention_bias", out_biases="attention_out_bias", mlp_biases="mlp_bias",
        defaults=_kv(8, head_dim=128, attention_bias=True),
    ),
    "gemma": Family(**_ATTENTION_BIASES, tied=True, defaults=_kv(16, head_dim=256)),
    "gemma2": Family(
        norms=4, **_ATTENTION_BIASES, tied=True, full_every=2,
        defaults=_kv(4, head_dim=256, **{WINDOW: 4096}),
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA_3),
    "glm": Family(fused_gate=True, query_biases="attention_bias", defaults=_GLM),
    "glm4": Family(fused_gate=True, query_biases="attention_bias", norms=4, defaults=_GLM),
    "olmo": Family(**_ATTENTION_BIASES, norm="layer", norm_vectors=0),
    "olmo2": Family(**_ATTENTION_BIASES, own_head_norms=True),
    "olmo3": Family(**_ATTENTION_BIASES, own_head_norms=True, full_every=4, defaults={WINDOW: 4096}),
    "cohere": Family(
        **_ATTENTION_BIASES, norm="layer", norms=1, own_head_norms="use_qk_norm", tied=True
    ),
    "cohere2": Family(
        **_ATTENTION_BIASES, norm="layer", norms=1, tied=True, full_every=4, defaults={WINDOW: 4096}
    ),
    "stablelm": Family(
        **_LAYER_NORM, query_biases="use_qkv_bias", one_norm="use_parallel_residual",
        own_head_norms="qk_layernorm", defaults=_kv(32),
    ),
    "starcoder2": Family(
        **_PLAIN, **_biases("use_bias"), tied=True,
        defaults=_kv(2, use_bias=True),
    ),
    "nemotron": Family(**_PLAIN, **_ASKED_BIASES),
    "phi": Family(**_PLAIN, **_biases(True), norms=1, head_biases=True, translated=_phi),
    "gpt2": _gpt(**_biases(True), tied=True, positions="n_positions", fused_queries=True),
    "gpt_bigcode": _gpt(
        **_biases(True), tied=True, positions="n_positions", fused_queries=True, translated=_big_code
    ),
    "gptj": _gpt(mlp_biases=True, norms=1, head_biases=True),
    "codegen": _gpt(mlp_biases=True, norms=1, head_biases=True, fused_queries=True),
    "gpt_neo": Family(
        "num_layers", heads="num_heads", **_PLAIN, out_biases=True, mlp_biases=True, tied=True,
        positions=POSITIONS, translated=_windows_of_gpt_neo,
    ),
    "gpt_neox": Family(
        **_PLAIN, **_ATTENTION_BIASES, mlp_biases=True, fused_queries=True,
        defaults={"attention_bias": True},
    ),
    "opt": Family(
        mlp_width="ffn_dim", **_PLAIN, **_biases("enable_bias"),
        tied=True, positions=POSITIONS, unused_positions=2, defaults={"enable_bias": True},
        translated=_opt,
    ),
    "bloom": Family(
        **_PLAIN, **_biases(True), table_norm=True, tied=True, fused_queries=True, translated=_bloom
    ),
    "falcon": Family(
        mlp_width="ffn_hidden_size", **_PLAIN, **_biases("bias"),
        one_norm="one_norm", tied=True, fused_queries=True, translated=_falcon,
    ),
    "mpt": Family(
        "n_layers", "d_model", "n_heads", gated=False, norm="layer", tied=True, fused_queries=True,
        translated=_mpt,
    ),
    "mixtral": Family(experts="num_local_experts", defaults=_kv(8)),
    "qwen2_moe": Family(
        uneven=True, mlp_width="moe_intermediate_size", query_biases="qkv_bias", experts="num_experts",
        translated=mixtures.qwen_2_moe, defaults={"qkv_bias": True},
    ),
    "qwen3_moe": Family(
        uneven=True, mlp_width="moe_intermediate_size", **_ATTENTION_BIASES, head_norms=True,
        experts="num_experts", translated=mixtures.qwen_3_moe, defaults=_kv(4),
    ),
    "deepseek_v2": _deep_seek_family(n_routed_experts=64, n_shared_experts=2),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        _deep_seek_family(n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3),
    ),
    "glm4_moe": Family(
        uneven=True, mlp_width="moe_intermediate_size", experts="n_routed_experts",
        query_biases="attention_bias", head_norms="use_qk_norm", translated=mixtures.first_dense,
        defaults=_kv(8, n_routed_experts=128, n_shared_experts=1, first_k_dense_replace=1),
    ),
    "gpt_oss": Family(
        **_ATTENTION_BIASES, experts="num_experts", fused_gate=True, full_every=2,
        translated=mixtures.gpt_oss, defaults=_kv(8, head_dim=64, attention_bias=True, **{WINDOW: 128}),
    ),
    "llama4_text": Family(
        uneven=True, **_ATTENTION_BIASES, experts="num_experts", dense_width="intermediate_size_mlp",
        translated=mixtures.llama_4, defaults=_kv(8),
    ),
    "ernie4_5_moe": Family(
        uneven=True, mlp_width="moe_intermediate_size", tied=True, experts="moe_num_experts", active="moe_k",
        translated=mixtures.ernie_moe, defaults=_kv(4),
    ),
    "olmoe": Family(
        **_ATTENTION_BIASES, own_head_norms=True, experts="num_experts", translated=mixtures.experts
    ),
}  # fmt: skip
MIXTURES = [kind for kind, family in FAMILIES.items() if family.experts]
ASKED = (  # have a window only if use_sliding_window
    "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text",
    "smollm3", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
# The part for text in a file of a model that also sees names only what differs from transformers' defaults.
WITHIN: dict[object, dict[str, int]] = {
    kind: {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    for kind, inner, vocabulary in (
        ("llama", 11008, 32000), ("mistral", 14336, 32000), ("qwen2", 22016, 151936),
    )
}  # fmt: skip
