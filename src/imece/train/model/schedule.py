"""The learning rate of each step: depends only on the step's number, so a resumed run has the same."""

from __future__ import annotations

import math

from imece.train.config import OptimizerSection

_DECAY_SHARE = 0.2  # of all steps, at the end of wsd


def learning_rate(index: int, steps: int, section: OptimizerSection) -> float:
    """The rate of update number `index` (from 0) of `steps`.

    It rises linearly over the first `warmup` updates and reaches lr with the last of them. Then "cosine"
    follows half a cosine down to min_lr * lr (Loshchilov and Hutter 2017, without restarts); "linear" falls
    there in a line; "wsd" stays level and falls linearly to min_lr * lr over the last fifth of the steps (Hu
    et al. 2024); "constant" stays.
    """
    warmup = min(section.warmup, steps)
    if index < warmup:
        return section.lr * (index + 1) / warmup
    if section.schedule == "constant":
        share = 1.0
    elif section.schedule == "cosine":
        along = (index + 1 - warmup) / max(1, steps - warmup)
        share = section.min_lr + (1 - section.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))
    else:
        decay = max(1, round(_DECAY_SHARE * steps) if section.schedule == "wsd" else steps - warmup)
        along = max(0.0, (index + 1 - (steps - decay)) / decay)
        share = 1.0 - (1 - section.min_lr) * min(1.0, along)
    return section.lr * share
