"""What a run is: frozen dataclasses that are TOML file, command line and record in the run folder alike.

Each section checks itself and raises ValueError for values that cannot be; what depends on the number of
ranks is `train/batch.py`'s.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from imece.data.prepare import TextSource
from imece.data.sources import absolute_name
from imece.errors import UserError
from imece.models.presets import preset
from imece.models.shape import TransformerConfig

# All names of the strategies in data_parallel/strategy.py, ours first.
Strategy = Literal[
    "auto", "replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2",
    "ddp", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2",
]  # fmt: skip
Optimizer = Literal["muon", "adamw"]
Schedule = Literal["cosine", "wsd", "constant"]
Dtype = Literal["auto", "bf16", "fp32", "fp16"]
Offload = Literal["none", "optimizer", "parameters"]
Quantize = Literal["none", "nf4"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]

# For weights that are trained already, by default: with AdamW, as most of them were. A rate that is good for
# random ones would make them forget.
TUNING_LR = 5e-5
ADAPTER_LR = 2e-4  # adapters begin with nothing, and what they stand beside does not forget
OF_MODEL = "model"  # the tokenizer that a model of others comes with
LINEAR = ("q", "k", "v", "out", "gate", "up", "down")  # the matrices of a block

MOST = 2**63 - 1  # of whole numbers: tensors, files and TOML have no larger ones
_LEAST_EPS = 1e-37  # what is much less is 0 in float32, and the update of a gradient of 0 is then 0/0


def _also(*names: str) -> Any:
    return tyro.conf.arg(aliases=list(names))


_MOST_PARTS = 100_000
"""Of a model, one for each step: they are written down."""


def _least(name: str, value: float, least: float, unit: str = "", most: float | None = None) -> None:
    if most is None:
        most = MOST if isinstance(value, int) else sys.float_info.max
    if not least <= value <= most:
        also = f", at most {most}{unit}" if value > most else ""
        raise ValueError(f"{name} is {reprlib.repr(value)}{unit}: at least {least}{unit}{also}")


@dataclass(frozen=True)
class ModelSection:
    """Where the model comes from: a preset, and what is to be different in it; or a folder that holds one."""

    preset: Annotated[str, _also("--model")] = "small"
    """tiny, small, medium, 1.3b, llama-8b, llama-70b or llama-405b; empty only with `weights`."""
    weights: Annotated[str, _also("--from")] = ""
    """Begin with the model and the tokenizer of this folder: Hugging Face's format, or a run of imece's."""
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
    #: Context, in tokens: also the length of the sequences it is trained on. With `weights` only that length;
    #: none: 512, or the model's context where that is shorter.
    max_seq: int | None = None
    tied_head: bool | None = None
    """The embedding is the head too."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int:
                _least(f"model.{name}", value, 1)
        if self.max_seq == 1:
            raise ValueError("model.max_seq is 1: at least 2, for a token is learned from those before it")
        if not self.weights:
            self.shape(preset(self.preset).vocab_size)
        elif changed := self._changes().keys() - {"max_seq"}:
            raise ValueError(
                f"model.{min(changed)} is given, and model.weights too, whose shape is what it is: "
                "leave one of them out"
            )

    def shape(self, vocab_size: int) -> TransformerConfig:
        """A preset's model for a tokenizer of `vocab_size` entries. ValueError for a shape that cannot be."""
        return dataclasses.replace(preset(self.preset), vocab_size=vocab_size, **self._changes())

    @property
    def name(self) -> str:
        """The preset, or what the folder is called."""
        return self.preset or os.path.basename(self.absolute().weights)

    def absolute(self) -> ModelSection:
        """With a name that means the same wherever a later command is started."""
        weights = os.path.abspath(os.path.expanduser(self.weights)) if self.weights else ""
        return dataclasses.replace(self, weights=weights)

    def _changes(self) -> dict[str, Any]:
        own = dataclasses.asdict(self)
        return {
            name: value
            for name, value in own.items()
            if name not in ("preset", "weights") and value is not None
        }


