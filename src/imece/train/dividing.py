"""Ranks that divide the sequences of a run among them: the mesh for it, and what it needs."""

from __future__ import annotations

from imece.errors import UserError
from imece.model_parallel.context import check_length
from imece.models.shape import TransformerConfig
from imece.train.config import MeshSection, TrainConfig


def axes_of(section: MeshSection, ranks: int) -> dict[str, int] | None:
    """For `imece.init`; None if nothing is divided, for such a mesh can change its ranks. UserError."""
    if section.context == 1:
        return None
    return {"replicate": groups_of(section, ranks), "context": section.context}


def groups_of(section: MeshSection, ranks: int) -> int:
    """How many there are of the ranks that work on one batch together. UserError if they do not come out."""
    groups, over = divmod(ranks, section.context)
    if over:
        fit = [each * section.context for each in (groups, groups + 1) if each]
        raise UserError(
            f"--mesh.context {section.context}: {ranks} rank{'s' * (ranks != 1)} cannot be divided into such "
            f"groups: --ranks {' or '.join(map(str, fit))}"
        )
    return groups


def check_divided(config: TrainConfig, shape: TransformerConfig, seq: int) -> None:
    """UserError for a model or sequences (tokens) that cannot be divided as the config says."""
    context = config.mesh.context
    if context == 1:
        return
    if shape.window is not None and shape.window < shape.max_seq:
        raise UserError(
            f"--mesh.context {context}: layers of this model have a window of {shape.window:,} positions, "
            "and the ring between ranks knows none: leave it out"
        )
    if config.compute.compile:
        raise UserError(
            f"--mesh.context {context} and --compute.compile: the ring between ranks cannot be compiled: "
            "leave one of them out"
        )
    try:
        check_length(seq, context)
    except ValueError as error:
        raise UserError(
            f"--mesh.context {context}: {error}; --model.max-seq says how long they are"
        ) from None
