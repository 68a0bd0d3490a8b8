"""Runs whose ranks divide sequences, matrices or layers: their mesh, their checks, and each rank's part."""

from __future__ import annotations

from torch import nn

from imece.data_parallel.strategy import find_strategy
from imece.errors import UserError
from imece.listing import many
from imece.mesh import Mesh
from imece.model_parallel.context import check_length
from imece.model_parallel.pipeline import Pipeline, check_sends
from imece.model_parallel.plan import check_counts
from imece.model_parallel.schedules import Loss
from imece.models.foreign import ForeignConfig
from imece.models.language_model import LanguageConfig, LanguageModel
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer, units_of
from imece.train.batch import BatchPlan
from imece.train.config import MeshSection, TrainConfig


def axes_of(section: MeshSection, ranks: int) -> dict[str, int] | None:
    """The axes for `imece.init`; None if nothing is divided, because only such a mesh can change its ranks.
    UserError."""
    if section.size == 1:
        return None
    return {
        "pipeline": section.pipeline,
        "replicate": groups_of(section, ranks),
        "context": section.context,
        "tensor": section.tensor,
    }


def groups_of(section: MeshSection, ranks: int) -> int:
    """Number of groups of ranks that work together on one batch. UserError if the ranks do not divide
    evenly."""
    groups, over = divmod(ranks, section.size)
    if over:
        fit = [each * section.size for each in (groups, groups + 1) if each]
        raise UserError(
            f"{_asked(section)}: {many(ranks, 'rank')} cannot be divided into such groups: "
            f"--ranks {' or '.join(map(str, fit))}"
        )
    return groups


def check_divided(config: TrainConfig, shape: LanguageConfig, seq: int) -> None:
    """UserError for a model, sequences (in tokens) or gradients that cannot be divided as the config says,
    and for what only a model of ours can."""
    _check_accumulation(config)
    if config.mesh.sequence and config.mesh.tensor == 1:
        raise UserError("--mesh.sequence is for ranks that divide matrices: give --mesh.tensor, 2 or more")
    if isinstance(shape, ForeignConfig):
        _check_foreign(config, shape)
        return
    if config.mesh.size == 1:
        return
    asked = _asked(config.mesh)
    if config.compute.compile:
        raise UserError(
            f"{asked} and --compute.compile: what ranks tell each other amid a forward cannot be compiled: "
            "--compute.no-compile"
        )
    if config.mesh.deals and config.lora.rank:
        raise UserError(
            f"{asked} and --lora.rank {config.lora.rank}: adapters are not divided: leave one out"
        )
    if config.mesh.context > 1:
        if config.data.separates:
            raise UserError(
                f"{asked}: the ring between ranks attends over whole sequences, and documents are to be "
                "separate in them: --data.separate False, or --mesh.context 1"
            )
        _check_sequences(asked, shape, seq, config.mesh.context)
    if config.mesh.tensor > 1:
        _check_matrices(asked, config, shape, seq)
    if config.mesh.pipeline > 1:
        _check_layers(asked, config, shape)


def divided(model: LanguageModel, config: TrainConfig, mesh: Mesh) -> LanguageModel:
    """Divide the matrices in place, so that this rank has its part. All ranks call this."""
    if config.mesh.tensor == 1:
        return model
    assert isinstance(model, Transformer)
    from imece.model_parallel.tensor import tensor_parallel  # a second, for DTensor: other runs need none

    return tensor_parallel(model, mesh, sequence=config.mesh.sequence, divided_logits=True)


def dealt(
    model: LanguageModel, config: TrainConfig, plan: BatchPlan, mesh: Mesh, loss: Loss
) -> Pipeline | None:
    """This rank's layers of a whole model on any device; None if each rank has all layers. All ranks call
    this.

    UserError if stages could not send their outputs to each other.
    """
    section = config.mesh
    if section.pipeline == 1:
        return None
    try:
        check_sends(mesh)
    except ValueError as error:
        raise UserError(f"{_asked(section)}: {error}") from None
    return Pipeline(
        model,
        mesh,
        micro_batches=plan.accumulation,
        loss=loss,
        schedule=section.schedule,
        chunks=section.chunks,
        seq=plan.seq,
    )