@dataclass(frozen=True)
class DataSection:
    """The text, and how it becomes tokens."""

    paths: Annotated[tuple[str, ...], _also("--data")] = ()
    """Files, folders, globs (.txt .md .py .rst .jsonl .parquet), hf:NAME[:SPLIT]; none: Python's library."""
    field: str = "text"
    """Where the text is in a .jsonl or .parquet record."""
    tokenizer: str = "bpe"
    """bpe: trained on this text; bytes; the path of a tokenizer.json; or model: that of model.weights."""
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
            tokenizer=self.tokenizer if self.tokenizer in ("bpe", "bytes", OF_MODEL) else tokenizer,
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

    #: muon: torch's Muon for the matrices of the blocks and AdamW for the rest; adamw: AdamW for all, the
    #: default with model.weights.
    kind: Optimizer = "muon"
    #: The highest learning rate. adamw wants about a third of what muon does. With model.weights the default
    #: is 5e-5.
    lr: float = 4e-3
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
class LoraSection:
    """Adapters, which are all that is trained then: the model of model.weights stays as it is."""

    rank: int = 0
    """Train two matrices of this rank beside each of the model's, and not the model; 0: all of the model."""
    alpha: int | None = None
    """What they give is multiplied by alpha / rank; none: by 2."""
    dropout: float = 0.0
    """Share of what they read that is left out at random in training."""
    targets: tuple[str, ...] = LINEAR
    """Beside which matrices of the blocks: q k v out gate up down."""
    quantize: Quantize = "none"
    """nf4: the matrices of the blocks are kept in 4 bits (QLoRA), by bitsandbytes."""

    def __post_init__(self) -> None:
        _least("lora.rank", self.rank, 0)
        if self.alpha is not None:
            _least("lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is {self.dropout}: at least 0 and less than 1")
        wrong = [name for name in self.targets if name not in LINEAR or self.targets.count(name) > 1]
        if wrong or not self.targets:
            said = f"has {wrong[0]!r}" + " twice" * (wrong[0] in LINEAR) if wrong else "is empty"
            raise ValueError(f"lora.targets {said}: each of {', '.join(LINEAR)} at most once")

    @property
    def alpha_or_usual(self) -> int:
        """Twice the rank, where nothing is said."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True)
class MeshSection:
    """How ranks work on the same batch together. Without, each has sequences of its own."""

    context: int = 1
    """Ranks that divide the positions of each sequence, for long ones: the number of ranks is a multiple."""
    tensor: int = 1
    """Ranks that divide the matrices of the model, for large ones: likewise. With --optimizer.kind adamw."""
    sequence: bool = False
    """With `tensor`: they divide norms and the residual too, by positions. Less memory."""
    pipeline: int = 1
    """Ranks to which the layers of the model are dealt, one after the other: likewise. What would be
    accumulated goes through them as micro-batches, so smaller --batch.micro lets them wait less."""
    schedule: PipelineSchedule = "1f1b"
    """With `pipeline`. 1f1b: a backward as soon as there can be one; gpipe: after all forwards, which takes
    more memory; interleaved: a rank has layers at two places of the model, and waits half as long."""

    def __post_init__(self) -> None:
        _least("mesh.pipeline", self.pipeline, 1)
        _least("mesh.context", self.context, 1)
        _least("mesh.tensor", self.tensor, 1)

    @property
    def size(self) -> int:
        """Ranks that work on one batch together."""
        return self.context * self.tensor * self.pipeline

    @property
    def chunks(self) -> int:
        """Stages that a rank of the pipeline has."""
        return 2 if self.schedule == "interleaved" and self.pipeline > 1 else 1

    @property
    def deals(self) -> bool:
        """Whether a rank has a part of the model only."""
        return self.tensor * self.pipeline > 1


@dataclass(frozen=True)
class ComputeSection:
    """How a step is computed. The same run may be gone on with by other means."""

    dtype: Dtype = "auto"
    """Of products: auto is bf16 where the processor or GPU multiplies in it, else fp32. Weights stay fp32."""
    compile: bool = False
    """torch.compile for each block, before the first step: some ten seconds, which longer runs earn back."""
    recompute: bool = False
    """Keep only each block's input for backward: less memory, a third more work."""
    #: On GPUs, what lies in the host's memory, whose CPUs make the update then. optimizer: masters, summed
    #: gradients and its state, up to 16 bytes a parameter in all; parameters: also each rank's part
    #: of them (zero3, hybrid). Slower, for what does not fit otherwise.
    offload: Annotated[Offload, _also("--offload")] = "none"
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
    #: A rank is called slow when a phase takes it so many times as long as the others, without the time it
    #: waits, and 10 ms and 5 % of a step longer; 0: none is.
    slow_ratio: float = 1.3

    def __post_init__(self) -> None:
        _least("watch.drift_every", self.drift_every, 0, " steps", _MOST_PARTS)
        if self.slow_ratio:
            _least("watch.slow_ratio", self.slow_ratio, 1)


