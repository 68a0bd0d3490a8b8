"""Options of `imece plan`, and what they say in the planner's words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from imece.errors import UserError
from imece.footprint import Offload
from imece.plan.answer.space import RESERVE
from imece.plan.hardware import Gpu
from imece.plan.setup import FP32, Adapters, Optimizer, Precision, Recomputation, Strategy

StrategyName = Literal[
    "auto", "replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2",
    "ddp", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2",
]  # fmt: skip
PrecisionName = Literal["bf16", "fp16", "autocast", "fp32", "bf16-pure", "fp8"]

_STRATEGIES: dict[str, Strategy] = {
    "replicate": "replicate", "ddp": "replicate", "NO_SHARD": "replicate", "zero1": "zero1",
    "zero2": "zero2", "SHARD_GRAD_OP": "zero2", "zero3": "zero3", "FULL_SHARD": "zero3",
    "hybrid": "hybrid", "HYBRID_SHARD": "hybrid", "hybrid_zero2": "hybrid_zero2",
    "_HYBRID_SHARD_ZERO2": "hybrid_zero2",
}  # fmt: skip
_PRECISIONS = {
    "bf16": Precision(),
    "fp16": Precision(),
    "autocast": Precision(parameters=4, gradients=4, masters=0, moments=4, activations=2),
    "fp32": FP32,
    "bf16-pure": Precision(parameters=2, gradients=2, masters=0, moments=2, activations=2),
    "fp8": Precision(fp8=True),
}
_OF_OTHERS = ("hardware", "network", "hosts", "scale")  # of other machines than this one
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class PlanOptions:
    """Options of `imece plan`."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """A preset (llama-8b), a size (7B), a config.json of Hugging Face, or file.py:function that builds it."""
    gpus: str = ""
    """How many of which in a host: 8xH100. More than 8 are dealt to hosts of 8: 1024xH100."""
    hosts: int = 0
    """Hosts, each with so many GPUs; 0: as many as --gpus needs."""
    network: str | None = None
    """Between hosts: a preset, or the rate for each GPU in bits, 400Gb; none: as is usual with these GPUs."""
    hardware: Path | None = None
    """A TOML file with GPUs and links of your own, for --gpus to name."""
    global_batch: int = 0
    """Sequences of a step, of all GPUs together; 0: about a million tokens."""
    seq: int = 0
    """Tokens of a sequence; 0: 4,096, or as many as the model has positions for, where those are fewer."""
    strategy: StrategyName = "auto"
    """Only this one; auto: all are tried."""
    tensor: int | None = None
    """GPUs that compute each layer together; none, here and below: all numbers are tried."""
    pipeline: int | None = None
    """Stages to which the layers are dealt."""
    interleave: int | None = None
    """Parts of the model on each stage."""
    context: int | None = None
    """GPUs that share a sequence."""
    micro_batch: int | None = None
    """Sequences that a GPU computes at once."""
    recompute: Recomputation | None = None
    """What of the activations is computed again in backward instead of kept."""
    optimizer: Optimizer = "adamw"
    """adamw-8bit keeps its two moments in a byte each."""
    adapters: Adapters = "none"
    """lora: train thin matrices beside the frozen model; qlora: and keep the model in 4 bits."""
    adapter_rank: int = 16
    """Of LoRA's matrices."""
    #: In the host's memory. optimizer: masters, summed gradients and its state; parameters: each rank's part
    #: of the parameters too.
    offload: Offload | None = None
    #: none: bf16, or where that is not multiplied fp16, and on CPUs fp32. bf16 and fp16 have fp32 masters, 16
    #: bytes a parameter with AdamW; autocast: fp32 weights, products in bf16, as imece train does it; fp32;
    #: bf16-pure: no masters; fp8: bf16 with the layers' products in FP8 (torchao, with --compile).
    precision: PrecisionName | None = None
    attention: Literal["flash", "plain"] = "flash"
    """plain keeps all scores for backward."""
    compile: bool = False
    """With torch.compile."""
    reserve: float = RESERVE
    """Part of the memory that is to stay free: so far off is what is predicted of it."""
    tokens: str = "1B"
    """For how many time and price are told: 300M, 15T."""
    scale: Literal["weak", "strong"] | None = None
    """The same on ever more hosts: weak, with the batch growing along; strong, with the batch as it is."""
    here: bool = False
    """Plan for this machine, which is measured first (once: the figures are kept)."""
    again: bool = False
    """With --here: measure anew."""
    check: Path | None = None
    """A run folder: what was predicted of it beside what came."""
    top: int = 0
    """Also list so many of the ranking."""
    json: bool = False
    """Print JSON instead of text."""
    html: Path | None = None
    """Also write a page with pictures."""
    plot: Path | None = None
    """Also write a PNG: memory, step, and all plans by speed and memory."""

    def check_together(self) -> None:
        """UserError for options that would mean nothing beside the others."""
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if self.check is not None and (others := [name for name in given if name not in ("check", "json")]):
            names = ", ".join("MODEL" if name == "model" else _option(name) for name in others)
            raise UserError(f"--check {self.check} shows what was predicted of that run: leave out {names}")
        if self.again and not self.here:
            raise UserError("--again measures this machine anew, for --here: say that too")
        if "adapter_rank" in given and self.adapters == "none":
            raise UserError(f"--adapter-rank {self.adapter_rank} is of --adapters lora or qlora: say which")
        if self.here and (others := [name for name in _OF_OTHERS if name in given]):
            names = ", ".join(_option(name) for name in others)
            raise UserError(f"--here is one machine, measured: leave out {names}")

    @property
    def strategy_of_ours(self) -> Strategy | None:
        return _STRATEGIES.get(self.strategy)

    def precision_on(self, gpu: Gpu) -> PrecisionName:
        """What is asked for, or what is usual there. UserError for numbers that it does not multiply: a CPU
        emulates them, at a fraction of the rate for fp32."""
        names: list[PrecisionName] = ["bf16", "autocast", "bf16-pure"] if gpu.bf16 else []
        names += ["fp32"] if gpu.is_cpu else ["fp16", "fp32"]
        if self.precision is None:
            return names[0]
        if self.precision == "fp8":  # goes by the model too: answer/space.py
            return self.precision
        if self.precision not in names:
            numbers = "fp16" if self.precision == "fp16" else "bf16"
            raise UserError(
                f"--precision {self.precision}: {gpu.name} has no {numbers}: say {' or '.join(names)}"
            )
        return self.precision


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def precision_of(name: PrecisionName) -> Precision:
    """Its bytes of an element."""
    return _PRECISIONS[name]


def read_tokens(text: str) -> float:
    """ "1B" -> 1e9, "300M" -> 3e8. UserError for what is no number of them."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kKmMbBtT]?)", text.strip())
    amount = float(found[1]) * _TIMES[found[2].lower()] if found else 0.0
    if not 0 < amount < math.inf:
        raise UserError(f"--tokens {text}: a number like 300M, 1B or 15T")
    return amount
