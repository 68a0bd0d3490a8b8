"""What a rank of the GPU tests does: train a tiny transformer, wrapped in some way, for some steps."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import imece
from imece.models.cross_entropy import cross_entropy
from imece.models.presets import preset
from imece.models.transformer import Transformer

Over = Literal["ranks", "tokens"]
STEPS = 4
_SEQ = 32


def new_model(device: str) -> Transformer:
    return Transformer(preset("tiny"), generator=torch.Generator().manual_seed(3)).to(device)


def batch(device: str, step: int, rank: int) -> torch.Tensor:
    """int64 [2, sequences, seq]: rank 0 has one sequence more than the others."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(256, (2, 2 + (rank == 0), _SEQ), generator=draw).to(device)


def train(
    model: nn.Module, optimizer: Optimizer, device: str, rank: int, steps: int = STEPS, *,
    over: Over = "ranks", accumulate: int = 1, clip: float = 0.0, first: int = 0,
) -> list[float]:  # fmt: skip
    """The loss of each step on this rank."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1 or not isinstance(model, imece.DistributedDataParallel)
            inputs, targets = batch(device, accumulate * step + micro, rank)
            with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
                loss = cross_entropy(model(inputs).float(), targets)
                weighed = model.weigh(loss, targets.numel()) if over == "tokens" else loss  # type: ignore[operator]
                weighed.backward()
        if clip:
            model.clip_grad_norm_(clip)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def beside_torch(device: str, backend: str | None) -> dict[str, Any]:
    """The same training in imece's wrapper, in torch's, and in none: losses, and parameters that differ."""
    mesh = imece.init(device=device, backend=backend)
    group = dist.new_group(backend="nccl" if backend is None and device == "cuda" else "gloo")
    losses, parameters = [], []
    for wrap in (
        lambda model: imece.DistributedDataParallel(model),
        lambda model: DistributedDataParallel(model, process_group=group),
        lambda model: model,
    ):
        model = new_model(device)
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
        losses.append(train(wrapped, optimizer, device, mesh.rank))
        parameters.append(torch.cat([each.detach().view(-1) for each in model.parameters()]).cpu())
    apart = [float((parameters[0] - other).abs().max()) for other in parameters[1:]]
    return {"losses": losses, "apart": apart, "backend": mesh.backend}


# Name -> (strategy, arguments of parallelize, bf16, arguments of train).
WAYS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "replicate": ("replicate", {}, False, {}),
    "zero1": ("zero1", {}, False, {}),
    "zero2": ("zero2", {"bucket_cap_mb": 0.05}, False, {}),
    "zero3": ("zero3", {}, False, {}),
    "zero3 kept": ("zero3", {"reshard_after_forward": False}, False, {}),
    "accumulated replicate": ("replicate", {"average": "tokens"}, False, {"over": "tokens", "accumulate": 2}),
    "accumulated zero1": ("zero1", {"average": "tokens"}, False, {"over": "tokens", "accumulate": 2}),
    "accumulated zero3": ("zero3", {"average": "tokens"}, False, {"over": "tokens", "accumulate": 2}),
    "wire replicate": ("replicate", {"wire": "bf16"}, False, {}),
    "wire zero1": ("zero1", {"wire": "bf16"}, False, {}),
    "wire zero2": ("zero2", {"wire": "bf16"}, False, {}),
    "bf16 zero1": ("zero1", {}, True, {}),
    "bf16 zero2": ("zero2", {}, True, {}),
    "bf16 zero3": ("zero3", {}, True, {}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "replicate": WAYS["replicate"],
    "hybrid": ("hybrid", {}, False, {}),
    "hybrid_zero2": ("hybrid_zero2", {}, False, {}),
    "wire hybrid": ("hybrid", {"wire": "bf16"}, False, {}),
}


def all_ways(device: str, hybrids: bool) -> dict[str, list[float]]:
    """By name, the losses, and behind them the length of the last parameters."""
    mesh = imece.init(device=device, backend="gloo")
    found = {}
    for name, (strategy, how, bf16, details) in (HYBRIDS if hybrids else WAYS).items():
        precision = imece.MixedPrecision(torch.bfloat16, torch.bfloat16) if bf16 else None
        with _own_stream(device):
            model = new_model(device)
            wrapped, optimizer = imece.parallelize(
                model, AdamW(model.parameters(), 1e-3), strategy, precision=precision, **how
            )
            losses = train(wrapped, optimizer, device, mesh.rank, clip=0.5, **details)
            state = wrapped.state_dict()
            length = sum(each.double().square().sum() for each in state.values()).sqrt()
            found[name] = [*losses, float(length)]
    return found


def _own_stream(device: str) -> contextlib.AbstractContextManager[Any]:
    """Not the default one, on which threads that know nothing of streams queue their work in order."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
