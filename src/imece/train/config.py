"""What a run is: frozen dataclasses that are TOML file, command line and record in the run folder alike.

Each section checks itself and raises ValueError for values that cannot be; what depends on the number of
ranks is `train/batch.py`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import reprlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro

from imece.data.corpus import absolute_name
from imece.data.prepare import TextSource
from imece.errors import UserError
from imece.models.presets import preset
from imece.models.shape import TransformerConfig

Section = TypeVar("Section")

# All names of the strategies in data_parallel/strategy.py, ours first.
Strategy = Literal[
    "auto", "replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2",
    "ddp", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2",
]  # fmt: skip
Optimizer = Literal["muon", "adamw"]
Schedule = Literal["cosine", "wsd", "constant"]
Dtype = Literal["auto", "bf16", "fp32", "fp16"]
Offload = Literal["none", "optimizer", "parameters"]

_MOST = 2**63 - 1  # of whole numbers: tensors, files and TOML have no larger ones
_LEAST_EPS = 1e-37  # what is much less is 0 in float32, and the update of a gradient of 0 is then 0/0


_MOST_NAMED = 3  # of the values in which two runs differ, besides the first


def _also(*names: str) -> Any:
    return tyro.conf.arg(aliases=list(names))


_MOST_PARTS = 100_000
"""Of a model, one for each step: they are written down."""


def _least(name: str, value: float, least: float, unit: str = "", most: float | None = None) -> None:
    if most is None:
        most = _MOST if isinstance(value, int) else sys.float_info.max
    if not least <= value <= most:
        also = f", at most {most}{unit}" if value > most else ""
        raise ValueError(f"{name} is {reprlib.repr(value)}{unit}: at least {least}{unit}{also}")


@dataclass(frozen=True)
class ModelSection:
    """The shape of the model: a preset, and what is to be different in it."""

    preset: Annotated[str, _also("--model")] = "small"
    """tiny, small, medium, 1.3b, llama-8b, llama-70b or llama-405b."""
    layers: int | None = None
    """Blocks; none: as the preset says, here and below."""
    width: int | None = None
    """Channels of the residual."""
    heads: int | None = None
    """Heads of queries."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    mlp_width: int | None = None
    """Channels inside the MLP."""
    max_seq: int | None = None
    """Context, in tokens: also the length of the sequences it is trained on."""
    tied_head: bool | None = None
    """The embedding is the head too."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int:
                _least(f"model.{name}", value, 1)
        if self.max_seq == 1:
            raise ValueError("model.max_seq is 1: at least 2, for a token is learned from those before it")
        self.shape(preset(self.preset).vocab_size)

    def shape(self, vocab_size: int) -> TransformerConfig:
        """The model for a tokenizer of `vocab_size` entries. ValueError for a shape that cannot be."""
        own = dataclasses.asdict(self)
        changes = {name: value for name, value in own.items() if name != "preset" and value is not None}
        return dataclasses.replace(preset(self.preset), vocab_size=vocab_size, **changes)


@dataclass(frozen=True)
class DataSection:
    """The text, and how it becomes tokens."""

    paths: Annotated[tuple[str, ...], _also("--data")] = ()
    """Files, folders, globs (.txt .md .py .rst .jsonl .parquet), hf:NAME[:SPLIT]; none: Python's library."""
    field: str = "text"
    """Where the text is in a .jsonl or .parquet record."""
    tokenizer: str = "bpe"
    """bpe: trained on this text; bytes; or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """Entries of a tokenizer that is trained here."""
    held_out: float = 0.02
    """Share of the documents that is for validation only, chosen by their content."""
    folder: str = ""
    """Where the token files are kept; empty: in the run folder. Runs on the same text can share one."""

    def __post_init__(self) -> None:
        try:
            self.source()
        except ValueError as error:  # it begins with the field's name
            raise ValueError(f"data.{error}") from None

    def source(self) -> TextSource:
        """The same for the data room. What is held out does not depend on the run's seed."""
        return TextSource(self.paths, self.field, self.tokenizer, self.vocab_size, self.held_out)

    def absolute(self) -> DataSection:
        """With names that mean the same wherever a later command is started."""
        tokenizer, folder = (
            os.path.abspath(os.path.expanduser(each)) for each in (self.tokenizer, self.folder)
        )
        return dataclasses.replace(
            self,
            paths=tuple(map(absolute_name, self.paths)),
            tokenizer=self.tokenizer if self.tokenizer in ("bpe", "bytes") else tokenizer,
            folder=folder if self.folder else "",
        )


@dataclass(frozen=True)
class BatchSection:
    """The global batch: what all ranks together read for one step."""

    sequences: int = 16
    """Sequences a step, of all ranks together. More ranks share them; the step stays the same."""
    tokens: int = 0
    """The same in tokens, instead of sequences; 0: not used."""
    micro: int = 0
    """Sequences that one rank computes at once; 0: the most that divide its share, up to 8."""

    def __post_init__(self) -> None:
        _least("batch.sequences", self.sequences, 1)
        _least("batch.tokens", self.tokens, 0, " tokens")
        _least("batch.micro", self.micro, 0)