def _check_accumulation(config: TrainConfig) -> None:
    if config.compute.accumulate != "sharded":
        return
    if config.mesh.pipeline > 1:
        raise UserError(
            f"{_asked(config.mesh)} and --accumulate sharded: a pipeline's ranks sum gradients once the last "
            "micro-batch has gone through: leave --accumulate out"
        )
    if config.strategy != "auto" and not find_strategy(config.strategy).gradients:
        raise UserError(
            f"--strategy {config.strategy} and --accumulate sharded: each rank keeps whole gradients then: "
            "--strategy zero2 or zero3, or leave --accumulate out"
        )


def _check_foreign(config: TrainConfig, shape: ForeignConfig) -> None:
    model = f"{config.model.weights} is of the kind {shape.kind}, which transformers computes"
    if config.mesh.size > 1:
        raise UserError(
            f"{_asked(config.mesh)}: {model}, so ranks cannot divide what is in it: leave that out; "
            "--strategy zero3 divides its parameters"
        )
    if config.compute.compile and config.lora.quantize != "none":
        raise UserError(
            f"--compute.compile and --lora.quantize {config.lora.quantize}: {model}: leave one out"
        )
    if config.compute.compile and shape.balances:
        raise UserError(
            f"--compute.compile: {model}, and its config.json asks for the routers' loss, whose inputs lie "
            "amid blocks: leave that out, or write false for output_router_logits"
        )
    if config.data.separates and not shape.keeps_apart:
        usual = "" if config.data.format == "text" else ", as is usual for records"
        raise UserError(
            f"--data.separate True{usual}: {model}, and its documents are not known to stay apart: say "
            "--data.separate False, and attention crosses from one to the next"
        )


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
    # With context, a rank attends with whole positions; `sequence` divides these further.
    length, step = seq // config.mesh.context, 2 * config.mesh.context * tensor
    if config.mesh.sequence and length % tensor:
        raise UserError(
            f"{asked}: {length} positions of a rank cannot be divided among {tensor}: --model.max-seq "
            f"{seq // step * step}"
        )


def _check_layers(asked: str, config: TrainConfig, shape: TransformerConfig) -> None:
    section = config.mesh
    if section.context > 1:
        raise UserError(
            f"{asked}: stages of a pipeline cannot divide sequences: --mesh.context 1, or --mesh.pipeline 1"
        )
    if config.strategy != "auto" and not goes_with_stages(config.strategy):
        raise UserError(
            f"{asked} and --strategy {config.strategy}: layers would be gathered anew for each micro-batch: "
            "--strategy zero1, zero2 or replicate"
        )
    pieces, stages = shape.layers + 1, section.pipeline * section.chunks
    if pieces < stages:
        ways = [f"at most --mesh.pipeline {most}"] if (most := pieces // section.chunks) > 1 else []
        if section.chunks > 1 and pieces >= section.pipeline:
            ways.append("--mesh.schedule 1f1b, with one stage for each")
        raise UserError(
            f"{asked}: {shape.layers} layers and the head cannot be dealt to {stages} stages"
            f"{f', {section.chunks} for each rank' if section.chunks > 1 else ''}: "
            + (" or ".join(ways) or "leave it out")
        )


def part_of(mesh: Mesh) -> tuple[int, int]:
    """(number of the part of the model that this rank has, number of parts)."""
    tensor = mesh.size("tensor")
    part = mesh.coordinate("pipeline") * tensor + mesh.coordinate("tensor")
    return part, mesh.size("pipeline") * tensor


def goes_with_stages(strategy: str) -> bool:
    """Whether ranks with the same stages can use this strategy."""
    found = find_strategy(strategy)
    return not found.parameters and not found.hybrid


def _asked(section: MeshSection) -> str:
    said = [
        f"--mesh.{name} {size}"
        for name in ("pipeline", "context", "tensor")
        if (size := getattr(section, name)) > 1
    ]
    return " and ".join(said)


def train_units(config: TrainConfig, shape: LanguageConfig) -> tuple[type[nn.Module], ...] | None:
    """The units that are gathered as one if parameters are sharded; None: found automatically."""
    if isinstance(shape, ForeignConfig) or config.mesh.deals or config.lora.rank:
        return None
    return units_of(shape)
