"""The shape of a model from Hugging Face's config.json; reads no weights and runs none of the model's code.

The shape has exactly the parameters of transformers' model for that file; models for which it cannot are
refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.plan.models.model import Model, Norm

CONFIG = "config.json"
_WINDOW = "sliding_window"
_POSITIONS = "max_position_embeddings"
_MOST = 10**12  # of layers, channels, heads and so on
_Switch = bool | str  # a str: the field that decides


@dataclass(frozen=True)
class _Family:
    """How models of one `model_type` differ from Llama."""

    layers: str = "num_hidden_layers"
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp_width: str = "intermediate_size"
    gated: bool = True
    norm: Norm = "rms"
    norm_vectors: int = 1  # of the residual's width, in each norm. 1: weight; 2: bias, too; 0: neither
    norms: int = 2  # per layer
    one_norm: _Switch = False  # per layer: attention and MLP read the same norm
    head_norms: _Switch = False  # norms of queries and of keys, shared by all heads
    own_head_norms: _Switch = False  # the same, with separate numbers for each head
    query_biases: _Switch = False  # biases of queries, keys and values
    out_biases: _Switch = False  # bias of attention's output
    mlp_biases: _Switch = False
    head_biases: bool = False
    table_norm: bool = False  # after the embedding
    tied: bool = False  # if the file does not say
    positions: str = ""  # the field with the rows of learned positions
    fused_queries: bool = False  # one matrix for queries, keys and values
    fused_gate: bool = False  # one for gate and up
    unused_positions: int = 0  # rows of that table that no token uses
    experts: str = ""  # the field with the number of experts
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of absent fields, as in transformers
    ours: bool = False  # whether models/hugging_face_config.py reads such models, if they are plain
    full_every: int = 0  # of so many layers the last has no window, if the file does not say; 0: all have it
    translated: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # into the fields named above


def _one(content: Mapping[str, Any], *names: str) -> Any:
    """The first present one of several names for the same field."""
    return next((content[name] for name in names if content.get(name) is not None), None)


def _bloom(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **content,
        "hidden_size": _one(content, "hidden_size", "n_embed"),
        "num_hidden_layers": _one(content, "num_hidden_layers", "n_layer"),
        "num_attention_heads": _one(content, "num_attention_heads", "n_head"),
    }


def _falcon(content: Mapping[str, Any]) -> dict[str, Any]:
    if new := content.get("new_decoder_architecture"):
        key_value = content.get("num_kv_heads")
    else:
        key_value = 1 if content.get("multi_query", True) else None
    norms = _one(content, "num_ln_in_parallel_attn") or (2 if new else 1)
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
    return {**content, _WINDOW: content.get("window_size", 256), "layer_types": types}


def _experts(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "num_experts": _one(content, "num_experts", "num_local_experts")}


def _phi(content: Mapping[str, Any]) -> dict[str, Any]:
    if content.get("qk_layernorm"):
        raise ValueError("it has norms of queries and keys")
    return dict(content)


def _biases(switch: _Switch) -> dict[str, Any]:
    return dict.fromkeys(("query_biases", "out_biases", "mlp_biases"), switch)


_ATTENTION_BIASES: dict[str, Any] = {"query_biases": "attention_bias", "out_biases": "attention_bias"}
_ASKED_BIASES = _ATTENTION_BIASES | {"mlp_biases": "mlp_bias"}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_vectors": 2}
_PLAIN = _LAYER_NORM | {"gated": False}


def _gpt(**differs: Any) -> _Family:
    names: dict[str, Any] = {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "mlp_width": "n_inner",
    }
    return _Family(**names | _PLAIN | differs)


def _kv(heads: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads} | others


_GLM = _kv(2, head_dim=128, attention_bias=True)
_GEMMA_3 = _Family(
    norms=4, head_norms=True, **_ATTENTION_BIASES, tied=True, full_every=6,
    defaults=_kv(4, vocab_size=262208, num_attention_heads=8, head_dim=256, **{_WINDOW: 4096}),
)  # fmt: skip
_FAMILIES = {
    "llama": _Family(**_ASKED_BIASES, ours=True),
    "granite": _Family(**_ASKED_BIASES),
    "helium": _Family(**_ASKED_BIASES, defaults=_kv(20, head_dim=128)),
    "phi3": _Family(fused_queries=True, fused_gate=True),
    "qwen2": _Family(query_biases=True, ours=True, defaults=_kv(32)),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        _Family(query_biases=True, defaults=_kv(32)),
    ),
    "qwen3": _Family(**_ATTENTION_BIASES, head_norms=True, ours=True, defaults=_kv(32, head_dim=128)),
    "qwen3_vl_text": _Family(**_ATTENTION_BIASES, head_norms=True, defaults=_kv(32, head_dim=128)),
    "mistral": _Family(ours=True, defaults=_kv(8, **{_WINDOW: 4096})),
    "ministral": _Family(defaults=_kv(8, **{_WINDOW: 4096})),
    "smollm3": _Family(**_ASKED_BIASES, tied=True, ours=True, defaults=_kv(4)),
    "ernie4_5": _Family(**_biases("use_bias"), tied=True, defaults=_kv(2, head_dim=128)),
    "seed_oss": _Family(
        query_biases="attention_bias", out_biases="attention_out_bias", mlp_biases="mlp_bias",
        defaults=_kv(8, head_dim=128, attention_bias=True),
    ),
    "gemma": _Family(**_ATTENTION_BIASES, tied=True, defaults=_kv(16, head_dim=256)),
    "gemma2": _Family(
        norms=4, **_ATTENTION_BIASES, tied=True, full_every=2,
        defaults=_kv(4, head_dim=256, **{_WINDOW: 4096}),
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA_3),
    "glm": _Family(fused_gate=True, query_biases="attention_bias", defaults=_GLM),
    "glm4": _Family(fused_gate=True, query_biases="attention_bias", norms=4, defaults=_GLM),
    "olmo": _Family(**_ATTENTION_BIASES, norm="layer", norm_vectors=0),
    "olmo2": _Family(**_ATTENTION_BIASES, own_head_norms=True),
    "olmo3": _Family(**_ATTENTION_BIASES, own_head_norms=True, full_every=4, defaults={_WINDOW: 4096}),
    "cohere": _Family(
        **_ATTENTION_BIASES, norm="layer", norms=1, own_head_norms="use_qk_norm", tied=True
    ),
    "cohere2": _Family(
        **_ATTENTION_BIASES, norm="layer", norms=1, tied=True, full_every=4, defaults={_WINDOW: 4096}
    ),
    "stablelm": _Family(
        **_LAYER_NORM, query_biases="use_qkv_bias", one_norm="use_parallel_residual",
        own_head_norms="qk_layernorm", defaults=_kv(32),
    ),
    "starcoder2": _Family(
        **_PLAIN, **_biases("use_bias"), tied=True,
        defaults=_kv(2, use_bias=True),
    ),
    "nemotron": _Family(**_PLAIN, **_ASKED_BIASES),
    "phi": _Family(**_PLAIN, **_biases(True), norms=1, head_biases=True, translated=_phi),
    "gpt2": _gpt(**_biases(True), tied=True, positions="n_positions", fused_queries=True),
    "gpt_bigcode": _gpt(
        **_biases(True), tied=True, positions="n_positions", fused_queries=True, translated=_big_code
    ),
    "gptj": _gpt(mlp_biases=True, norms=1, head_biases=True),
    "codegen": _gpt(mlp_biases=True, norms=1, head_biases=True, fused_queries=True),
    "gpt_neo": _Family(
        "num_layers", heads="num_heads", **_PLAIN, out_biases=True, mlp_biases=True, tied=True,
        positions=_POSITIONS, translated=_windows_of_gpt_neo,
    ),
    "gpt_neox": _Family(
        **_PLAIN, **_ATTENTION_BIASES, mlp_biases=True, fused_queries=True,
        defaults={"attention_bias": True},
    ),
    "opt": _Family(
        mlp_width="ffn_dim", **_PLAIN, **_biases("enable_bias"),
        tied=True, positions=_POSITIONS, unused_positions=2, defaults={"enable_bias": True},
        translated=_opt,
    ),
    "bloom": _Family(
        **_PLAIN, **_biases(True), table_norm=True, tied=True, fused_queries=True, translated=_bloom
    ),
    "falcon": _Family(
        mlp_width="ffn_hidden_size", **_PLAIN, **_biases("bias"),
        one_norm="one_norm", tied=True, fused_queries=True, translated=_falcon,
    ),
    "mpt": _Family(
        "n_layers", "d_model", "n_heads", gated=False, norm="layer", tied=True, fused_queries=True,
        translated=_mpt,
    ),
    "mixtral": _Family(experts="num_local_experts", defaults=_kv(8)),
    "qwen3_moe": _Family(
        mlp_width="moe_intermediate_size", **_ATTENTION_BIASES, head_norms=True, experts="num_experts",
        translated=_experts, defaults=_kv(4),
    ),
    "olmoe": _Family(**_ATTENTION_BIASES, own_head_norms=True, experts="num_experts", translated=_experts),
}  # fmt: skip
_MIXTURES = [kind for kind, family in _FAMILIES.items() if family.experts]
_ASKED = (  # have a window only if use_sliding_window
    "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text",
    "smollm3", "qwen3_moe",
)  # fmt: skip
# The part for text in a file of a model that also sees names only what differs from transformers' defaults.
_WITHIN: dict[object, dict[str, int]] = {
    kind: {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    for kind, inner, vocabulary in (
        ("llama", 11008, 32000), ("mistral", 14336, 32000), ("qwen2", 22016, 151936),
    )
}  # fmt: skip
_ENCODERS = (
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "longformer",
    "modernbert", "mpnet", "roberta", "xlm-roberta",
)  # fmt: skip
_STATES = ("bamba", "falcon_mamba", "jamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "zamba", "zamba2")
_BY_SIZE = "A size in place of the file (7B) stands for a decoder of so many parameters, shaped like Llama"
_OTHER_HEAD = re.compile(r".*For(Sequence|Token|Image)\w*|.*For\w*(Classification|Answering|MaskedLM)")


def read_config(path: Path) -> Model:
    """The model in the file. UserError if it cannot be read, is another kind of model, or lacks fields."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a {CONFIG} of a model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON {type(content).__name__}, not an object: get the file again")
    name = path.absolute().parent.name if path.stem == "config" else path.stem
    return from_content(content, str(path), name)


