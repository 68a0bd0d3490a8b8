"""Ranks that divide the sequences or the matrices of a run among them: the mesh for it, and what it needs."""

from __future__ import annotations

from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.context import check_length
from imece.model_parallel.plan import check_counts
from imece.model_parallel.tensor import tensor_parallel
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import MeshSection, TrainConfig


def axes_of(section: MeshSection, ranks: int) -> dict[str, int] | None:
    """For `imece.init`; None if nothing is divided, for such a mesh can change its ranks. UserError."""
    if section.size == 1:
        return None
    return {"replicate": groups_of(section, ranks), "context": section.context, "tensor": section.tensor}


def groups_of(section: MeshSection, ranks: int) -> int:
    """How many there are of the ranks that work on one batch together. UserError if they do not come out."""
    groups, over = divmod(ranks, section.size)
    if over:
        fit = [each * section.size for each in (groups, groups + 1) if each]
        raise UserError(
            f"{_asked(section)}: {ranks} rank{'s' * (ranks != 1)} cannot be divided into such groups: "
            f"--ranks {' or '.join(map(str, fit))}"
        )
    return groups


def check_divided(config: TrainConfig, shape: TransformerConfig, seq: int) -> None:
    """UserError for a model or sequences (tokens) that cannot be divided as the config says."""
    if config.mesh.sequence and config.mesh.tensor == 1:
        raise UserError("--mesh.sequence is for ranks that divide matrices: give --mesh.tensor, 2 or more")
    if config.mesh.size == 1:
        return
    asked = _asked(config.mesh)
    if config.compute.compile:
        raise UserError(
            f"{asked} and --compute.compile: what ranks tell each other amid a block cannot be compiled: "
            "leave one of them out"
        )
    if config.mesh.context > 1:
        _check_sequences(asked, shape, seq, config.mesh.context)
    if config.mesh.tensor > 1:
        _check_matrices(asked, config, shape, seq)


def divided(model: Transformer, config: TrainConfig, mesh: Mesh) -> Transformer:
    """This rank's part of it, in place. All ranks call it."""
    if config.mesh.tensor == 1:
        return model
    return tensor_parallel(model, mesh, sequence=config.mesh.sequence)


def _check_sequences(asked: str, shape: TransformerConfig, seq: int, context: int) -> None:
    if shape.window is not None and shape.window < shape.max_seq:
        raise UserError(
            f"{asked}: layers of this model have a window of {shape.window:,} positions, and the ring "
            "between ranks knows none: leave it out"
        )
    try:
        check_length(seq, context)
    except ValueError as error:
        raise UserError(f"{asked}: {error}; --model.max-seq says how long they are") from None


def _check_matrices(asked: str, config: TrainConfig, shape: TransformerConfig, seq: int) -> None:
    tensor = config.mesh.tensor
    if config.optimizer.kind == "muon":
        raise UserError(
            f"{asked} and Muon: its update is of a whole matrix, which no rank has: --optimizer.kind "
            "adamw, with about a third of the rate"
        )
    if config.lora.rank:
        raise UserError(
            f"{asked} and --lora.rank {config.lora.rank}: adapters are not divided: leave one out"
        )
    counts = {"heads": shape.heads, "kv_heads": shape.kv_heads, "mlp_width": shape.mlp_width}
    try:
        check_counts(counts, tensor)
    except UserError as error:
        raise UserError(f"{asked}: {error}") from None
    if shape.tied_head and shape.vocab_size % tensor:
        raise UserError(
            f"{asked}: {shape.vocab_size:,} entries of a vocabulary cannot be divided among {tensor} ranks, "
            "and the embedding is the head too: --model.tied-head False, or another --data.vocab-size"
        )
    # Attention over the ring sees whole positions of a rank, but those of `sequence` are parts of these.
    length = seq // config.mesh.context
    if config.mesh.sequence and length % tensor:
        raise UserError(
            f"{asked}: {length} positions of a rank cannot be divided among {tensor}: --model.max-seq "
            f"{seq // (config.mesh.size * 2) * config.mesh.size * 2}"
        )


def _asked(section: MeshSection) -> str:
    said = [f"--mesh.{name} {size}" for name in ("context", "tensor") if (size := getattr(section, name)) > 1]
    return " and ".join(said)
