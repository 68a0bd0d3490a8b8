"""What different software keeps in memory: bytes per element, and what its backward needs of a layer.

Each switch is a fact from the named source or paper. Only `slack` is measured: what the allocator reserves
beyond what is in use, one number for all models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from imece.plan.setup import Precision, Stages

Selective = Literal["scores", "matrices"]


@dataclass(frozen=True)
class Framework:
    """The defaults are imece's: data_parallel/ and models/transformer.py."""

    name: str
    precision: Precision = field(default_factory=Precision)
    sums_as_masters: bool = True  # a shard of gradients is in the masters' dtype, whatever the buckets' is
    late_sums: bool = False  # these shards are freed when zeroed, and return while activations go
    sums_apart: bool = False  # offloaded ones of earlier micro-batches, beside the next one's; see memory.py
    masters_are_shards: bool = False  # zero3: the shards are the masters; parameters exist only gathered
    gathers: bool = True  # units of zero3; False: ranks share the parameters' memory
    units_at_once: int = 2  # gathered besides the root
    grown_units: int = 1  # units (or buckets) whose whole gradients exist at a time if gradients are sharded
    query_copies: int = 0  # of queries or attention's output, besides the one kept
    key_copies: int = 0  # of keys or values, besides the one kept
    gated_copies: int = 4  # of a gated MLP's width: gate, its activation, up, and their product
    norm_copies: int = 1  # of a norm's input
    gathered_inputs: bool = False  # with sequence parallelism: inputs of products are kept gathered
    logit_bytes: float | None = None  # per logit at the peak, from head to gradient; None:
    # the logit and its gradient in the activations' dtype, and a piece of them in fp32:
    logit_piece_bytes: int = 2**28
    part_logit_bytes: float | None = None  # as logit_bytes, where tensor ranks have parts of the vocabulary
    selective: Selective = "scores"  # what is recomputed
    stages: Stages = "dealt"
    outputs_stay: bool = False  # a stage keeps what it sent until the backward of it, as torch's stages do
    waiting: int = 0  # hidden states, not divided by tensor parallelism, that wait for the network
    workspace_bytes: int = 0  # of libraries, from the framework's allocator
    slack: float = 0.0  # reserved over in use, minus 1

    def __hash__(self) -> int:  # of one field only: instances are keys of caches
        return hash(self.name)

    def of_logits(self, count: float, precision: Precision, *, parts: int = 1) -> float:
        """Bytes of this many logits in that precision, one of so many parts of the vocabulary."""
        of_each = self.logit_bytes if parts == 1 else self.part_logit_bytes or self.logit_bytes
        if of_each is not None:
            return count * of_each
        return 2 * count * precision.activations + min(4 * count, self.logit_piece_bytes)


# Bytes per logit in F.cross_entropy of fp32 logits: itself, its log-softmax, and a gradient of either.
TORCH_LOSS_BYTES = 12.0
# The same under torch.distributed.tensor.parallel.loss_parallel, whose backward of both is one function: the
# log-softmax, what is added to its exponential, their sum, and that times the loss's own gradient.
_TORCH_PART_LOSS_BYTES = 16.0

# Cross-entropy of models/cross_entropy.py. While the gradients of one unit grow, those of the previous one
# are summed. model_parallel/: torch keeps the inputs of products, which are whole on each rank.
IMECE = Framework(
    "imece", late_sums=True, sums_apart=True, masters_are_shards=True, grown_units=2, gathered_inputs=True,
    outputs_stay=True,
)  # fmt: skip

# imece on the CPUs of one host, in fp32: zero3 leaves parameters in memory that the ranks share. RMSNorm
# there consists of several operations, which also keep the normalised input; attention's output is copied for
# its product.
IMECE_CPU = Framework(
    "imece-cpu", Precision(4, 4, 0, 0, 4, 4), sums_apart=True, gathers=False, query_copies=1, norm_copies=2,
    gathered_inputs=True, outputs_stay=True, logit_piece_bytes=2**20,
)  # fmt: skip

# Between several CPU hosts units are gathered. A CPU keeps what it would otherwise allocate or cast again.
IMECE_HOSTS = replace(IMECE, name="imece-hosts", late_sums=False, masters_are_shards=False)

# The papers' own counting: Rajbhandari et al. 2020, section 3.1 (K = 12); Korthikanti et al. 2022, section 4.
PAPER = Framework("paper", sums_as_masters=False, units_at_once=0, grown_units=0, stages="even")

# huggingface/nanotron. models/llama.py: queries are a slice of one copy of queries, keys and values, and
# flash attention gets another copy of keys and values; silu(gate) * up is not fused; bf16 logits are cast to
# fp32, and the sharded cross-entropy makes its softmax beside them. optim/gradient_accumulator.py: bf16
# gradients of a whole backward beside fp32 ones, masters in fp32. models/base.py: stages by cost. helpers.py:
# logs rank 0's memory, on the first stage. Collectives run on their own stream: see waiting.py; 48 hidden
# states and the slack were fitted on all 1B rows of ultrascale, and checked on 3B.
NANOTRON = Framework(
    "nanotron", Precision(2, 2, 4, 4, 4, 2), sums_as_masters=False, key_copies=2, logit_bytes=8.0,
    stages="by cost", waiting=48, slack=0.04,
)  # fmt: skip

# NVIDIA/Megatron-LM (training/theoretical_memory_usage.py: 18 bytes a parameter, 6 + 12/d with the
# distributed optimizer), with Transformer Engine's fused kernels. core/tensor_parallel/cross_entropy.py makes
# the softmax in place in the fp32 logits, beside those in bf16. Workspace: cuBLAS's and Transformer Engine's,
# i.e. what megatron_ci's gpt rows have allocated between steps beyond 18 or 6 + 12/d bytes.
MEGATRON = Framework(
    "megatron", Precision(2, 0, 4, 4, 4, 2), sums_as_masters=False, gated_copies=3, logit_bytes=6.0,
    stages="even", workspace_bytes=75 * 10**6,
)  # fmt: skip

# FSDP with fp32 parameters, as mosaicml/llm-foundry and pytorch/torchtitan use it: gathered in bf16, one unit
# ahead. llm-foundry's loss is flash-attention's fused cross-entropy on bf16 logits. torchtitan's selective
# recomputation keeps every second product and attention's output; its loss is F.cross_entropy of
# logits.float(), with tensor parallelism under loss_parallel.
LLM_FOUNDRY = Framework(
    "llm-foundry", Precision(2, 4, 0, 4, 4, 2), masters_are_shards=True, units_at_once=3, logit_bytes=4.0,
)  # fmt: skip
TORCHTITAN = Framework(
    "torchtitan", Precision(2, 4, 0, 4, 4, 2), masters_are_shards=True, units_at_once=3,
    logit_bytes=TORCH_LOSS_BYTES, part_logit_bytes=_TORCH_PART_LOSS_BYTES, selective="matrices", slack=0.087,
)  # fmt: skip
