"""The optimizers of a run, each with its own parameters."""

from __future__ import annotations

from torch.optim import AdamW, Muon, Optimizer

from imece.models.transformer import Transformer
from imece.train.config import OptimizerSection


def make_optimizers(model: Transformer, section: OptimizerSection) -> list[Optimizer]:
    """Every parameter is in one of them. Weight decay pulls on matrices only, not on the scales of norms.

    adamw: AdamW (Loshchilov and Hutter 2019) for all. muon: Muon (Jordan et al. 2024) for the matrices
    of the blocks, its update scaled to AdamW's usual size (Liu et al. 2025), so that one learning rate serves
    both; AdamW for embedding, head and norms, which are no maps from channels to channels.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    inner = [each for each in model.blocks.parameters() if each.requires_grad and each.ndim == 2]
    optimizers: list[Optimizer] = []
    if section.kind == "muon":
        muon = Muon(inner, lr=section.lr, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
        taken = set(inner)
        parameters = [each for each in parameters if each not in taken]
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    return [*optimizers, AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=True)]