@dataclass(frozen=True)
class OptimizerSection:
    """What makes an update of a gradient."""

    kind: Optimizer = "muon"
    """muon: torch's Muon for the matrices of the blocks and AdamW for the rest; adamw: AdamW for all."""
    lr: float = 4e-3
    """The highest learning rate. adamw wants about a third of what muon does."""
    schedule: Schedule = "cosine"
    """cosine: down to min_lr at the last step; wsd: level, then down over the last fifth; constant."""
    warmup: int = 20
    """Steps over which the rate rises from 0."""
    min_lr: float = 0.1
    """Where it ends, as a share of lr."""
    weight_decay: float = 0.1
    """On matrices only: not on norms."""
    beta1: float = 0.9
    """AdamW: of the mean of gradients."""
    beta2: float = 0.95
    """AdamW: of the mean of their squares."""
    eps: float = 1e-8
    """AdamW: added to the root."""
    clip: float = 1.0
    """The longest gradient, as the norm over all parameters; 0: as long as it is."""

    def __post_init__(self) -> None:
        for name in ("lr", "warmup", "min_lr", "weight_decay", "clip"):
            _least(f"optimizer.{name}", getattr(self, name), 0)
        _least("optimizer.eps", self.eps, _LEAST_EPS)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}: at least 0 and less than 1")
        if self.min_lr > 1:
            raise ValueError(f"optimizer.min_lr is {self.min_lr}: a share of lr, so at most 1")


@dataclass(frozen=True)
class ComputeSection:
    """How a step is computed. The same run may be gone on with by other means."""

    dtype: Dtype = "auto"
    """Of products: auto is bf16 where the processor or GPU multiplies in it, else fp32. Weights stay fp32."""
    compile: bool = False
    """torch.compile for each block, before the first step: some ten seconds, which longer runs earn back."""
    recompute: bool = False
    """Keep only each block's input for backward: less memory, a third more work."""
    offload: Annotated[Offload, _also("--offload")] = "none"
    """On GPUs, what lies in the host's memory, whose CPUs make the update then. optimizer: masters, summed
    gradients and its state, up to 16 bytes a parameter in all; parameters: also each rank's part of them
    (zero3, hybrid). Slower, for what does not fit otherwise."""
    bad_steps: int = 5
    """So many steps in a row without a finite gradient end the run."""

    def __post_init__(self) -> None:
        _least("compute.bad_steps", self.bad_steps, 1)


@dataclass(frozen=True)
class ValidateSection:
    """Validation while it trains. At the end, all that is held out is read."""

    every: int = 50
    """Steps between two validations; 0: only at the end."""
    tokens: int = 32_768
    """Tokens a validation reads, spread over the held-out part; 0: all."""

    def __post_init__(self) -> None:
        _least("validate.every", self.every, 0)
        _least("validate.tokens", self.tokens, 0, " tokens")


@dataclass(frozen=True)
class CheckpointSection:
    """What is kept of the run."""

    every: int = 50
    """Steps between two saves; 0: only at the end and when it is stopped."""
    keep: int = 2
    """Newest ones that are kept, fewer on a full disk; the one with the lowest validation loss stays too."""

    def __post_init__(self) -> None:
        _least("checkpoint.every", self.every, 0)
        _least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class WatchSection:
    """What is watched between ranks while they train."""

    drift_every: int = 20
    """Steps in which all that several ranks hold of the model is compared once, a part a step; 0: never."""
    slow_ratio: float = 1.3
    """A rank is called slow when a phase takes it so many times as long as the others, without the time it
    waits, and 10 ms and 5 % of a step longer; 0: none is."""

    def __post_init__(self) -> None:
        _least("watch.drift_every", self.drift_every, 0, " steps", _MOST_PARTS)
        if self.slow_ratio:
            _least("watch.slow_ratio", self.slow_ratio, 1)


