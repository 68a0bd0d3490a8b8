"""Makes the optimizers of a run, each with its own parameters."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, _muon

from imece.train.config import OptimizerSection
from imece.train.model.muon import Muon
from imece.train.model.precision import multiplies_bf16

_IN_BLOCK = re.compile(r"\.[0-9]+\.")  # in the names of parameters of one block among many


def make_optimizers(
    model: nn.Module, section: OptimizerSection, device: torch.device | None = None
) -> list[Optimizer]:
    """Every parameter is in exactly one optimizer. Weight decay applies to matrices, not to the scales of
    norms.

    model: a language model, or a pipeline rank's layers under the same names.
    adamw: AdamW (Loshchilov and Hutter 2019) for all. muon: Muon (Jordan et al. 2024) for the matrices of the
    blocks, its update scaled to AdamW's usual size (Liu et al. 2025), so that one learning rate serves both;
    AdamW for embedding, head and norms, which do not map channels to channels. On a processor that only
    emulates bf16, torch's Muon iterates as `orthogonalised` does, everywhere in this process.
    device: where they will step; by default where the parameters are.

    Groups may be empty: checkpoints of several stages identify groups by their position.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    inner = [each for name, each in trained.items() if _IN_BLOCK.search(name) and each.ndim == 2]
    parameters = list(trained.values())
    optimizers: list[Optimizer] = []
    if section.kind == "muon":
        if not multiplies_bf16(device if device is not None else parameters[0].device):
            _muon._zeropower_via_newtonschulz = orthogonalised
        muon = Muon(
            [{"params": inner}],
            lr=section.lr,
            weight_decay=section.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
        taken = set(inner)
        parameters = [each for each in parameters if each not in taken]
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    return [*optimizers, AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=True)]


def orthogonalised(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Approximately U V^T for grad = U S V^T, by Muon's iteration (Newton-Schulz, quintic), in fp32; same
    shape.

    torch's products are in bf16. A processor that only emulates bf16 takes nine times as long for them as in
    fp32, and five times for the whole step of a small model.
    """
    a, b, c = ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    wide = (grad.T if is_tall else grad).float()
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
