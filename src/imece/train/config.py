"""The config of a run: frozen dataclasses that serve as TOML file, command line and record in the run folder.

Each section checks itself and raises ValueError for wrong values; checks that depend on the number of ranks
are in train/batch.py.
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
from imece.footprint import StrategyName
from imece.models.presets import preset
from imece.models.shape import TransformerConfig

Optimizer = Literal["muon", "adamw"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
Dtype = Literal["auto", "bf16", "fp32", "fp16"]
Offload = Literal["none", "optimizer", "parameters"]
Wire = Literal["none", "bf16", "int8"]
Accumulate = Literal["auto", "whole", "sharded"]
Quantize = Literal["none", "nf4"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]

# Default for trained weights, with AdamW, which trained most of them. A rate that suits random weights would
# make them forget.
TUNING_LR = 5e-5
ADAPTER_LR = 2e-4  # adapters start at zero, and the model beside them cannot forget
OF_MODEL = "model"  # the tokenizer of the model that the run begins from

MOST = 2**63 - 1  # of whole numbers: tensors, files and TOML hold none larger
_LEAST_EPS = 1e-37  # anything much smaller is 0 in float32, and an update from a gradient of 0 would be 0/0
_MOST_EPOCHS = 1_000_000
_MOST_PARTS = 100_000
"""Most parts in which drift is compared, one per step: all of them are listed in memory."""


def also(*names: str) -> Any:
    """Other names of an option."""
    return tyro.conf.arg(aliases=list(names))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _least(name: str, value: float, least: float, unit: str = "", most: float | None = None) -> None:
    if most is None:
        most = MOST if isinstance(value, int) else sys.float_info.max
    if not least <= value <= most:
        also = f", at most {most}{unit}" if value > most else ""
        raise ValueError(f"{name} is {reprlib.repr(value)}{unit}: at least {least}{unit}{also}")


@dataclass(frozen=True)
class ModelSection:
    """The model: a preset, and what differs from it; or a folder with a model."""

    preset: Annotated[str, also("--model")] = "small"
    """tiny, small, medium, 1.3b, llama-8b, llama-70b or llama-405b; empty only with --from."""
    weights: Annotated[str, also("--from")] = ""
    """Begin from the model and the tokenizer in this folder: in Hugging Face's format, a run of imece, or one
    of its checkpoints."""
    layers: int | None = None
    """Blocks. Default, here and below: as in the preset."""
    width: int | None = None
    """Channels of the residual, from block to block (hidden size)."""
    heads: int | None = None
    """Attention heads: those of queries."""
    kv_heads: int | None = None
    """Heads of keys and values; with fewer than those of queries, several queries share one."""
    mlp_width: int | None = None
    """Channels inside the MLP (intermediate size)."""
    #: Context in tokens, which is also the length of the training sequences. With --from only the latter;
    #: default then: 512, or the model's context if that is shorter.
    max_seq: int | None = None
    tied_head: bool | None = None
    """The embedding's weights are also the head's."""

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
        """The shape of the preset for a tokenizer of `vocab_size` entries. ValueError for an impossible
        shape."""
        return dataclasses.replace(preset(self.preset), vocab_size=vocab_size, **self._changes())

    @property
    def name(self) -> str:
        """The preset, or the folder's name."""
        return self.preset or os.path.basename(self.absolute().weights)

    def absolute(self) -> ModelSection:
        """The same with an absolute path, so that it is valid wherever a later command starts."""
        return dataclasses.replace(self, weights=_absolute(self.weights))

    def _changes(self) -> dict[str, Any]:
        own = dataclasses.asdict(self)
        return {
            name: value
            for name, value in own.items()
            if name not in ("preset", "weights") and value is not None
        }


