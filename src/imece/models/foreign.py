"""Models of other kinds than `Transformer`: transformers builds and computes them, by their config.json.

Seen from outside they are like `Transformer`: the same calls, logits and options. They train on any number of
data-parallel ranks, whatever these shard. What divides a model of ours from within (its matrices, layers and
sequences) does not take them.

A parameter has the name that transformers gives it, behind "inner.". Parameters are on the meta device until
somebody gives them memory; buffers have theirs at once. Most are tables that a model computes for itself.
Files have the others, such as a factor of a layer: they are read and written like parameters, and no step
changes them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from imece.listing import some
from imece.models.experts import cast_experts, experts_of
from imece.models.stored import Piece, Shape, stored
from imece.reading import Json

INNER = "inner."
WITHOUT_LIMIT = 2**20  # positions of a model whose config.json names no limit
_SENSES = ("vision_config", "audio_config")
# Of these model_types, positions that begin anew with a document hide what stands before it
# (tests/models/test_foreign.py).
APART = frozenset({
    "apertus", "arcee", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "jetmoe", "llama", "minimax_m2", "ministral",
    "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip


class NotInstalledError(ValueError):
    """transformers is not installed."""


@dataclass(frozen=True)
class ForeignConfig:
    """What config.json says, and the numbers of the model that transformers builds from it."""

    content: str  # the file's content, as JSON
    vocab_size: int
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int
    head_width: int
    max_seq: int  # positions
    tied_head: bool
    windows: tuple[int | None, ...]  # by layer: positions that one attends to; None: all before it

    @classmethod
    def of(cls, content: Json) -> ForeignConfig:
        """ValueError, with the reason, if transformers builds no model that learns text from it."""
        text = json.dumps(content, sort_keys=True)
        _tensors(text)  # refuses those that are no parameters, or that files divide
        model = _built(text)
        config, table = model.config.get_text_config(), model.get_input_embeddings().weight
        if not getattr(config, "num_attention_heads", None):
            raise ValueError(f"{model.config.model_type} has no attention")
        heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
        window = getattr(config, "sliding_window", None)
        return cls(
            text,
            vocab_size=int(table.shape[0]),
            layers=layers,
            width=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_width=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            max_seq=int(getattr(config, "max_position_embeddings", None) or WITHOUT_LIMIT),
            tied_head=model.get_output_embeddings().weight is table,
            windows=tuple(int(window) if window and "sliding" in each else None for each in types),
        )

    @property
    def kind(self) -> str:
        """Its model_type."""
        return str(json.loads(self.content)["model_type"])

    @property
    def q_width(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_width

    @property
    def parameter_count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for shape in _tensors(self.content).shapes.values())

    @property
    def active_count(self) -> int:
        """Number of parameters that a token goes through: of a mixture's experts some."""
        experts, active = experts_of(self.built().config)
        stacks = (shape for shape in _tensors(self.content).shapes.values() if len(shape) == 3)
        idle = sum(math.prod(shape[1:]) for shape in stacks if shape[0] == experts) * (experts - active)
        return self.parameter_count - idle

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of all parameters, and of buffers that files have, by their names in `ForeignModel`."""
        return _tensors(self.content).shapes | _tensors(self.content).kept

    @property
    def balances(self) -> bool:
        """Whether routers learn to use all experts, by a loss of their own."""
        return bool(json.loads(self.content).get("output_router_logits"))

    @property
    def keeps_apart(self) -> bool:
        """Whether `ForeignModel` is known to keep the documents of a sequence apart."""
        return self.kind in APART

    def window_of(self, layer: int) -> int | None:
        """Positions that a position of this layer attends to; None: all before it."""
        return self.windows[layer]

    def forms(self, name: str) -> tuple[tuple[Piece, ...], ...]:
        """What files may have for `name`, one of `shapes`: tensors whose elements, one after the other, are
        its own. The first form is the one to write."""
        key, known, shape = name.removeprefix(INNER), _tensors(self.content), self.shapes[name]
        every = (known.stored[key], *((Piece(each, shape),) for each in (key, *known.tied.get(key, ()))))
        bare = (
            tuple(Piece(each.key.removeprefix(known.prefix), each.shape) for each in form) for form in every
        )
        return tuple(dict.fromkeys((*every, *bare)))

    def is_computed(self, key: str) -> bool:
        """Whether files may have a tensor of this name that is no parameter: a table that can be computed."""
        return _tensors(self.content).computed.search(key) is not None

    def built(self) -> Any:
        """The model of transformers, its parameters on the meta device."""
        return _built(self.content)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a model, and their names in files."""

    shapes: dict[str, Shape]  # of parameters
    kept: dict[str, Shape]  # of buffers in files
    stored: dict[str, tuple[Piece, ...]]  # what transformers writes for it
    tied: dict[str, tuple[str, ...]]  # a parameter's other names
    prefix: str  # of most names, which some files leave out
    computed: re.Pattern[str]  # names in files that are no parameters