def from_content(content: Mapping[str, Any], where: str, name: str) -> Model:
    """The model in such a file's content. UserError as from `read_config`, beginning with `where`.

    For a model that also sees or hears, plans for its text decoder and says so in the name.
    """
    if left_out := [
        sense for sense in ("vision", "audio") if isinstance(content.get(f"{sense}_config"), dict)
    ]:
        name += f" without {' and '.join(left_out)}"
    if isinstance(content.get("text_config"), dict):
        inner = content["text_config"]
        tied = {"tie_word_embeddings": content.get("tie_word_embeddings")}
        content = tied | _WITHIN.get(inner.get("model_type"), {}) | inner
    kind = content.get("model_type")
    if (reason := unplanned(content)) is not None:
        raise UserError(
            f"{where}: model_type is {kind!r}: {reason}; such models are not planned for. {_BY_SIZE}"
        )
    family = _FAMILIES.get(str(kind))
    if kind is None:
        raise UserError(
            f"{where}: no model_type: it is not the {CONFIG} of a language model; name another file"
        )
    if family is None:
        raise UserError(
            f"{where}: model_type is {kind!r}; there are {', '.join(_FAMILIES)}. "
            f"file.py:function does for other decoders. {_BY_SIZE}"
        )
    try:
        content = family.translated({**family.defaults, **content})
    except ValueError as error:
        raise UserError(f"{where}: {error}, which is not planned for") from error
    needed = [family.layers, family.width, family.heads, "vocab_size"]
    needed += [each for each in (family.positions, family.experts) if each]
    needed += ["num_experts_per_tok"] if family.experts else []
    needed += [family.mlp_width] if family.gated else []
    missing = [each for each in needed if content.get(each) is None]
    if missing:
        raise UserError(f"{where}: without {', '.join(missing)}, which a {kind} model needs: complete it")
    numbers = {each: _whole(content, each, where) for each in needed}
    if family.experts and not numbers[family.experts]:
        raise UserError(f"{where}: {family.experts} is 0, and a {kind} model has experts: at least 1")
    width, heads = numbers[family.width], numbers[family.heads]
    window = _whole(content, _WINDOW, where, 0)
    asks = functools.partial(_asked, content, where)
    try:
        model = Model(
            name,
            numbers[family.layers],
            width,
            heads,
            kv_heads=_whole(content, "num_key_value_heads", where, heads),
            head_width=_whole(content, "head_dim", where, width // max(1, heads)),
            mlp_width=_whole(content, family.mlp_width, where, 4 * width),
            gated=family.gated,
            vocab_size=numbers["vocab_size"],
            tied_head=_either(content, "tie_word_embeddings", where, family.tied),
            learned_positions=numbers[family.positions] if family.positions else 0,
            biases=asks(family.mlp_biases),
            norm=family.norm,
            experts=numbers[family.experts] if family.experts else 0,
            active_experts=numbers["num_experts_per_tok"] if family.experts else 0,
            window=window,
            windowed=_windowed(content, family, numbers[family.layers], where) if window else 0.0,
            norms=1 if asks(family.one_norm) else family.norms,
            fused_queries=family.fused_queries,
            fused_gate=family.fused_gate,
            head_norms=asks(family.head_norms) or asks(family.own_head_norms),
            made_for=_whole(content, _POSITIONS, where, 0),
            ours=family.ours and _is_plain(content),
        )
        return model.with_vectors(_vectors(model, family, asks), _others(model, family))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}: get the file again") from error


