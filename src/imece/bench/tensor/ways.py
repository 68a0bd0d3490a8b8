"""The ways of dividing one model's matrices, all on the same ranks and backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import imece
from imece.bench.reference_model import REFERENCE
from imece.mesh import Mesh
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

ALONE = "one rank"  # that rank has the whole model, and the others wait
WAYS = (ALONE, "imece", "imece, whole logits", "torch", "imece, sequence", "torch, sequence")


@dataclass(frozen=True)
class Way:
    """A model divided in one way, and its steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Callable[[Tensor, Tensor], Tensor]
    """Forward and backward of tokens and targets, int64 [batch, positions]; returns the loss."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step; returns the loss before it."""
        loss = self.run(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def shape(vocabulary: int) -> TransformerConfig:
    """The sizes of the reference GPT, as a model that can be divided by heads."""
    return TransformerConfig(
        vocab_size=vocabulary, layers=REFERENCE.layers, width=REFERENCE.width, heads=REFERENCE.heads,
        kv_heads=REFERENCE.heads, mlp_width=1024, max_seq=REFERENCE.length,
    )  # fmt: skip


def build(way: str, vocabulary: int, mesh: Mesh) -> Way:
    """Make the way, with the same weights in each. All ranks call this."""
    torch.manual_seed(0)
    model = Transformer(shape(vocabulary))
    sequence = way.endswith("sequence")
    if way.startswith("torch"):
        _divided_by_torch(model, mesh.device_mesh["tensor"], sequence)
    elif way != ALONE:
        imece.tensor_parallel(model, mesh, sequence=sequence, divided_logits=not way.endswith("whole logits"))

    def ours(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = imece.cross_entropy(model(tokens), targets)
        loss.backward()
        return loss.detach()

    def torchs(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return cast(DTensor, loss.detach()).full_tensor()

    return Way(model, _optimizer(model), torchs if way.startswith("torch") else ours)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Like `optimizer_of`, with a group for each class of tensor: fused, it takes no plain tensors and
    DTensors in one group."""
    groups: dict[type, list[nn.Parameter]] = {}
    for each in model.parameters():
        groups.setdefault(type(each.data), []).append(each)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=1e-3, fused=True)


def _divided_by_torch(model: nn.Module, axis: DeviceMesh, sequence: bool) -> None:
    """Divide what `imece.tensor_parallel` divides, by torch's `parallelize_module`; logits stay divided."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "norm": SequenceParallel() if sequence else _given_out_as(between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for part, wide, narrow in (("attention", ("q", "k", "v"), "out"), ("mlp", ("gate", "up"), "down")):
        # A DTensor, so that layers that share it sum their gradients before these travel.
        norm = SequenceParallel(use_local_output=False) if sequence else _given_out_as(between)
        plan[f"blocks.*.{part}.norm"] = norm
        plan |= {f"blocks.*.{part}.{name}": ColwiseParallel(input_layouts=Replicate()) for name in wide}
        plan[f"blocks.*.{part}.{narrow}"] = RowwiseParallel(output_layouts=between)
    parallelize_module(model, axis, plan)
    if sequence:  # gathered once for all of them
        for name, module in model.named_modules():
            if name.endswith((".attention.norm", ".mlp.norm")):
                module.register_forward_hook(_gathered)


def _given_out_as(placement: Any) -> ParallelStyle:
    return PrepareModuleOutput(
        output_layouts=(placement,), desired_output_layouts=(placement,), use_local_output=False
    )


def _gathered(module: nn.Module, args: Any, output: DTensor) -> Tensor:
    return output.redistribute(placements=[Replicate()])
