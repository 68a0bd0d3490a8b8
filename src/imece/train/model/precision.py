"""The number format of products; weights, gradients and the optimizer stay in fp32."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from imece.data_parallel.grad_scaler import GradScaler
from imece.errors import UserError
from imece.train.config import Dtype


@dataclass(frozen=True)
class Precision:
    """The dtype that autocast computes in, on one kind of device."""

    name: str  # bf16, fp32 or fp16
    device_type: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[self.name]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context for forward."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def scaler(self) -> GradScaler | None:
        """fp16's loss scaler, which keeps small gradients representable; None for bf16 and fp32."""
        return GradScaler(self.device_type) if self.name == "fp16" else None


def choose_precision(asked: Dtype, device: torch.device) -> Precision:
    """The precision that was asked for, or the fastest that trains as well as fp32. UserError for fp16 on a
    CPU."""
    if asked == "fp16" and device.type == "cpu":
        raise UserError("--compute.dtype fp16 needs a GPU: on a CPU take bf16 or fp32")
    name = asked if asked != "auto" else "bf16" if multiplies_bf16(device) else "fp32"
    return Precision(name, device.type)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bf16; if it only emulates that, bf16 is slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public names for these; if they are gone, fp32 is the safe answer.
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, ask, lambda: False)()) for ask in asks)