class ForeignModel(nn.Module):
    """A model of transformers with the interface of `Transformer`, and without memory for parameters."""

    def __init__(self, config: ForeignConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = config.built()
        self.balance: Tensor | None = None
        """What the last forward for training adds to the loss of each token so that routers send tokens to
        all experts: only if config.json asks for it, as transformers does."""
        self._recomputes = False
        # transformers 5.24 gave it a new name.
        known = inspect.signature(type(self.inner).forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    @property
    def checkpoint_blocks(self) -> bool:
        """Whether to keep only the input of each block for backward, and recompute the rest there."""
        return self._recomputes

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, wanted: bool) -> None:
        if wanted != self._recomputes:
            called = "activation" if hasattr(self.inner, "activation_checkpointing_enable") else "gradient"
            more = ({"use_reentrant": False},) if wanted else ()
            getattr(self.inner, f"{called}_checkpointing_{'enable' if wanted else 'disable'}")(*more)
        self._recomputes = wanted

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: ForeignCache | None = None,
        last_only: bool = False,
        positions: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V], as of `Transformer.forward`.

        ValueError if tokens is not 2D, for more positions than max_seq, for `positions`, which only a model
        of ours takes, and for `begins` of another shape than tokens, with a cache, or if documents of this
        kind are not known to stay apart.
        """
        held = 0 if cache is None else cache.length
        if tokens.ndim != 2 or held + tokens.shape[1] > self.config.max_seq:
            raise ValueError(
                f"tokens has shape {list(tokens.shape)}, after {held} in a cache; it must be [batch, "
                f"positions], of at most {self.config.max_seq} positions"
            )
        if positions is not None:
            raise ValueError(f"positions for a {self.config.kind} of transformers, which takes none")
        more: dict[str, Any] = {"use_cache": False}
        if begins is not None:
            if begins.shape != tokens.shape or cache is not None or not self.config.keeps_apart:
                raise ValueError(
                    f"begins of shape {list(begins.shape)} for tokens of {list(tokens.shape)} and a model of "
                    f"the kind {self.config.kind}: the shapes must be equal, a cache is not possible, and "
                    "documents of this kind must be known to stay apart"
                )
            # Positions that begin anew hide what stands before them: transformers makes the masks.
            more["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device) - begins
        if cache is not None:
            more |= {self._cache_name: cache.kept, "use_cache": True}
        # A cache has no gradients of older tokens.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            found = self.inner(input_ids=tokens, **more)
        logits, balance = found.logits, getattr(found, "aux_loss", None)
        self.balance = (
            self._balance_weight * balance if self.training and isinstance(balance, Tensor) else None
        )
        return cast(Tensor, logits[:, -1:] if last_only else logits)

    @property
    def _balance_weight(self) -> float:
        names = ("router_aux_loss_coef", "aux_loss_coef")
        return float(next(getattr(self.inner, name) for name in names if hasattr(self.inner, name)))

    def new_cache(self, capacity: int) -> ForeignCache:
        """An empty cache for one sequence; it grows as needed."""
        return ForeignCache(self.inner.config)


class ForeignCache:
    """Keys and values of the positions that a model has seen. Setting `length` to 0 forgets them."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.length = 0

    @property
    def length(self) -> int:
        return int(self.kept.get_seq_length())

    @length.setter
    def length(self, positions: int) -> None:
        from transformers import DynamicCache

        assert positions == 0, positions
        self.kept = DynamicCache(config=self._config)


@functools.lru_cache(maxsize=4)
def _tensors(content: str) -> _Tensors:
    model = _built(content)
    named: dict[str, Tensor] = dict(model.named_parameters())
    names_of: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(each), []).append(name)
    buffers, in_files = dict(model.named_buffers()), model.state_dict().keys()
    kept = {name: each for name, each in buffers.items() if name in in_files}
    if wrong := [name for name, each in kept.items() if not each.is_floating_point()]:
        raise ValueError(f"files have {some(wrong, 2)}, of integers, which are not read here")
    ignored = [
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        r"rotary_emb\.",
        r"\.(attn|attention)\.(masked_)?bias$",
        *(f"{re.escape(name)}$" for name in buffers.keys() - kept.keys()),
    ]
    return _Tensors(
        shapes={INNER + name: tuple(each.shape) for name, each in named.items()},
        kept={INNER + name: tuple(each.shape) for name, each in kept.items()},
        stored=stored(model, named | kept),
        tied={
            name: tuple(other for other in names_of[id(each)] if other != name)
            for name, each in named.items()
        },
        prefix=f"{model.base_model_prefix}.",
        computed=re.compile("|".join(ignored)),
    )


def _built(content: str) -> Any:
    """The model of transformers, its parameters on the meta device. ValueError as from `ForeignConfig.of`."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotInstalledError from None

    said: Json = json.loads(content)
    kind = said.get("model_type")
    if any(isinstance(said.get(sense), dict) for sense in _SENSES):
        raise ValueError(f"{kind} also sees or hears, and would be trained on text alone")
    if said.get("is_encoder_decoder") or said.get("add_cross_attention"):
        raise ValueError(f"{kind} is an encoder and a decoder")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} knows no model_type {kind!r}")
    transformers.utils.logging.set_verbosity_error()  # its remarks on a file are for whoever wrote that
    said.pop("auto_map", None)  # a file may name code of its own; only transformers' is run
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(said)
        with _parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever a file makes its code raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"transformers builds no language model of it: {reason}") from error
    if kind not in APART and not all(getattr(config, key, True) for key in ("is_decoder", "causal")):
        raise ValueError(f"{kind} is an encoder: its tokens see those behind them")
    cast_experts(model)
    # Gemma 4's heads are wider in some layers: plans take the width of the others.
    model.config.get_text_config().allow_global_per_layer_attribute_access = True
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules get meanwhile have no memory. Buffers do, with the values that are computed for
    them; on the meta device they would lose these."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