@dataclass(frozen=True)
class DataSection(TextSource):
    """The text and its tokenizer."""

    paths: Annotated[tuple[str, ...], also("--data")] = ()
    separate: bool | None = None
    """Attention stays within a document or record, instead of crossing from one to the next in a sequence.
    Default: records are separate, texts are not."""
    folder: str = ""
    """Folder for the token files, which runs on the same text can share. Default: the run folder."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:  # its message begins with the field's name
            raise ValueError(f"data.{error}") from None

    @property
    def separates(self) -> bool:
        """Whether attention stays within a document."""
        return self.format != "text" if self.separate is None else self.separate

    def absolute(self) -> DataSection:
        """The same with absolute paths, so that they are valid wherever a later command starts, and with what
        else is usual by name."""
        is_path = self.tokenizer not in ("bpe", "bytes", OF_MODEL)
        return dataclasses.replace(
            self,
            paths=tuple(map(absolute_name, self.paths)),
            field=self.fields,
            separate=self.separates,
            validation=tuple(map(absolute_name, self.validation)),
            tokenizer=_absolute(self.tokenizer) if is_path else self.tokenizer,
            folder=_absolute(self.folder),
        )


@dataclass(frozen=True)
class BatchSection:
    """The global batch: what all ranks together read in one step."""

    sequences: int = 16
    """Sequences per step, of all ranks together. With more ranks each has fewer; the step stays the same."""
    tokens: int = 0
    """The same in tokens, instead of sequences; 0: not used."""
    micro: int = 0
    """Sequences that one rank computes at once; 0: the largest number up to 8 that divides its share."""

    def __post_init__(self) -> None:
        _least("batch.sequences", self.sequences, 1)
        _least("batch.tokens", self.tokens, 0, " tokens")
        _least("batch.micro", self.micro, 0)


@dataclass(frozen=True)
class OptimizerSection:
    """How gradients become updates."""

    #: muon: torch's Muon for the matrices of the blocks and AdamW for the rest; adamw: AdamW for all, the
    #: default with --from.
    kind: Optimizer = "muon"
    #: The highest learning rate. adamw needs about a third of muon's. With --from the default is 5e-5, with
    #: --lora.rank 2e-4.
    lr: float = 4e-3
    schedule: Schedule = "cosine"
    """cosine or linear: down to min_lr at the last step; wsd: level, then down over the last fifth;
    constant."""
    warmup: int = 20
    """Steps over which the rate rises from 0."""
    min_lr: float = 0.1
    """The rate at the end, as a share of lr."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms have none."""
    beta1: float = 0.9
    """AdamW: decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW: decay of the mean squared gradient."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean squared gradient."""
    clip: float = 1.0
    """Largest norm of the gradient over all parameters; larger ones are scaled down. 0: no limit."""

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
    """LoRA adapters: if there are any, only they are trained, and the model of --from stays as it is."""

    rank: int = 0
    """Train two matrices of this rank beside each matrix of the model, instead of the model; such as 16. 0:
    train the model."""
    alpha: int | None = None
    """Adapters' outputs are multiplied by alpha / rank. Default: twice the rank."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is dropped at random in training."""
    targets: tuple[str, ...] = ()
    """The matrices that get adapters, by their names or the ends of these: q v, or in a GPT-2 attn.c_proj.
    Default: all but the head."""
    quantize: Quantize = "none"
    """nf4: keep all matrices but the head in 4 bits (QLoRA), by bitsandbytes."""

    def __post_init__(self) -> None:
        _least("lora.rank", self.rank, 0)
        if self.alpha is not None:
            _least("lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is {self.dropout}: at least 0 and less than 1")
        if twice := [name for name in self.targets if self.targets.count(name) > 1]:
            raise ValueError(f"lora.targets has {twice[0]!r} twice: each at most once")

    @property
    def alpha_or_usual(self) -> int:
        """alpha; by default twice the rank."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True)
class MeshSection:
    """Ranks that work together on one batch. By default each rank has its own sequences."""

    context: int = 1
    """Ranks that divide the positions of each sequence, for long ones. Must divide the number of ranks."""
    tensor: int = 1
    """Ranks that divide the matrices, for large models. Must divide the number of ranks. Needs adamw."""
    sequence: bool = False
    """With --mesh.tensor: ranks also divide norms and the residual, by positions. Saves memory."""
    pipeline: int = 1
    """Ranks that divide the layers, one after the other. Must divide the number of ranks. Accumulated
    micro-batches go through them in turn, so a smaller --batch.micro lets them wait less."""
    schedule: PipelineSchedule = "1f1b"
    """With --mesh.pipeline. 1f1b: each backward as early as possible; gpipe: after all forwards, which needs
    more memory; interleaved: a rank has layers at two places of the model, and waits half as long."""

    def __post_init__(self) -> None:
        _least("mesh.pipeline", self.pipeline, 1)
        _least("mesh.context", self.context, 1)
        _least("mesh.tensor", self.tensor, 1)

    @property
    def size(self) -> int:
        """Ranks that work together on one batch."""
        return self.context * self.tensor * self.pipeline

    @property
    def chunks(self) -> int:
        """Stages of each rank of the pipeline."""
        return 2 if self.schedule == "interleaved" and self.pipeline > 1 else 1

    @property
    def deals(self) -> bool:
        """Whether a rank has only a part of the model."""
        return self.tensor * self.pipeline > 1


@dataclass(frozen=True)
class ComputeSection:
    """How a step is computed. A run may go on with other values, but for dtype."""

    dtype: Dtype = "auto"
    """Number format of products: auto is bf16 if the processor or GPU multiplies in it, else fp32; fp16 is
    for GPUs. Weights stay fp32."""
    compile: bool = False
    """Compile each block with torch.compile before the first step: takes some ten seconds, which longer runs
    earn back."""
    recompute: bool = False
    """Keep only each block's input for backward (activation checkpointing): less memory, a third more
    work."""
    #: On GPUs: what lies in the host's memory, whose CPUs then make the update. optimizer: masters, summed
    #: gradients and optimizer state, up to 16 bytes a parameter; parameters: also each rank's part of those
    #: (zero3, hybrid). Slower, but more fits.
    offload: Annotated[Offload, also("--offload")] = "none"
    wire: Wire = "none"
    """What gradients are sent as, between hosts or GPUs that a slow network joins: none: as they are; bf16:
    two bytes a number; int8: one. They are summed in fp32."""
    #: Where the gradients of accumulated micro-batches add up under zero2, zero3 and the hybrids. whole: on
    #: each rank, 4 bytes a parameter, and ranks sum them once a step; sharded: ranks sum those of each
    #: micro-batch into their parts. auto: whole if that is expected to fit. Otherwise they are always whole.
    accumulate: Annotated[Accumulate, also("--accumulate")] = "auto"
    bad_steps: int = 5
    """The run ends after this many steps in a row without a finite gradient."""

    def __post_init__(self) -> None:
        _least("compute.bad_steps", self.bad_steps, 1)


@dataclass(frozen=True)
class ValidateSection:
    """Validation during training. At the end the whole held-out part is read."""

    every: int = 50
    """Steps between two validations; 0: only at the end."""
    tokens: int = 32_768
    """Tokens per validation, spread over the held-out part, of each source equally many; 0: all."""
    patience: int = 0
    """End the run after this many validations in a row without a new lowest loss (early stopping), and keep
    the checkpoint of each new lowest one until there is a lower one. 0: never."""

    def __post_init__(self) -> None:
        _least("validate.every", self.every, 0)
        _least("validate.tokens", self.tokens, 0, " tokens")
        _least("validate.patience", self.patience, 0)
        if self.patience and not self.every:
            raise ValueError(
                f"validate.patience is {self.patience}, and validate.every 0, with which nothing is "
                "validated before the end: give one, such as 50"
            )


@dataclass(frozen=True)
class CheckpointSection:
    """Which checkpoints are made and kept."""

    every: int = 50
    """Steps between two saves; 0: only at the end, when the run is stopped, and by minutes."""
    minutes: float = 0.0
    """Also save when the last save is this many minutes ago; 0: not used."""
    keep: int = 2
    """Newest checkpoints to keep, fewer on a full disk; the one with the lowest validation loss is kept
    too."""

    def __post_init__(self) -> None:
        _least("checkpoint.every", self.every, 0)
        _least("checkpoint.minutes", self.minutes, 0)
        _least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class WatchSection:
    """What ranks compare with each other while they train."""

    drift_every: int = 20
    """Compare all that several ranks hold of the model once in this many steps, a part in each step; 0:
    never."""
    #: A rank is called slow if a phase takes it this many times as long as the others, waiting excluded, and
    #: also 10 ms and 5 % of a step longer; 0: never.
    slow_ratio: float = 1.3

    def __post_init__(self) -> None:
        _least("watch.drift_every", self.drift_every, 0, " steps", _MOST_PARTS)
        if self.slow_ratio:
            _least("watch.slow_ratio", self.slow_ratio, 1)


@dataclass(frozen=True)
class TrainConfig:
    """The whole config of a run."""

    run: str = ""
    """The run folder. Default: runs/ with the name of the model (runs/small) or of the --from folder. If it
    holds a run, that run goes on."""
    ranks: int = 0
    """Processes that train together; 0: one for each GPU, or without GPUs 2 (1 on a single core)."""
    steps: int = 250
    """Optimizer steps in all. A larger number makes a finished run go on."""
    epochs: float = 0.0
    """Instead of --steps: how many times to read the text, such as 3 or 0.5. 0: not used."""
    #: What each rank holds. replicate (also ddp, NO_SHARD): everything; zero1: a part of the optimizer's
    #: state; zero2 (SHARD_GRAD_OP): also of gradients; zero3 (fsdp, FULL_SHARD): also of parameters; hybrid,
    #: hybrid_zero2: parts within a host, replicas between hosts. auto: the fastest by the planner if imece
    #: plan --here has measured this machine; else zero1 on one host and on GPUs, otherwise replicate, or what
    #: fits.
    strategy: StrategyName = "auto"
    seed: int = 1
    """Seed of the weights and of the order of documents."""
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
        _least("epochs", self.epochs, 0, most=_MOST_EPOCHS)
        if not 0 <= self.seed <= MOST:
            raise ValueError(f"seed is {reprlib.repr(self.seed)}: from 0 to {MOST}")

    @property
    def offload(self) -> Literal["optimizer", "parameters"] | None:
        """What lies in the host's memory."""
        return None if self.compute.offload == "none" else self.compute.offload

    @property
    def wire(self) -> Literal["bf16", "int8"] | None:
        """What gradients are sent as, if not as they are."""
        return None if self.compute.wire == "none" else self.compute.wire

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(os.path.expanduser(self.run)) if self.run else Path("runs") / self.model.name

    def absolute(self) -> TrainConfig:
        """The same with absolute paths, so that they are valid wherever a later command starts."""
        return dataclasses.replace(self, model=self.model.absolute(), data=self.data.absolute())

    def check_origin(self) -> None:
        """UserError if it names two sources for its model or tokenizer."""
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
        if self.data.format == "chat" and not weights:
            raise UserError(
                "--data.format chat: the chat template is that of --from FOLDER, which is not given"
            )
        if tokenizer == OF_MODEL and not weights:
            raise UserError(f"--data.tokenizer {OF_MODEL}: that of --from FOLDER, which is not given")


def defaults(weights: str, rank: int) -> TrainConfig:
    """The defaults: for a model with random weights, or for one that begins from a folder's.

    rank: of adapters, if only they are trained.
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