@dataclass(frozen=True)
class TrainConfig:
    """All of a run."""

    run: str = ""
    """The run folder; empty: runs/MODEL. If it holds a run, that one is gone on with."""
    ranks: int = 0
    """Processes that train together; 0: one for each GPU, or without any 2 (1 on a single core)."""
    steps: int = 250
    """Optimizer updates in all. A larger number makes a finished run longer."""
    strategy: Strategy = "auto"
    """What each rank holds: replicate (also ddp, NO_SHARD) all; zero1 a part of the optimizer's state; zero2
    (SHARD_GRAD_OP) of gradients too; zero3 (FULL_SHARD) of parameters too; hybrid, hybrid_zero2 such parts
    inside a host, with replicas between hosts. auto: what the planner finds fastest, where imece plan --here
    has measured this machine; else zero1 on one host and on GPUs, else replicate, or what fits."""
    seed: int = 1
    """Of the weights and of the order of documents."""
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    validate: ValidateSection = field(default_factory=ValidateSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    watch: WatchSection = field(default_factory=WatchSection)

    def __post_init__(self) -> None:
        _least("ranks", self.ranks, 0)
        _least("steps", self.steps, 1)
        if not 0 <= self.seed <= _MOST:
            raise ValueError(f"seed is {reprlib.repr(self.seed)}: from 0 to {_MOST}")

    @property
    def offload(self) -> Literal["optimizer", "parameters"] | None:
        """What lies in the host's memory."""
        return None if self.compute.offload == "none" else self.compute.offload

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(os.path.expanduser(self.run)) if self.run else Path("runs") / self.model.preset


# What may differ between the commands that go on with one run: nothing that changes what it computes, but
# the number of ranks and of steps. Gradients are averaged over tokens, so ranks only change the rounding.
MAY_CHANGE = frozenset(
    {
        "run",
        "ranks",
        "steps",
        "strategy",
        "batch.micro",
        "data.folder",
        "compute.compile",
        "compute.recompute",
        "compute.offload",
        "compute.bad_steps",
        "validate.every",
        "validate.tokens",
        "checkpoint.every",
        "checkpoint.keep",
        "watch.drift_every",
        "watch.slow_ratio",
    }
)


def flat(config: object, prefix: str = "") -> dict[str, Any]:
    """{"steps": 800, "model.preset": "small", ...}."""
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            values |= flat(value, f"{prefix}{each.name}.")
        else:
            values[prefix + each.name] = value
    return values


def check_same_run(before: TrainConfig, now: TrainConfig) -> None:
    """UserError if `now` would not go on with what `before` has begun."""
    old, new = (_computing(each) for each in (before, now))
    if names := [name for name in old if old[name] != new[name]]:
        options = "those options" if names[1:] else "that option"
        raise UserError(
            f"{now.folder} holds a run with {names[0]} = {_toml(old[names[0]])}, this command says "
            f"{_toml(new[names[0]])}{_more(names)}: name another folder with --run, or leave {options} out"
        )


def computed_with(config: TrainConfig) -> dict[str, Any]:
    """For a checkpoint's state: what `check_computed_with` compares. Where the text lies is no part of it."""
    return {name: value for name, value in _computing(config).items() if name != "data.paths"}


def check_computed_with(before: Mapping[str, Any], now: TrainConfig, where: Path) -> None:
    """UserError if the run's file was changed by hand since. before: of the checkpoint `where`; what it does
    not say, as an older version's, may be anything.
    """
    new = computed_with(now)
    if names := [name for name in new if name in before and before[name] != new[name]]:
        raise UserError(
            f"{where} was made with {names[0]} = {_toml(before[names[0]])}, the run's config.toml says "
            f"{_toml(new[names[0]])}{_more(names)}: put it back, or begin another run with --run"
        )


def _computing(config: TrainConfig) -> dict[str, Any]:
    values = flat(dataclasses.replace(config, data=config.data.absolute()))
    return {name: value for name, value in values.items() if name not in MAY_CHANGE}


def _more(names: Sequence[str]) -> str:
    """That the names after the first differ too."""
    named = ", ".join(names[1 : 1 + _MOST_NAMED])
    rest = f" and {len(names) - 1 - _MOST_NAMED} more" if len(names) > 1 + _MOST_NAMED else ""
    return f" ({named}{rest} differ{'s' * (len(names) == 2)} too)" if named else ""


def to_toml(config: TrainConfig) -> str:
    """The whole file, which `read_toml` reads back to an equal config. What is none is left out."""
    lines: list[str] = []
    sections = [each.name for each in dataclasses.fields(config) if _is_section(getattr(config, each.name))]
    for each in dataclasses.fields(config):
        if each.name not in sections:
            lines.append(f"{each.name} = {_toml(getattr(config, each.name))}")
    for name in sections:
        lines += ["", f"[{name}]"]
        values = flat(getattr(config, name))
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def read_toml(path: Path) -> TrainConfig:
    """The config in a file; what it does not say is as in TrainConfig().

    UserError, with the file's name, for one that cannot be read, is no TOML, or says what cannot be.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a TOML file, or none") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, too long a number, too deep a list
        raise UserError(
            f"{path}: not TOML ({error}); imece train --print-config shows a whole one"
        ) from error
    try:
        return _section(TrainConfig, content, "")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _section(kind: type[Section], content: Mapping[str, Any], prefix: str) -> Section:
    """A dataclass from a table. ValueError for an unknown key, with the nearest one, and for a wrong type."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(hints)}"
            raise ValueError(f"there is no {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{key} is a section, [{prefix}{key}], not a value")
            values[key] = _section(hints[key], value, f"{prefix}{key}.")
        else:
            values[key] = _value(hints[key], value, prefix + key)
    return kind(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    """`value` if a field of this type can hold it."""
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
    if choices:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: one of {', '.join(choices)}")
        return value
    if kind == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} is {value!r}: a list of strings")
        return tuple(items)
    allowed = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    wanted = allowed[0]
    if wanted is float and type(value) is int and abs(value) <= _MOST:
        return float(value)
    if type(value) is not wanted:
        words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ValueError(f"{name} is {value!r}: {words[wanted]}")
    return value


def _is_section(value: object) -> bool:
    return dataclasses.is_dataclass(value)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return "none"  # in messages only: a file leaves it out
    # JSON's strings, numbers and booleans are TOML's too; DEL alone must be escaped in the one only.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
