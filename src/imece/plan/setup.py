"""How a model is to be trained: what the planner is asked about, and what its search varies.

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


@dataclass(frozen=True)
class Parallel:
    """How the ranks are arranged. ranks = data x context x tensor x pipeline."""

    strategy: Strategy = "replicate"
    data: int = 1  # ranks that see different samples
    shard: int = 1  # of data x context, over how many a part is dealt: all of them but for hybrid
    tensor: int = 1
    sequence: bool = True  # sequence parallelism beside tensor parallelism
    context: int = 1  # ranks that share one sequence
    pipeline: int = 1
    interleave: int = 1  # model chunks a pipeline rank
    schedule: Schedule = "1f1b"
    expert: int = 1  # of data x context, over how many the experts of a layer are dealt

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline


@dataclass(frozen=True)
class Precision:
    """Bytes of an element."""

    parameters: int = 2  # as they are multiplied
    gradients: int = 2  # as backward makes them, and as they are reduced
    main_gradients: int = 0  # a second copy in which they are summed; 0: none
    masters: int = 4  # what the optimizer steps, besides the parameters; 0: it steps those
    moments: int = 4  # each of the optimizer's states
    activations: int = 2
    reduced: int | None = None  # on the wire; None: as `gradients`
    fp8: bool = False  # products of the layers' matrices, as torchao.float8 makes them; all else as it is

    @property
    def autocast(self) -> bool:
        """Products are in fewer bits than parameters: every matrix is cast, and what it reads."""
        return self.activations < self.parameters


FP32 = Precision(parameters=4, gradients=4, masters=0, activations=4)


@dataclass(frozen=True)
class Recipe:
    """How one step goes, on each rank."""

    seq: int
    micro_batch: int = 1  # sequences
    accumulation: int = 1  # micro-batches a step
    recompute: Recomputation = "none"
    attention: Attention = "flash"
    optimizer: Optimizer = "adamw"
    adapters: Adapters = "none"
    adapter_rank: int = 16
    offload: Offload | None = None  # in the host's memory: what the optimizer steps, or parameters too
    precision: Precision = field(default_factory=Precision)
    compiled: bool = False  # torch.compile or hand-fused kernels: fewer passes over activations
    bucket_bytes: int = 25 * 2**20
    dropout: bool = False  # of what attention and MLP add, and of scores: its masks are kept
    table_units: bool = False  # embedding and head, if not tied, are gathered for their own time alone
    accumulates_whole: bool = False  # in no_sync: sharded gradients are whole until the last micro-batch


@dataclass(frozen=True)
class Setup:
    """One candidate: everything that memory and time depend on but the hardware."""

    model: Model
    parallel: Parallel
    recipe: Recipe

    @property
    def global_batch(self) -> int:
        """Sequences a step."""
        return self.recipe.micro_batch * self.recipe.accumulation * self.parallel.data

    @property
    def tokens_a_step(self) -> int:
        return self.global_batch * self.recipe.seq
