"""Makes the optimizers of a run, each with its own parameters."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.optim import AdamW, Optimizer, _muon

from imece.train.config import OptimizerSection
from imece.train.model.muon import Muon, orthogonalised
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
    emulates bf16, torch's Muon iterates in fp32 (`orthogonalised`), everywhere in this process.
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
