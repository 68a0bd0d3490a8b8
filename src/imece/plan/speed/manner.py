"""How a piece of software goes about a step: what it overlaps, what it fuses, what it costs the CPU.

Switches follow what the named sources and papers say of a software. Its costs are fitted on its tables, one
number for all rows of all models; docs/planner-accuracy.md tells on which rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Manner:
    """Switches and costs of one framework. What the CPU takes counts where the device is faster than it."""

    name: str
    layer_host_s: float = 1.5e-3  # to start a layer's forward and backward, without collectives
    collective_host_s: float = 60e-6  # to start one collective inside a layer
    spread_host_s: float = 0.0  # a layer and tensor rank, where ranks are on several hosts
    message_s: float = 0.0  # a message between stages takes so much longer, beside nothing
    step_s: float = 5e-3  # once a step: data, logging, clipping
    elementwise: float = 1.0  # bytes of element-wise work over those of one kernel for each operation
    flash: float = 1.0  # rate of its attention kernels over Gpu.flash
    products: float = 1.0  # rate of its matrix products over Gpu.sustained
    loss_bytes: float = 40.0  # read and written for each logit, from the head's output to its gradient
    optimizer_bytes: float = 46.0  # read and written for each parameter that a rank steps, AdamW in fp32
    contention: float = 0.0  # of communication hidden behind computation, how much is lost; inside a host
    overlap_gradients: bool = True  # reduced while backward runs
    overlap_gathers: bool = True  # parameters are gathered while the unit before computes
    overlap_tensor: bool = False  # in backward, collectives beside a column-split product's other product
    kept_units: int = 0  # of zero3: the last of forward, with which backward begins, and the root stay for it
    gathers_again: bool = False  # sequence parallelism gathers activations again in backward, to keep less
    stages_by_cost: bool = False  # a pipeline's last stage has fewer layers, for the head it has
    selective_products: float = (
        0.0  # of the products that selective recomputation repeats; 0: the core instead
    )
    gathers_fp8: bool = False  # parameters and activations that are multiplied in FP8 are gathered in it
    adds_in_products: bool = False  # gradients of micro-batches are summed by the product that makes them
    scatters_pieces: bool = False  # a pipeline sends 1/tensor of an activation, gathered inside the host

    def __hash__(self) -> int:  # of one field: a key of caches
        return hash(self.name)


# Ours: layers are not compiled, and what is overlapped competes, as in torchtitan's FSDP2. Of units, one is
# gathered ahead, but between hosts without GPUs two (data_parallel/reducing/way.py).
IMECE = Manner("imece", elementwise=1.5, contention=0.6, kept_units=1)

# huggingface/nanotron: optim/zero.py (parameters are gathered after the step, beside nothing),
# optim/gradient_accumulator.py (fp32 gradients in one buffer), parallel/tensor_parallel/functional.py
# (asynchronous column products, gathered again), scripts/scaling_benchmarks.py. With ZeRO-0 alone gradients
# are reduced in a hook of DDP, in buckets, with a pipeline and without (trainer.py); the measured steps show
# none of it hidden, so all are taken to go at once when backward is through. What its pipelines cost
# before they were repaired, and a layer on a slow network, is in plan/accuracy/nanotron.py.
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
    stages_by_cost=True,
)

# NVIDIA/Megatron-LM: softmax, bias and GELU, bias and dropout in one kernel each. By 2022 (Korthikanti
# et al.) its backward reduced activations beside the product of the weights, which also summed gradients.
MEGATRON_2021 = Manner("megatron-2021", overlap_gradients=False, scatters_pieces=True)
MEGATRON = Manner(
    "megatron", overlap_gradients=False, overlap_tensor=True, adds_in_products=True, scatters_pieces=True
)

# microsoft/Megatron-DeepSpeed of vTrain's runs.
MEGATRON_DEEPSPEED = Manner(
    "megatron-deepspeed", layer_host_s=2.5e-3, collective_host_s=34e-6, step_s=6e-3, overlap_gradients=False,
    overlap_tensor=True, adds_in_products=True,
)  # fmt: skip

# mosaicml/llm-foundry: FSDP; attention in Triton, which was slower than version 2 of flash attention.
LLM_FOUNDRY = Manner("llm-foundry", flash=0.55, contention=0.6)

# pytorch/torchtitan: FSDP2; its selective recomputation keeps attention and every second matrix product. What
# it multiplies in FP8 is cast before it is gathered: activations by torchao's float8_tensor_parallel.py,
# parameters by its fsdp_utils.py, which torchtitan's docs/float8.md switches on.
TORCHTITAN = Manner("torchtitan", elementwise=1.5, contention=0.6, selective_products=0.5, gathers_fp8=True)
