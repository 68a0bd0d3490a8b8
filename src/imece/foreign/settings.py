"""The configuration of another program in imece's words, for a user's script and for `imece train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from imece.errors import UserError
from imece.foreign.reading import AUTO, Value

if TYPE_CHECKING:
    from torch import nn

Dtype = Literal["fp32", "bf16", "fp16"]
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of the dtypes."""


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer under torch's name, with the values of the file or its program's defaults; None: torch's
    default."""

    name: str
    lr: float | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class ScheduleSettings:
    """A learning rate that rises over `warmup` steps and then stays, or falls as a cosine or in a line to the
    share `least`."""

    kind: Literal["constant", "cosine", "linear"]
    warmup: int | None = None
    """None: the usual number."""
    steps: int | None = None
    """All steps, unless it stays."""
    least: float | None = None


@dataclass(frozen=True)
class ScalerSettings:
    """Arguments of `imece.GradScaler`; None: its default."""

    init_scale: float | None = None
    growth_interval: int | None = None


@dataclass(frozen=True)
class Settings:
    """The values of a file of DeepSpeed or Accelerate, in imece's words.

    `arguments()` are for `imece.parallelize`; `values` has every value of the file and what became of it.
    """

    file: str
    source: Literal["DeepSpeed", "Accelerate"]
    values: tuple[Value, ...]
    strategy: str = "replicate"
    dtype: Dtype = "fp32"
    """Dtype of products, and under a sharded strategy of the parameters that forward uses."""
    autocast: bool = False
    """Whether `dtype` is that of torch.autocast, and parameters stay as they are."""
    reduce: Dtype | None = None
    """Dtype of gradients while they are summed; None: that of the parameters."""
    quantised_gradients: bool = False
    """Whether gradients are sent in int8, whatever they are summed in."""
    offload: Literal["optimizer", "parameters"] | None = None
    unit_classes: tuple[str, ...] = ()
    """Classes of modules, by name, that are gathered as one unit."""
    unit_elements: int | None = None
    """Or the least number of elements of such a module."""
    reshard_after_forward: bool = True
    micro_batch: int | None = None
    """Samples (sequences, say) that one rank computes at once."""
    accumulation: int | None = None
    """Micro-batches per rank and step."""
    global_batch: int | None = None
    """micro_batch * accumulation * ranks, as far as these are known."""
    clip: float | None = None
    """Largest norm of the gradient over all parameters; 0: no limit, None: the file does not say."""
    scaler: ScalerSettings | None = None
    """The loss scaler of fp16, if the file describes it."""
    optimizer: OptimizerSettings | None = None
    schedule: ScheduleSettings | None = None
    recompute: bool = False
    compile: bool = False
    ranks: int | None = None
    """Ranks on all hosts together."""
    hosts: int = 1
    host_rank: int | None = None
    rendezvous: str | None = None
    """HOST:PORT."""
    visible_gpus: str | None = None
    """What CUDA_VISIBLE_DEVICES has to say, "" for none; None: what it says already."""

    @property
    def autos(self) -> tuple[str, ...]:
        """Names of the values that the Trainer fills in."""
        return tuple(each.name for each in self.values if each.value == AUTO)

    @property
    def is_sharded(self) -> bool:
        """Whether any rank holds only a part of anything."""
        return self.strategy != "replicate"

    @property
    def wire(self) -> Literal["bf16", "int8"] | None:
        """What gradients are sent as, if not as they are; whole ones in bf16 if they are summed in that."""
        if self.quantised_gradients:
            return "int8"
        return "bf16" if not self.is_sharded and self.reduce == "bf16" else None

    def arguments(self, model: nn.Module | None = None) -> dict[str, Any]:
        """For `imece.parallelize(model, optimizer, **arguments)`: strategy, precision, wire, offload, units.

        model: needed if the file names classes of modules, which are looked up in it. UserError if it is
        missing then, or has no module of such a class.
        """
        import torch

        from imece.data_parallel.sharding.cast import MixedPrecision

        found: dict[str, Any] = {"strategy": self.strategy}
        if self.is_sharded and (self.dtype != "fp32" or self.reduce not in (None, "fp32")):
            param = None if self.dtype == "fp32" or self.autocast else getattr(torch, TORCH[self.dtype])
            found["precision"] = MixedPrecision(param, getattr(torch, TORCH[self.reduce or self.dtype]))
        if self.wire is not None:
            found["wire"] = self.wire
        if self.offload is not None:
            found["offload"] = self.offload
        if self.strategy in ("zero3", "hybrid"):
            if self.unit_classes:
                found["units"] = self._classes_in(model)
            elif self.unit_elements is not None:
                found["units"] = self.unit_elements
            if not self.reshard_after_forward:
                found["reshard_after_forward"] = False
        return found

    def _classes_in(self, model: nn.Module | None) -> list[type[nn.Module]]:
        if model is None:
            names = ", ".join(self.unit_classes)
            raise UserError(f"{self.file} names the classes {names}: arguments(model) looks for them in it")
        there = {type(each).__name__: type(each) for each in model.modules()}
        absent = [name for name in self.unit_classes if name not in there]
        if absent:
            raise UserError(
                f"{self.file} wants units of the class {absent[0]}, and {type(model).__name__} has no such "
                f"module; it has {', '.join(sorted(there))}"
            )
        return [there[name] for name in self.unit_classes]
