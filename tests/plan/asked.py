"""Questions that several tests of the planner ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from imece.plan.answer.space import Question
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster

LLAMA_8B = Model("llama-8b", 32, 4096, 32, 8, 128, 14336, True, 128256, tied_head=False)
LLAMA_70B = Model("llama-70b", 80, 8192, 64, 8, 128, 28672, True, 128256, tied_head=False)


def ask(
    model: Model = LLAMA_8B,
    gpu: str = "A100-80",
    gpus: int = 8,
    hosts: int = 1,
    batch: int = 64,
    **changes: Any,
) -> Question:
    """Of sequences of 4,096 tokens, if nothing else is said."""
    return replace(Question(model, find_cluster(gpu, gpus, hosts), batch, 4096), **changes)
