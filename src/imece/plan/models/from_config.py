"""The shape of a model from Hugging Face's config.json; no weights are read, and nothing of it is run.

Biases of queries, keys and values alone (Qwen 2) and norms of heads (Qwen 3) are too few numbers to count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.plan.models.model import Model, Norm

CONFIG = "config.json"
_WINDOW = "sliding_window"
_MOST = 10**12  # of layers, channels, heads ...


@dataclass(frozen=True)
class _Family:
    """How the models of a `model_type` differ from Llama."""

    layers: str = "num_hidden_layers"
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp_width: str = "intermediate_size"
    gated: bool = True
    norm: Norm = "rms"
    biases: bool = False
    tied: bool = False  # where the file does not say
    positions: str = ""  # the field with the rows of learned positions
    experts: str = ""  # the field with their number
    defaults: Mapping[str, int] = field(default_factory=dict)  # of fields that are left out, as transformers'
    windowed: float = 1.0  # part of the layers that have a sliding window, where the file does not list them


_GPT_2 = _Family(
    "n_layer", "n_embd", "n_head", "n_inner", gated=False, norm="layer", biases=True, tied=True,
    positions="n_positions",
)  # fmt: skip
_GEMMA_3 = _Family(
    tied=True, windowed=5 / 6,
    defaults={
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        _WINDOW: 4096,
    },
)  # fmt: skip
_FAMILIES = {
    **dict.fromkeys(("llama", "phi3", "olmo2"), _Family()),
    "qwen2": _Family(),
    "qwen3": _Family(defaults={"head_dim": 128}),
    "mistral": _Family(defaults={_WINDOW: 4096}),
    "smollm3": _Family(tied=True),
    "gemma": _Family(tied=True, defaults={"head_dim": 256}),
    "gemma2": _Family(tied=True, defaults={"head_dim": 256, _WINDOW: 4096}, windowed=1 / 2),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA_3),
    "gpt2": _GPT_2,
    "gpt_neox": _Family(gated=False, norm="layer", biases=True),
    "mixtral": _Family(experts="num_local_experts"),
    "qwen3_moe": _Family(mlp_width="moe_intermediate_size", experts="num_experts"),
    "olmoe": _Family(experts="num_experts"),
}  # fmt: skip
_ASKED = ("qwen2", "qwen3", "smollm3", "qwen3_moe")  # use their window only where use_sliding_window says so


def read_config(path: Path) -> Model:
    """From the file. UserError: it cannot be read, is of another kind of model, or misses fields."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a {CONFIG} of a model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON {type(content).__name__}, not an object: get the file again")
    return from_content(content, str(path), path.parent.name or path.stem)


def from_content(content: Mapping[str, Any], where: str, name: str) -> Model:
    """From what such a file holds. UserError as for `read_config`, which begins with `where`.

    Of a model that sees or hears too, what is planned for is its decoder of text, and the name says so.
    """
    if left_out := [
        sense for sense in ("vision", "audio") if isinstance(content.get(f"{sense}_config"), dict)
    ]:
        name += f" without {' and '.join(left_out)}"
    if isinstance(content.get("text_config"), dict):
        content = {"tie_word_embeddings": content.get("tie_word_embeddings")} | content["text_config"]
    kind = content.get("model_type")
    family = _FAMILIES.get(str(kind))
    if family is None:
        raise UserError(
            f"{where}: model_type is {kind!r}; there are {', '.join(_FAMILIES)}. "
            "file.py:function does for others"
        )
    content = {**family.defaults, **content}
    if content.get("shared_expert_intermediate_size") or content.get("n_shared_experts"):
        raise UserError(f"{where}: it has experts that all tokens share, which are not planned for")
    if content.get("mlp_only_layers") or content.get("decoder_sparse_step") not in (None, 1):
        raise UserError(f"{where}: some of its layers have no experts, which is not planned for")
    needed = [family.layers, family.width, family.heads, "vocab_size"]
    needed += [each for each in (family.positions, family.experts) if each]
    needed += ["num_experts_per_tok"] if family.experts else []
    needed += [family.mlp_width] if family.gated else []
    missing = [each for each in needed if content.get(each) is None]
    if missing:
        raise UserError(f"{where}: without {', '.join(missing)}, which a {kind} model needs: complete it")
    numbers = {each: _whole(content, each, where) for each in needed}
    width, heads = numbers[family.width], numbers[family.heads]
    window = _whole(content, _WINDOW, where, 0)
    try:
        return Model(
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
            biases=family.biases,
            norm=family.norm,
            experts=numbers[family.experts] if family.experts else 0,
            active_experts=numbers["num_experts_per_tok"] if family.experts else 0,
            window=window,
            windowed=_windowed(content, family, numbers[family.layers], where) if window else 0.0,
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}: get the file again") from error


def _windowed(content: Mapping[str, Any], family: _Family, layers: int, where: str) -> float:
    """The part of the layers that have the sliding window which the file tells of."""
    types = content.get("layer_types")
    if isinstance(types, list) and types:
        return types.count("sliding_attention") / len(types)
    if content["model_type"] not in _ASKED:
        return family.windowed
    first = _whole(content, "max_window_layers", where, 28)  # layers that have none
    return max(0, layers - first) / layers if _either(content, "use_sliding_window", where, False) else 0.0


def _whole(content: Mapping[str, Any], key: str, where: str, usual: int = 0) -> int:
    """The number that the file has there; `usual` where it has none, or null. UserError."""
    value = usual if content.get(key) is None else content[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise UserError(f"{where}: {key} is {value!r}, not a whole number below {_MOST:.0e}")
    return value


def _either(content: Mapping[str, Any], key: str, where: str, usual: bool) -> bool:
    """Likewise, of true and false."""
    value = usual if content.get(key) is None else content[key]
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}, not true or false")
    return value