@dataclass(frozen=True)
class TrainConfig:
    """All of a run."""

    run: str = ""
    """The run folder, by default runs/MODEL or runs/FOLDER's name. A run that it holds is gone on with."""
    ranks: int = 0
    """Processes that train together; 0: one for each GPU, or without any 2 (1 on a single core)."""
    steps: int = 250
    """Optimizer updates in all. A larger number makes a finished run longer."""
    #: What each rank holds: replicate (also ddp, NO_SHARD) all; zero1 a part of the optimizer's state;
    #: zero2 (SHARD_GRAD_OP) of gradients too; zero3 (FULL_SHARD) of parameters too; hybrid, hybrid_zero2
    #: such parts inside a host, with replicas between hosts. auto: what the planner finds fastest, where
    #: imece plan --here has measured this machine; else zero1 on one host and on GPUs, else replicate,
    #: or what fits.
    strategy: Strategy = "auto"
    seed: int = 1
    """Of the weights and of the order of documents."""
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    validate: ValidateSection = field(default_factory=ValidateSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    watch: WatchSection = field(default_factory=WatchSection)

    def __post_init__(self) -> None:
        _least("ranks", self.ranks, 0)
        _least("steps", self.steps, 1)
        if not 0 <= self.seed <= MOST:
            raise ValueError(f"seed is {reprlib.repr(self.seed)}: from 0 to {MOST}")

    @property
    def offload(self) -> Literal["optimizer", "parameters"] | None:
        """What lies in the host's memory."""
        return None if self.compute.offload == "none" else self.compute.offload

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(os.path.expanduser(self.run)) if self.run else Path("runs") / self.model.name

    def absolute(self) -> TrainConfig:
        """With names that mean the same wherever a later command is started."""
        return dataclasses.replace(self, model=self.model.absolute(), data=self.data.absolute())

    def check_origin(self) -> None:
        """UserError if it says twice where its model or tokenizer comes from."""
        weights, tokenizer = self.model.weights, self.data.tokenizer
        if weights and self.model.preset:
            raise UserError(
                f"--model {self.model.preset} and --from {weights}: a model is new or that of a folder: "
                "leave one of them out"
            )
        if weights and tokenizer != OF_MODEL:
            raise UserError(
                f"--data.tokenizer {tokenizer}: the model of --from {weights} knows its own tokens only: "
                "leave it out"
            )
        if tokenizer == OF_MODEL and not weights:
            raise UserError(f"--data.tokenizer {OF_MODEL}: that of --from FOLDER, which is not given")

    def check_adapters(self) -> None:
        """UserError if they are asked for with what does not go with them."""
        if not self.lora.rank:
            usual = flat(LoraSection())
            if given := [name for name, value in flat(self.lora).items() if value != usual[name]]:
                raise UserError(
                    f"--lora.{given[0]} without --lora.rank: name a rank, such as 16, or leave it out"
                )
            return
        asked = f"--lora.rank {self.lora.rank}"
        if not self.model.weights:
            raise UserError(
                f"{asked}: adapters stand beside a model that is trained already: name its folder with "
                "--from, or leave that option out"
            )
        if self.optimizer.kind != "adamw":
            raise UserError(
                f"{asked} and --optimizer.kind {self.optimizer.kind}: adapters are trained with adamw: leave "
                "one of them out"
            )


def defaults(weights: str, rank: int) -> TrainConfig:
    """What is not said: for a model of random weights, or one that begins with those of a folder.

    rank: of adapters, if they alone are to be trained.
    """
    if not weights:
        return TrainConfig()
    return TrainConfig(
        model=ModelSection(preset="", weights=weights),
        data=DataSection(tokenizer=OF_MODEL),
        optimizer=OptimizerSection(kind="adamw", lr=ADAPTER_LR if rank else TUNING_LR),
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
