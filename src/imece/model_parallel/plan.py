"""Decides which layers of a model are divided, and how: by the user's plan, or by the kind of model."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from imece.errors import UserError
from imece.listing import kind_of
from imece.model_parallel.layers import KINDS, OF_SEQUENCE, Kind, dims_of, wrong_with
from imece.models.transformer import Transformer

Plan = Mapping[str, str]

_BLOCKS: dict[str, Kind] = {
    "blocks.*.attention.q": "column",
    "blocks.*.attention.k": "column",
    "blocks.*.attention.v": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.attention.norm": "sequence",
    "blocks.*.mlp.norm": "sequence",
    "norm": "sequence",
}
_HEAD_NORMS: dict[str, Kind] = {"blocks.*.attention.q_norm": "heads", "blocks.*.attention.k_norm": "heads"}

# Names of layers that hold several matrices; query_key_value is GPT-NeoX's, ordered by heads.
_SEVERAL = re.compile("qkv|c_attn|in_proj|gate_up|up_gate")

# The names of Hugging Face's plans.
_STYLES: dict[str, Kind] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocab",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "heads",
}


def planned(
    model: nn.Module, plan: Plan | None, ranks: int, sequence: bool
) -> dict[str, tuple[nn.Module, Kind]]:
    """{name of a module: (module, how it is divided)}. UserError, with names and figures, for an impossible
    plan."""
    _refuse_adapters(model)
    if plan is not None and not isinstance(plan, Mapping):
        raise UserError(f"plan: {kind_of(plan)}, where names are to have kinds, as {{'*.up': 'column'}}")
    wanted = _found(model, ranks, sequence) if plan is None else plan
    chosen: dict[str, tuple[nn.Module, Kind]] = {}
    for pattern, kind in wanted.items():
        known = next((each for each in KINDS if each == kind), None)
        if known is None:
            raise UserError(f"plan: {pattern!r} is to be {kind!r}; there are {', '.join(KINDS)}")
        matched = [(name, each) for name, each in model.named_modules() if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"plan: no module of {type(model).__name__} is called {pattern!r}; it has "
                f"{_some_names(model)}"
            )
        if known in OF_SEQUENCE and not sequence:
            continue
        for name, module in matched:
            if (wrong := wrong_with(module, known)) is not None:
                raise UserError(f"plan: {name} is to be {known!r}, but this {type(module).__name__} {wrong}")
            if name in chosen and chosen[name][1] != known:
                raise UserError(f"plan: {name} is to be both {chosen[name][1]!r} and {known!r}")
            if plan is not None and known == "column" and _SEVERAL.search(name.rpartition(".")[2].lower()):
                warnings.warn(
                    f"plan: {name} is 'column', and by its name several matrices in one: each rank has the "
                    "next rows of it, which is right only if they are ordered by heads or channels; of "
                    "[queries; keys; values] or [gate; up] make several Linears",
                    stacklevel=3,
                )
            chosen[name] = module, known
    if not any(dims_of(kind) for _, kind in chosen.values()):
        raise UserError("plan: nothing is divided: name some modules as 'column', 'row' or 'vocab'")
    _check_sizes(chosen, ranks)
    _check_tied(model, chosen)
    return chosen


def _refuse_adapters(model: nn.Module) -> None:
    for name, each in model.named_modules():
        if isinstance(getattr(each, "base_layer", None), nn.Module):  # as peft wraps it
            whose = type(each).__module__.partition(".")[0]
            raise UserError(
                f"tensor_parallel: {name} has an adapter beside it ({whose}), and adapters do not go with "
                "divided matrices: merge them before (merge_and_unload()), or train them without "
                "tensor_parallel, under zero3 say, which shares out the base too"
            )


def _found(model: nn.Module, ranks: int, sequence: bool) -> Plan:
    if isinstance(model, Transformer):
        return _for_transformer(model, ranks)
    styles = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(styles, Mapping) or not styles:
        raise UserError(
            f"no plan is known for {kind_of(model)}: give tensor_parallel a plan, as "
            "{'*.up': 'column', '*.down': 'row'}"
        )
    if sequence:
        raise UserError(
            f"sequence=True: Hugging Face's plan for {type(model).__name__} says nothing of parts of the "
            "sequence; leave it out, or give a plan"
        )
    return _for_hugging_face(model, styles, ranks)


def _for_transformer(model: Transformer, ranks: int) -> dict[str, Kind]:
    config = model.config
    check_counts({"heads": config.heads, "kv_heads": config.kv_heads, "mlp_width": config.mlp_width}, ranks)
    found = dict(_BLOCKS)
    if config.head_norms:
        found |= _HEAD_NORMS
    if config.vocab_size % ranks == 0:
        found["embed"] = "vocab"
        return found if config.tied_head else found | {"head": "vocab"}
    if config.tied_head:
        raise UserError(
            f"vocab_size {config.vocab_size} cannot be divided among {ranks} ranks, and the embedding is the "
            f"head too: take {-(-config.vocab_size // ranks) * ranks}, whose last tokens are never used"
        )
    # Both layers are whole, so each rank has the same logits.
    return found | {"embed": "scatter", "head": "gather"}


def _for_hugging_face(model: nn.Module, styles: Mapping[str, Any], ranks: int) -> dict[str, Kind]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    check_counts({name: at for name in counts if (at := getattr(config, name, None)) is not None}, ranks)
    found: dict[str, Kind] = {}
    for pattern, style in styles.items():
        matched = [(name, each) for name, each in model.named_modules() if fnmatchcase(name, pattern)]
        if not matched:
            continue  # another variant of the model has it
        if style not in _STYLES:
            raise UserError(
                f"Hugging Face's plan for {type(model).__name__} has {pattern!r} as {style!r}, which is not "
                f"known here (but {', '.join(_STYLES)}): give a plan"
            )
        kind = _STYLES[style]
        if kind == "vocab" and any(each.weight.shape[0] % ranks for _, each in matched):
            continue  # an indivisible vocabulary stays whole, and so do layers tied to it
        found[pattern] = kind
    return found


def check_counts(counts: Mapping[str, int], ranks: int) -> None:
    """UserError for those of the named counts that `ranks` does not divide."""
    wrong = [f"{name} {count}" for name, count in counts.items() if count % ranks]
    if wrong:
        raise UserError(f"{' and '.join(wrong)} cannot be divided among the {ranks} ranks of the axis tensor")


def _check_sizes(chosen: Mapping[str, tuple[nn.Module, Kind]], ranks: int) -> None:
    for name, (module, kind) in chosen.items():
        for of, dim in dims_of(kind).items():
            parameter = getattr(module, of, None)
            if parameter is not None and parameter.shape[dim] % ranks:
                raise UserError(
                    f"{name}.{of} {list(parameter.shape)} is to be {kind!r}, but {parameter.shape[dim]} "
                    f"cannot be divided among the {ranks} ranks of the axis tensor"
                )


def _check_tied(model: nn.Module, chosen: Mapping[str, tuple[nn.Module, Kind]]) -> None:
    """UserError unless a tied parameter is divided in all of its places or in none."""
    places = defaultdict(list)
    for prefix, module in model.named_modules():
        kind = chosen[prefix][1] if prefix in chosen else None
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            dim = dims_of(kind).get(name.rpartition(".")[2]) if kind is not None else None
            places[id(parameter)].append((name, dim))
    for tied in places.values():
        if len({dim for _, dim in tied}) > 1:
            ways = [
                f"{name} {'stays whole' if dim is None else f'is divided along dim {dim}'}"
                for name, dim in tied
            ]
            raise UserError(f"plan: {' and '.join(ways)}, and they are one tied parameter: name both alike")


def _some_names(model: nn.Module, most: int = 5) -> str:
    names = [name for name, each in model.named_modules() if name and not list(each.children())]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(_evenly(names, most)) + more if names else "none but itself"


def _evenly(names: Sequence[str], most: int) -> Sequence[str]:
    return names if len(names) <= most else [names[at * len(names) // most] for at in range(most)]