def _asked(content: Mapping[str, Any], where: str, switch: _Switch) -> bool:
    """Whether the family has a feature, or the file asks for it. UserError as from `_either`."""
    return switch if isinstance(switch, bool) else _either(content, switch, where, False)


def _vectors(model: Model, family: _Family, asks: Callable[[_Switch], bool]) -> int:
    """Elements of a layer's norms and biases."""
    query, key = model.q_width, model.kv_width
    found = model.norms * family.norm_vectors * model.width
    found += 2 * model.head_width if asks(family.head_norms) else 0
    found += query + key if asks(family.own_head_norms) else 0
    found += query + 2 * key if asks(family.query_biases) else 0
    found += model.width if asks(family.out_biases) else 0
    if asks(family.mlp_biases):
        found += (2 if model.gated else 1) * model.mlp_width + model.width
    return found


def _others(model: Model, family: _Family) -> int:
    """Elements outside the layers, without tables and the positions that tokens use."""
    norms = 2 if family.table_norm else 1
    found = (norms * family.norm_vectors + family.unused_positions) * model.width
    return found + (model.vocab_size if family.head_biases else 0)


def fields_of(kind: str) -> dict[str, str]:
    """The names that files of this `model_type` have for the numbers of a shape."""
    family = _FAMILIES[kind]
    return {
        "layers": family.layers, "width": family.width, "heads": family.heads, "mlp_width": family.mlp_width,
        "positions": family.positions or _POSITIONS, "experts": family.experts, "window": _WINDOW,
        "kv_heads": "num_key_value_heads", "head_width": "head_dim", "vocab_size": "vocab_size",
        "active_experts": "num_experts_per_tok",
    }  # fmt: skip


