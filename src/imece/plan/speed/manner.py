"""How different software runs a step: what it overlaps, what it fuses, and its costs on the CPU.

Switches follow the named sources and papers. Costs are fitted on the software's own tables, one number for
all rows of all models; docs/planner-accuracy.md says on which rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from imece.plan.setup import Stages


@dataclass(frozen=True)
class Manner:
    """Switches and costs of one framework. CPU costs count where the device is faster than the CPU."""

    name: str
    layer_host_s: float = 1.5e-3  # to start a layer's forward and backward, without collectives
    collective_host_s: float = 60e-6  # to start one collective inside a layer
    spread_host_s: float = 0.0  # per layer and tensor rank, if ranks are on several hosts
    message_s: float = 0.0  # extra time of a message between stages, never hidden
    step_s: float = 5e-3  # once per step: data, logging, clipping
    elementwise: float = 1.0  # bytes of element-wise work relative to one kernel per operation
    flash: float = 1.0  # rate of its attention kernels relative to Gpu.flash
    loss_bytes: float = 40.0  # read and written per logit, from the head's output to its gradient
    optimizer_bytes: float = 46.0  # read and written per parameter that a rank steps, AdamW in fp32
    contention: float = 0.0  # of hidden communication's time, lost to computation; inside a host
    overlap_gradients: bool = True  # gradients are reduced while backward runs
    overlap_gathers: bool = True  # parameters are gathered while the previous unit computes
    overlap_tensor: bool = False  # in backward, collectives run beside a column-split product's other product
    kept_units: int = 0  # zero3: units that stay from forward for backward, besides the root
    gathers_again: bool = False  # sequence parallelism gathers activations again in backward, to save memory
    stages: Stages = "dealt"
    selective_products: float = (
        0.0  # share of products that selective recomputation repeats; 0: the core instead
    )
    gathers_fp8: bool = False  # parameters and activations multiplied in FP8 are gathered in FP8
    adds_in_products: bool = False  # gradients of micro-batches are summed by the product that makes them
    scatters_pieces: bool = False  # a pipeline sends 1/tensor of an activation, gathered inside the host

    def __hash__(self) -> int:  # of one field only: instances are keys of caches
        return hash(self.name)


# imece: layers are not compiled, and overlapped communication competes, as in torchtitan's FSDP2. One unit is
# gathered ahead, two between hosts without GPUs (buckets.py).
IMECE = Manner("imece", elementwise=1.5, contention=0.6, kept_units=1)

# huggingface/nanotron: optim/zero.py (parameters are gathered after the step, not hidden),
# optim/gradient_accumulator.py (fp32 gradients in one buffer), parallel/tensor_parallel/functional.py
# (asynchronous column products, gathered again), scripts/scaling_benchmarks.py. With ZeRO-0 gradients are
# reduced in buckets by a hook of DDP, with and without a pipeline (trainer.py); but the measured steps show
# none of it hidden, so all are assumed to leave after backward. The costs of its pipelines before their
# repair, and of a layer on a slow network, are in plan/accuracy/nanotron.py.
NANOTRON = Manner(
    "nanotron",
    layer_host_s=2.5e-3,
    collective_host_s=205e-6,
    step_s=20e-3,
    elementwise=1.5,
    loss_bytes=48.0,
    optimizer_bytes=30.0,
    overlap_gradients=False,
    overlap_gathers=False,
    overlap_tensor=True,
    gathers_again=True,
    stages="by cost",
)

# NVIDIA/Megatron-LM: softmax, bias and GELU, bias and dropout in one kernel each. By 2022 (Korthikanti et
# al.) its backward reduced activations beside the product of the weights, which also summed gradients.
MEGATRON_2021 = Manner("megatron-2021", overlap_gradients=False, scatters_pieces=True, stages="even")
MEGATRON = Manner(
    "megatron",
    overlap_gradients=False,
    overlap_tensor=True,
    adds_in_products=True,
    scatters_pieces=True,
    stages="even",
)

# microsoft/Megatron-DeepSpeed as vTrain ran it.
MEGATRON_DEEPSPEED = Manner(
    "megatron-deepspeed", layer_host_s=2.5e-3, collective_host_s=34e-6, step_s=6e-3, overlap_gradients=False,
    overlap_tensor=True, adds_in_products=True, stages="even",
)  # fmt: skip

# mosaicml/llm-foundry: FSDP; attention in Triton, slower than version 2 of flash attention.
LLM_FOUNDRY = Manner("llm-foundry", flash=0.55, contention=0.6)

# pytorch/torchtitan: FSDP2; its selective recomputation keeps attention and every second matrix product. FP8
# inputs are cast before they are gathered: activations by torchao's float8_tensor_parallel.py, parameters by
# its fsdp_utils.py, which torchtitan's docs/float8.md switches on.
TORCHTITAN = Manner("torchtitan", elementwise=1.5, contention=0.6, selective_products=0.5, gathers_fp8=True)
