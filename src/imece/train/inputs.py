"""What a run reads and how, before there is a model: for the command that starts ranks and for each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imece.data.batches import Batches
from imece.data.prepare import Prepared, TextSource
from imece.models.language_model import LanguageConfig
from imece.train.batch import BatchPlan, batches_of, plan_batch
from imece.train.config import TrainConfig
from imece.train.dividing import check_divided, groups_of
from imece.train.evaluate import windows_read
from imece.train.model.adapters import check_targets
from imece.train.model.origin import keep, sequence_length, shape_of
from imece.train.run.folder import RunFolder


@dataclass(frozen=True)
class Inputs:
    """Text, shape and batch, which fit together."""

    config: TrainConfig  # with the steps that its epochs come to
    shape: LanguageConfig
    plan: BatchPlan
    prepared: Prepared
    batches: Batches


def shape_and_plan(config: TrainConfig, vocab_size: int, ranks: int) -> tuple[LanguageConfig, BatchPlan]:
    """The model's shape for a tokenizer of `vocab_size` entries, and how `ranks` share the global batch.
    UserError for what does not fit together."""
    shape = shape_of(config, vocab_size)
    seq = sequence_length(config, shape)
    check_divided(config, shape, seq)
    check_targets(config, shape)
    return shape, plan_batch(config.batch, seq, groups_of(config.mesh, ranks), config.mesh)


def read_inputs(config: TrainConfig, ranks: int, get: Callable[[TextSource, Path, Path], Prepared]) -> Inputs:
    """Read the text by `get`: `prepare` or `reopen`. UserError for what does not fit together.

    ranks: with which the run begins.
    """
    folder = RunFolder(config.folder)
    keep(config)
    prepared = get(config.data, folder.tokenizer_file, folder.tokens(config))
    shape, plan = shape_and_plan(config, prepared.tokenizer.vocab_size, ranks)
    batches = batches_of(config, prepared, plan)
    windows_read(prepared.tokens.validation, plan.seq, 0)  # refuses records of which none fits
    return Inputs(folder.with_steps(config, batches), shape, plan, prepared, batches)