def is_known(content: Mapping[str, Any]) -> bool:
    """Whether it is of a known kind, or has a text decoder that is."""
    return content.get("model_type") in _FAMILIES or isinstance(content.get("text_config"), dict)


def unplanned(content: Mapping[str, Any]) -> str | None:
    """What the model is, if it is no text decoder of equal layers with attention; else None."""
    kind = str(content.get("model_type"))
    built = content.get("architectures")
    if content.get("is_encoder_decoder") or content.get("add_cross_attention"):
        return "an encoder and a decoder"
    if kind in _ENCODERS:
        return "an encoder"
    if kind in _STATES:
        return "a model with states instead of attention"
    if content.get("image_size") is not None and content.get("patch_size") is not None:
        return "a model of images"
    if content.get("shared_expert_intermediate_size") or content.get("n_shared_experts"):
        return "it has experts that all tokens share"
    if content.get("mlp_only_layers") or content.get("decoder_sparse_step") not in (None, 1):
        return "some of its layers have no experts"
    if kind not in _FAMILIES and _one(content, "num_experts", "num_local_experts", "n_routed_experts"):
        return f"a mixture of experts unlike {', '.join(_MIXTURES)}"
    if isinstance(built, list) and any(_OTHER_HEAD.fullmatch(str(each)) for each in built):
        return f"{built[0]}, which gives out something else than the next token"
    return None


def _is_plain(content: Mapping[str, Any]) -> bool:
    """Whether its activation and rotary positions are among those of models/transformer.py."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
    return kind in ("default", "llama3") and content.get("hidden_act", "silu") == "silu"


def _windowed(content: Mapping[str, Any], family: _Family, layers: int, where: str) -> float:
    """The part of the layers that have the file's sliding window."""
    types = content.get("layer_types")
    if isinstance(types, list) and types:
        return types.count("sliding_attention") / len(types)
    if content["model_type"] not in _ASKED:
        every = _whole(content, "sliding_window_pattern", where, family.full_every)
        return (layers - layers // every) / layers if every else 1.0
    first = _whole(content, "max_window_layers", where, 28)  # layers without one
    return max(0, layers - first) / layers if _either(content, "use_sliding_window", where, False) else 0.0


def _whole(content: Mapping[str, Any], key: str, where: str, usual: int = 0) -> int:
    """The file's whole number; `usual` if absent or null. UserError."""
    value = usual if content.get(key) is None else content[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise UserError(f"{where}: {key} is {value!r}, not a whole number below {_MOST:.0e}")
    return value


def _either(content: Mapping[str, Any], key: str, where: str, usual: bool) -> bool:
    """The same for true and false."""
    value = usual if content.get(key) is None else content[key]
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}, not true or false")
    return value
