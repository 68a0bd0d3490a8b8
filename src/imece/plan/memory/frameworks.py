"""What a piece of software keeps in memory: bytes of an element, and what its backward needs of a layer.

Each switch is a fact of the named source, or of the paper. `slack` alone is measured: what its allocator has
reserved over what is in use, one number for all models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from imece.plan.setup import Precision

Stages = Literal["even", "by cost"]
Selective = Literal["scores", "matrices"]


@dataclass(frozen=True)
class Framework:
    """The defaults are ours: data_parallel/ and models/transformer.py."""

    name: str
    precision: Precision = field(default_factory=Precision)
    sums_as_masters: bool = True  # a shard of gradients is in the masters' dtype, whatever the buckets are in
    late_sums: bool = False  # which are let go of when they are zeroed, and come when activations go
    masters_are_shards: bool = (
        False  # of zero3: what is sharded are the masters; parameters are only gathered
    )
    gathers: bool = True  # units of zero3; False: ranks have the parameters in common memory
    units_at_once: int = 2  # gathered besides the root
    grown_units: int = 1  # or buckets, whose whole gradients are there at a time, where those are sharded
    query_copies: int = 0  # of queries or of what attention gives out, besides those that it keeps
    key_copies: int = 0  # of keys or values likewise
    gated_copies: int = 4  # of a gated MLP's width: gate, its activation, up, and their product
    norm_copies: int = 1  # of a norm's input
    gathered_inputs: bool = False  # with sequence parallelism: what products read is kept gathered
    logit_bytes: float | None = None  # of each where most are alive, from the head to its gradient; None:
    # it and its gradient, in the dtype of activations, and a piece of them in fp32:
    logit_piece_bytes: int = 2**28
    selective: Selective = "scores"  # what is computed again
    stages: Stages = "even"
    waiting: int = 0  # hidden states, not divided by tensor parallelism, that wait for the network to let go
    workspace_bytes: int = 0  # of libraries, from the framework's allocator
    slack: float = 0.0  # reserved over in use, less 1

    def __hash__(self) -> int:  # of one field: a key of caches
        return hash(self.name)

    def of_logits(self, count: float, precision: Precision) -> float:
        """Bytes of so many in that precision."""
        if self.logit_bytes is not None:
            return count * self.logit_bytes
        return 2 * count * precision.activations + min(4 * count, self.logit_piece_bytes)


# Of a logit, in F.cross_entropy of fp32 logits: itself, its log-softmax, and a gradient of either at once.
TORCH_LOSS_BYTES = 12.0

# Cross-entropy of models/cross_entropy.py. While the gradients of one unit grow, those of the one before are
# summed. model_parallel/: torch keeps what a product reads, which is whole on each rank.
IMECE = Framework("imece", late_sums=True, masters_are_shards=True, grown_units=2, gathered_inputs=True)

# Ours on the CPUs of one host, in fp32: zero3 leaves parameters in memory that the ranks have in common.
# There RMSNorm is made of several operations, which keep what is normalised too, and what attention gives out
# is copied to be multiplied with.
IMECE_CPU = Framework(
    "imece-cpu", Precision(4, 4, 0, 0, 4, 4), gathers=False, query_copies=1, norm_copies=2,
    gathered_inputs=True, logit_piece_bytes=2**20,
)  # fmt: skip

# On those of several hosts units are gathered, and what a CPU would have to ask for again, or cast, is kept.
IMECE_HOSTS = replace(IMECE, name="imece-hosts", late_sums=False, masters_are_shards=False)

# The papers' own counting: Rajbhandari et al. 2020, section 3.1 (K = 12); Korthikanti et al. 2022, section 4.
PAPER = Framework("paper", sums_as_masters=False, units_at_once=0, grown_units=0)

# huggingface/nanotron. models/llama.py: queries are a slice of one copy of queries, keys and values, and
# flash attention gets another copy of keys and values; silu(gate) * up is not fused; bf16 logits are cast to
# fp32, and the sharded cross-entropy makes its softmax beside them. optim/gradient_accumulator.py: bf16
# gradients of a whole backward beside fp32 ones, masters in fp32. models/base.py: stages by cost. helpers.py:
# what is logged is rank 0's, of the first stage. Collectives run on a stream of their own: see waiting.py; 48
# hidden states and the slack were fitted on all 1B rows of ultrascale, and checked on 3B.
NANOTRON = Framework(
    "nanotron", Precision(2, 2, 4, 4, 4, 2), sums_as_masters=False, key_copies=2, logit_bytes=8.0,
    stages="by cost", waiting=48, slack=0.04,
)  # fmt: skip

# NVIDIA/Megatron-LM (training/theoretical_memory_usage.py: 18 bytes a parameter, 6 + 12/d with the
# distributed optimizer), with Transformer Engine's fused kernels. core/tensor_parallel/cross_entropy.py makes
# the softmax in the fp32 logits, in place, beside those in bf16. Workspace: of cuBLAS and Transformer Engine,
# what is allocated between steps of megatron_ci's gpt rows beyond their 18 or 6 + 12/d bytes.
MEGATRON = Framework(
    "megatron", Precision(2, 0, 4, 4, 4, 2), sums_as_masters=False, gated_copies=3, logit_bytes=6.0,
    workspace_bytes=75 * 10**6,
)  # fmt: skip

# microsoft/DeepSpeed: runtime/zero/stage_1_and_2.py and stage3.py: 2N + 18N/n and 18N/n.
DEEPSPEED = Framework(
    "deepspeed", Precision(2, 2, 4, 4, 4, 2), sums_as_masters=False, logit_bytes=TORCH_LOSS_BYTES
)  # fmt: skip

# FSDP with fp32 parameters, as mosaicml/llm-foundry and pytorch/torchtitan use it: gathered in bf16, one unit
# ahead. llm-foundry's loss is flash-attention's fused cross-entropy, on bf16 logits. torchtitan's selective
# recomputation keeps every second product and attention's output, and its loss is F.cross_entropy of
# logits.float().
LLM_FOUNDRY = Framework(
    "llm-foundry", Precision(2, 4, 0, 4, 4, 2), masters_are_shards=True, units_at_once=3, logit_bytes=4.0,
)  # fmt: skip
TORCHTITAN = Framework(
    "torchtitan", Precision(2, 4, 0, 4, 4, 2), masters_are_shards=True, units_at_once=3,
    logit_bytes=TORCH_LOSS_BYTES, selective="matrices", slack=0.05,
)  # fmt: skip
