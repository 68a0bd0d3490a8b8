"""What the configuration of another program comes to here: for one's own script, and for `imece train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from imece.errors import UserError
from imece.foreign.reading import AUTO, Value

if TYPE_CHECKING:
    from torch import nn

Dtype = Literal["fp32", "bf16", "fp16"]
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What torch calls them."""
_SHARDED = ("zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer by torch's name, with what the file says of it, or its program takes where it is silent;
    None: as it is by default."""

    name: str
    lr: float | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class ScheduleSettings:
    """A learning rate that rises over `warmup` steps and stays, or falls as a cosine to `least` of itself."""

    kind: Literal["constant", "cosine"]
    warmup: int | None = None
    """None: as it is by default."""
    steps: int | None = None
    """All of them, for the cosine."""
    least: float | None = None


@dataclass(frozen=True)
class ScalerSettings:
    """Arguments of `imece.GradScaler`; None: as they are by default."""

    init_scale: float | None = None
    growth_interval: int | None = None


@dataclass(frozen=True)
class Settings:
    """The values of a file of DeepSpeed's or Accelerate's, in the words of imece.

    `arguments()` are those of `imece.parallelize`; `values` has all of the file, with what became of each.
    """

    file: str
    source: Literal["DeepSpeed", "Accelerate"]
    values: tuple[Value, ...]
    strategy: str = "replicate"
    dtype: Dtype = "fp32"
    """Of products, and under a sharded strategy of the parameters that forward uses."""
    reduce: Dtype | None = None
    """Of gradients while they are summed; None: that of the parameters."""
    offload: Literal["optimizer", "parameters"] | None = None
    unit_classes: tuple[str, ...] = ()
    """Names of the classes of modules that are gathered as one."""
    unit_elements: int | None = None
    """Or how many elements such a module has at least."""
    reshard_after_forward: bool = True
    micro_batch: int | None = None
    """Sequences, or other samples, that one rank computes at once."""
    accumulation: int | None = None
    """Micro-batches of one rank in a step."""
    global_batch: int | None = None
    """micro_batch * accumulation * ranks, as far as these are known."""
    clip: float | None = None
    """The longest gradient, as the norm over all parameters; 0 for any, None where the file does not say."""
    scaler: ScalerSettings | None = None
    """Of the loss in fp16, where the file says what it is."""
    optimizer: OptimizerSettings | None = None
    schedule: ScheduleSettings | None = None
    recompute: bool = False
    compile: bool = False
    ranks: int | None = None
    """Of all hosts together."""
    hosts: int = 1
    host_rank: int | None = None
    rendezvous: str | None = None
    """HOST:PORT."""

    @property
    def autos(self) -> tuple[str, ...]:
        """Names of the values that its Trainer fills in."""
        return tuple(each.name for each in self.values if each.value == AUTO)

    @property
    def is_sharded(self) -> bool:
        """Whether any rank holds a part only of anything."""
        return self.strategy in _SHARDED

    def arguments(self, model: nn.Module | None = None) -> dict[str, Any]:
        """For `imece.parallelize(model, optimizer, **arguments)`: strategy, precision, offload, units.

        model: needed where the file names classes of modules, which are looked for in it. UserError if it is
        not given then, or has no module of such a class.
        """
        import torch

        from imece.data_parallel.sharding.cast import MixedPrecision

        found: dict[str, Any] = {"strategy": self.strategy}
        if self.is_sharded and (self.dtype != "fp32" or self.reduce not in (None, "fp32")):
            param = None if self.dtype == "fp32" else getattr(torch, TORCH[self.dtype])
            found["precision"] = MixedPrecision(param, getattr(torch, TORCH[self.reduce or self.dtype]))
        elif not self.is_sharded and self.reduce == "bf16":
            found["wire"] = "bf16"
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
