"""The shape of a model from Hugging Face's config.json; reads no weights and runs none of the model's code.

The shape has exactly the parameters of transformers' model for that file; models for which it cannot are
refused.
"""

from __future__ import annotations

import functools
import json
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
    one_of,
)
from imece.plan.models.model import Latent, Model

CONFIG = "config.json"
_MOST = 10**12  # of layers, channels, heads and so on
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
    numbers = {each: _whole(content, each, where) for each in needed}
    if family.experts and not numbers[family.experts]:
        raise UserError(f"{where}: {family.experts} is 0, and a {kind} model has experts: at least 1")
    width, heads = numbers[family.width], numbers[family.heads]
    window = _whole(content, WINDOW, where, 0)
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
            active_experts=numbers[family.active] if family.experts else 0,
            shared_width=_whole(content, SHARED_WIDTH, where, 0),
            routing=_whole(content, ROUTING, where, 0),
            dense_layers=_whole(content, DENSE_LAYERS, where, 0),
            dense_width=numbers[family.dense_width] if content.get(DENSE_LAYERS) else 0,
            latent=Latent(**content[LATENT]) if LATENT in content else None,
            window=window,
            windowed=_windowed(content, family, numbers[family.layers], where) if window else 0.0,
            norms=1 if asks(family.one_norm) else family.norms,
            fused_queries=family.fused_queries,
            fused_gate=family.fused_gate,
            head_norms=asks(family.head_norms) or asks(family.own_head_norms),
            made_for=_whole(content, POSITIONS, where, 0),
            ours=family.ours and _is_plain(content),
        )
        return model.with_vectors(_vectors(model, family, asks), _others(model, family))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}: get the file again") from error


def _asked(content: Mapping[str, Any], where: str, switch: Switch) -> bool:
    """Whether the family has a feature, or the file asks for it. UserError as from `_either`."""
    return switch if isinstance(switch, bool) else _either(content, switch, where, False)


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


def _windowed(content: Mapping[str, Any], family: Family, layers: int, where: str) -> float:
    """The part of the layers that have the file's sliding window."""
    types = content.get("layer_types")
    if isinstance(types, list) and types:
        return types.count("sliding_attention") / len(types)
    if content["model_type"] not in ASKED:
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
