"""The shape of a model from Hugging Face's config.json; reads no weights and runs none of the model's code.

The shape has exactly the parameters of transformers' model for that file; models for which it cannot are
refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.plan.models.families import ASKED, FAMILIES, MIXTURES, WITHIN, Family, Switch
from imece.plan.models.fields import (
    DENSE_LAYERS,
    LATENT,
    POSITIONS,
    ROUTING,
    SHARED_WIDTH,
    WINDOW,
    number,
    one_of,
)
from imece.plan.models.model import Latent, Model
from imece.reading import json_object

CONFIG = "config.json"
_ENCODERS = (
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "longformer",
    "modernbert", "mpnet", "roberta", "xlm-roberta",
)  # fmt: skip
_STATES = ("bamba", "falcon_mamba", "jamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "zamba", "zamba2")
_BY_SIZE = "A size in place of the file (7B) stands for a decoder of so many parameters, shaped like Llama"
_OTHER_HEAD = re.compile(r".*For(Sequence|Token|Image)\w*|.*For\w*(Classification|Answering|MaskedLM)")


def read_config(path: Path) -> Model:
    """The model in the file. UserError if it cannot be read, is another kind of model, or lacks fields."""
    content = json_object(path, f"name a {CONFIG} of a model")
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
        content = tied | WITHIN.get(inner.get("model_type"), {}) | inner
    kind = content.get("model_type")
    if (reason := unplanned(content)) is not None:
        raise UserError(
            f"{where}: model_type is {kind!r}: {reason}; such models are not planned for. {_BY_SIZE}"
        )
    family = FAMILIES.get(str(kind))
    if kind is None:
        raise UserError(
            f"{where}: no model_type: it is not the {CONFIG} of a language model; name another file"
        )
    if family is None:
        raise UserError(
            f"{where}: model_type is {kind!r}; there are {', '.join(FAMILIES)}. "
            f"file.py:function does for other decoders. {_BY_SIZE}"
        )
    try:
        content = family.translated({**family.defaults, **content})
    except ValueError as error:
        raise UserError(f"{where}: {error}, which is not planned for") from error
    needed = [family.layers, family.width, family.heads, "vocab_size"]
    needed += [each for each in (family.positions, family.experts) if each]
    needed += [family.active] if family.experts else []
    needed += [family.dense_width] if content.get(DENSE_LAYERS) else []
    needed += [family.mlp_width] if family.gated else []
    missing = [each for each in needed if content.get(each) is None]
    if missing:
        raise UserError(f"{where}: without {', '.join(missing)}, which a {kind} model needs: complete it")
    try:
        return _shape(content, family, name)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}: get the file again") from error


def _shape(content: Mapping[str, Any], family: Family, name: str) -> Model:
    """The model of a content that has all fields that the family needs."""
    of, asks = functools.partial(number, content), functools.partial(_asked, content)
    layers, width, heads = of(family.layers), of(family.width), of(family.heads)
    if family.experts and not of(family.experts):
        raise ValueError(
            f"{family.experts} is 0, and a {content['model_type']} model has experts: at least 1"
        )
    window = of(WINDOW)
    model = Model(
        name,
        layers,
        width,
        heads,
        kv_heads=of("num_key_value_heads", heads),
        head_width=of("head_dim", width // max(1, heads)),
        mlp_width=of(family.mlp_width, 4 * width),
        gated=family.gated,
        vocab_size=of("vocab_size"),
        tied_head=asks("tie_word_embeddings", family.tied),
        learned_positions=of(family.positions) if family.positions else 0,
        biases=asks(family.mlp_biases),
        norm=family.norm,
        experts=of(family.experts) if family.experts else 0,
        active_experts=of(family.active) if family.experts else 0,
        shared_width=of(SHARED_WIDTH),
        routing=of(ROUTING),
        dense_layers=of(DENSE_LAYERS),
        dense_width=of(family.dense_width) if content.get(DENSE_LAYERS) else 0,
        latent=Latent(**content[LATENT]) if LATENT in content else None,
        window=window,
        windowed=_windowed(content, family, layers) if window else 0.0,
        norms=1 if asks(family.one_norm) else family.norms,
        fused_queries=family.fused_queries,
        fused_gate=family.fused_gate,
        head_norms=asks(family.head_norms) or asks(family.own_head_norms),
        made_for=of(POSITIONS),
        ours=family.ours and _is_plain(content),
    )
    return model.with_vectors(_vectors(model, family, asks), _others(model, family))


def _asked(content: Mapping[str, Any], switch: Switch, usual: bool = False) -> bool:
    """Whether the family has a feature, or the file asks for it; `usual` if that does not say. ValueError."""
    value = content.get(switch) if isinstance(switch, str) else switch
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{switch} is {value!r}, not true or false")
    return usual if value is None else value


def _vectors(model: Model, family: Family, asks: Callable[[Switch], bool]) -> int:
    """Elements of a layer's norms and biases."""
    query, key = model.q_width, model.kv_width
    found = model.norms * family.norm_vectors * model.width
    found += 2 * model.head_width if asks(family.head_norms) else 0
    found += query + key if asks(family.own_head_norms) else 0
    found += query + 2 * key if asks(family.query_biases) else 0
    if model.latent is not None:
        found += model.latent.queries + model.latent.keys  # norms
        found += model.latent.kept if asks(family.latent_biases) else 0
    found += model.width if asks(family.out_biases) else 0
    if asks(family.mlp_biases):
        found += (2 if model.gated else 1) * model.mlp_width + model.width
    return found


