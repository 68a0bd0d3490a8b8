"""Options of `imece plan`, and their translation into the planner's words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from imece.errors import UserError
from imece.footprint import Offload, StrategyName
from imece.plan.answer.space import RESERVE, STRATEGIES
from imece.plan.answer.words import ALSO
from imece.plan.hardware import Gpu
from imece.plan.setup import FP32, Adapters, Optimizer, Precision, Recomputation, Strategy, Wire

PrecisionName = Literal["bf16", "fp16", "autocast", "fp32", "bf16-pure", "fp8"]

_STRATEGIES: dict[str, Strategy] = {
    **{name: name for name in STRATEGIES}, **{also: name for name, also in ALSO.items()},
    "ddp": "replicate", "fsdp": "zero3",
}  # fmt: skip
_PRECISIONS = {
    "bf16": Precision(),
    "fp16": Precision(),
    "autocast": Precision(parameters=4, gradients=4, masters=0, moments=4, activations=2),
    "fp32": FP32,
    "bf16-pure": Precision(parameters=2, gradients=2, masters=0, moments=2, activations=2),
    "fp8": Precision(fp8=True),
}
_OF_OTHERS = ("hardware", "network", "hosts", "scale")  # they describe another machine than this one
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class PlanOptions:
    """Options of `imece plan`."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """A published model (llama-8b, Qwen/Qwen2.5-7B; a wrong name lists all), a size (7B), a config.json of
    Hugging Face, or file.py:function that builds the model."""
    gpus: str = ""
    """GPUs, as number x kind: 8xH100. More than 8 are spread over hosts of 8: 1024xH100. Needed,
    unless --here or --check says which."""
    hosts: int = 0
    """Number of hosts, each with the GPUs of --gpus. 0: as many as --gpus needs."""
    network: str | None = None
    """Network between hosts: a preset, or bits per second for each GPU (400Gb). Default: what is usual with
    these GPUs."""
    hardware: Path | None = None
    """A TOML file that describes your own GPUs and links, for --gpus and --network to name."""
    global_batch: int = 0
    """Sequences per step, of all GPUs together. 0: about a million tokens."""
    seq: int = 0
    """Tokens per sequence. 0: 4,096, or fewer if the model has fewer positions."""
    strategy: StrategyName = "auto"
    """Try only this strategy; auto: all of them."""
    tensor: int | None = None
    """GPUs that compute each layer together. Default, here and in the next five: all are tried."""
    pipeline: int | None = None
    """Stages among which the layers are divided."""
    interleave: int | None = None
    """Parts of the model on each stage."""
    context: int | None = None
    """GPUs that share a sequence."""
    micro_batch: int | None = None
    """Sequences that a GPU computes at once."""
    recompute: Recomputation | None = None
    """Which activations are computed again in backward instead of kept."""
    optimizer: Optimizer = "adamw"
    """adamw-8bit keeps each of its two moments in one byte."""
    adapters: Adapters = "none"
    """lora: train thin matrices beside the frozen model; qlora: keep the frozen model in 4 bits as well."""
    adapter_rank: int = 16
    """Rank of LoRA's matrices."""
    #: What lies in the host's memory. optimizer: masters, summed gradients and optimizer state; parameters:
    #: also each rank's part of the parameters. Default: nothing.
    offload: Offload | None = None
    #: Number format. bf16 and fp16 have fp32 masters, 16 bytes a parameter with AdamW; autocast: fp32
    #: weights, products in bf16, as imece train does it; fp32; bf16-pure: no masters; fp8: bf16 with the
    #: layers' products in FP8 (torchao, with --compile). Default: bf16, fp16 on GPUs without bf16, fp32 on
    #: CPUs.
    precision: PrecisionName | None = None
    #: What gradients are sent as: two bytes a number, or one. In hybrid strategies between hosts. Default: as
    #: they are.
    wire: Wire | None = None
    attention: Literal["flash", "plain"] = "flash"
    """plain keeps all scores for backward."""
    compile: bool = False
    """Assume torch.compile."""
    reserve: float = RESERVE
    """Part of the memory that must stay free, because the prediction may be off by as much."""
    tokens: str = "1B"
    """Tokens of the whole training, for its time and price: 300M, 15T."""
    scale: Literal["weak", "strong"] | None = None
    """Also answer for ever more hosts. weak: the batch grows along; strong: the batch stays as it is."""
    here: bool = False
    """Plan for this machine. It is measured first, once, and the figures are kept."""
    again: bool = False
    """With --here: measure again."""
    check: Path | None = None
    """A run folder: compare its prediction with what was measured."""
    top: int = 0
    """Also list this many plans of the ranking."""
    json: bool = False
    """Print JSON instead of text."""
    html: Path | None = None
    """Also write a page with pictures to this file."""
    plot: Path | None = None
    """Also draw memory, one step, and all plans by speed and memory to this PNG file."""

    def check_together(self) -> None:
        """UserError for options that contradict each other or mean nothing together."""
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
        """The strategy by imece's name; None: auto."""
        return _STRATEGIES.get(self.strategy)

    def precision_on(self, gpu: Gpu) -> PrecisionName:
        """The precision that is asked for, or the usual one. UserError if the hardware lacks it: a CPU only
        emulates it, at a fraction of its rate in fp32."""
        names: list[PrecisionName] = ["bf16", "autocast", "bf16-pure"] if gpu.bf16 else []
        names += ["fp32"] if gpu.is_cpu else ["fp16", "fp32"]
        if self.precision is None:
            return names[0]
        if self.precision == "fp8":  # depends on the model too: answer/space.py
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
    """The bytes of its elements."""
    return _PRECISIONS[name]


def read_tokens(text: str) -> float:
    """ "1B" -> 1e9, "300M" -> 3e8. UserError for anything else."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kKmMbBtT]?)", text.strip())
    amount = float(found[1]) * _TIMES[found[2].lower()] if found else 0.0
    if not 0 < amount < math.inf:
        raise UserError(f"--tokens {text}: a number like 300M, 1B or 15T")
    return amount
