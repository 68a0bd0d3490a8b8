"""How a model is to be trained: the planner's question, and what its search varies.

`gpus` means every accelerator or CPU that a rank runs on: one rank each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from imece.footprint import Offload
from imece.plan.models.model import Model

Strategy = Literal["replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2"]
Recomputation = Literal["none", "selective", "full"]  # selective: the attention core, as Korthikanti et al.
Attention = Literal["flash", "plain"]  # plain keeps the T x T scores for backward
Optimizer = Literal["adamw", "adamw-8bit", "sgd", "muon"]
Adapters = Literal["none", "lora", "qlora"]
Schedule = Literal["1f1b", "gpipe"]
Wire = Literal["bf16", "int8"]
WIRE_BYTES: dict[Wire, float] = {"bf16": 2, "int8": 1 + 4 / 128}  # a number, with its part of a block's step
Stages = Literal[
    "dealt", "even", "by cost"
]  # of a pipeline: as imece deals layers, as Megatron-LM, as nanotron


@dataclass(frozen=True)
class Parallel:
    """The arrangement of the ranks. ranks = data x context x tensor x pipeline."""

    strategy: Strategy = "replicate"
    data: int = 1  # ranks that read different samples
    shard: int = 1  # of data x context, ranks over which states are sharded: all of them unless hybrid
    tensor: int = 1
    sequence: bool = True  # sequence parallelism with tensor parallelism
    context: int = 1  # ranks that share one sequence
    pipeline: int = 1
    interleave: int = 1  # model chunks per pipeline rank
    schedule: Schedule = "1f1b"
    expert: int = 1  # of data x context, ranks over which a layer's experts are distributed

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in ("hybrid", "hybrid_zero2")

    @property
    def ranks(self) -> int:
        return self.peers * self.tensor * self.pipeline

    @property
    def peers(self) -> int:
        """Ranks that have the same part of the model."""
        return self.data * self.context

    @property
    def token_parts(self) -> int:
        """Parts into which tokens are divided where no matrix is: by sequence parallelism."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class Precision:
    """Bytes per element."""

    parameters: int = 2  # as multiplied
    gradients: int = 2  # as backward makes and reduces them
    main_gradients: int = 0  # a second copy for summing; 0: none
    masters: int = 4  # what the optimizer steps, besides parameters; 0: it steps these
    moments: int = 4  # each state of the optimizer
    activations: int = 2
    fp8: bool = False  # products of the layers' matrices, as torchao.float8 makes them; the rest unchanged

    @property
    def autocast(self) -> bool:
        """Products have fewer bits than parameters, so every matrix and its input is cast."""
        return self.activations < self.parameters


FP32 = Precision(parameters=4, gradients=4, masters=0, activations=4)


@dataclass(frozen=True)
class Recipe:
    """How one step runs on each rank."""

    seq: int
    micro_batch: int = 1  # sequences
    accumulation: int = 1  # micro-batches per step
    recompute: Recomputation = "none"
    attention: Attention = "flash"
    optimizer: Optimizer = "adamw"
    adapters: Adapters = "none"
    adapter_rank: float = 16  # the average, if only some matrices have adapters
    offload: Offload | None = None  # in the host's memory: what the optimizer steps, or parameters too
    wire: Wire | None = (
        None  # what gradients are sent as, in hybrid strategies between hosts; None: as they are
    )
    precision: Precision = field(default_factory=Precision)
    compiled: bool = False  # torch.compile or hand-fused kernels: fewer passes over activations
    bucket_bytes: int = 25 * 2**20
    dropout: bool = False  # on outputs of attention and MLP, and on scores: masks are kept
    table_units: bool = False  # an embedding and a head that are not tied are gathered only while used
    accumulates_whole: bool = False  # in no_sync: sharded gradients stay whole until the last micro-batch


@dataclass(frozen=True)
class Setup:
    """One candidate: everything that memory and time depend on, except hardware."""

    model: Model
    parallel: Parallel
    recipe: Recipe

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.recipe.micro_batch * self.recipe.accumulation * self.parallel.data

    @property
    def tokens_a_step(self) -> int:
        return self.global_batch * self.recipe.seq