def _others(model: Model, family: Family) -> int:
    """Elements outside the layers, without tables and the positions that tokens use."""
    norms = 2 if family.table_norm else 1
    found = (norms * family.norm_vectors + family.unused_positions) * model.width
    return found + (model.vocab_size if family.head_biases else 0)


def fields_of(kind: str) -> dict[str, str]:
    """The names that files of this `model_type` have for the numbers of a shape."""
    family = FAMILIES[kind]
    return {
        "layers": family.layers, "width": family.width, "heads": family.heads, "mlp_width": family.mlp_width,
        "positions": family.positions or POSITIONS, "experts": family.experts, "window": WINDOW,
        "kv_heads": "num_key_value_heads", "head_width": "head_dim", "vocab_size": "vocab_size",
        "active_experts": family.active,
    }  # fmt: skip


def is_known(content: Mapping[str, Any]) -> bool:
    """Whether it is of a known kind, or has a text decoder that is."""
    return content.get("model_type") in FAMILIES or isinstance(content.get("text_config"), dict)


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
    if kind not in FAMILIES or not FAMILIES[kind].uneven:
        if one_of(content, "shared_expert_intermediate_size", "n_shared_experts"):
            return "it has experts that all tokens share"
        if content.get("mlp_only_layers") or content.get("decoder_sparse_step") not in (None, 1):
            return "some of its layers have no experts"
    if kind not in FAMILIES and one_of(content, "num_experts", "num_local_experts", "n_routed_experts"):
        return f"a mixture of experts unlike {', '.join(MIXTURES)}"
    if isinstance(built, list) and any(_OTHER_HEAD.fullmatch(str(each)) for each in built):
        return f"{built[0]}, which gives out something else than the next token"
    return None


def _is_plain(content: Mapping[str, Any]) -> bool:
    """Whether its activation and rotary positions are among those of models/transformer.py."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
    return kind in ("default", "llama3") and content.get("hidden_act", "silu") == "silu"


def _windowed(content: Mapping[str, Any], family: Family, layers: int) -> float:
    """The part of the layers that have the file's sliding window."""
    types = content.get("layer_types")
    if isinstance(types, list) and types:
        return types.count("sliding_attention") / len(types)
    if content["model_type"] not in ASKED:
        every = number(content, "sliding_window_pattern", family.full_every)
        return (layers - layers // every) / layers if every else 1.0
    first = number(content, "max_window_layers", 28)  # layers without one
    return max(0, layers - first) / layers if _asked(content, "use_sliding_window") else 0.0
