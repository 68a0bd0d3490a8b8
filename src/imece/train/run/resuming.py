"""Finds the checkpoint that a run goes on from: the same on all ranks, and made by this very run."""

from __future__ import annotations

from collections.abc import Callable

from imece.checkpoint.load import Saved
from imece.checkpoint.reading import newest_of_all
from imece.collectives.texts import gather_json
from imece.data.tokenizer import Tokenizer
from imece.errors import UserError
from imece.mesh import Mesh
from imece.train.agreeing import together
from imece.train.config import TrainConfig
from imece.train.run.folder import RunFolder
from imece.train.run.same import check_computed_with


def newest_for(
    config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh, alarm: Callable[[str], None]
) -> Saved | None:
    """The newest whole checkpoint; None if nothing was saved yet. All ranks call this.

    alarm: called on rank 0 for each damaged checkpoint that is skipped. UserError, on all ranks, if none can
    be read, if ranks would take different ones, or if the newest was made with another config or tokenizer.
    """
    folder = RunFolder(config.folder)

    def newest() -> Saved | None:
        damaged: list[str] = []
        saved = newest_of_all(folder.checkpoints, damaged.append, mesh.world_group, mesh.device)
        if saved is not None:
            for line in damaged if mesh.rank == 0 else ():  # all ranks see the same; one reports it
                alarm(f"damaged, so an older checkpoint is used: {line}")
            check_of_run(saved, config, tokenizer)
        elif damaged:
            raise UserError(
                f"{folder.checkpoints}: none of {len(damaged)} checkpoints can be read ({damaged[0]}); to "
                "begin anew, name another folder with --run"
            )
        return saved

    # Contains collectives, but an error before the last of them comes on all ranks.
    saved = together(mesh, newest)
    mine = saved.step if saved is not None else 0
    steps = gather_json(mine, mesh.world_group, mesh.device, "step to go on from")
    together(mesh, lambda: _check_same(steps, folder))
    return saved


def check_of_run(saved: Saved, config: TrainConfig, tokenizer: Tokenizer) -> None:
    """UserError for a checkpoint that was made with another config or tokenizer."""
    check_computed_with(saved.state["computed_with"], config, saved.folder)
    if saved.state["tokenizer_hash"] != tokenizer.hash:
        entries = saved.state["model"]["vocab_size"]
        raise UserError(
            f"{saved.folder} was trained with another tokenizer ({entries} entries) than "
            f"{RunFolder(config.folder).tokenizer_file} ({tokenizer.vocab_size}): put the old one back"
        )


def _check_same(steps: list[int], folder: RunFolder) -> None:
    """UserError if a rank cannot read what the others can: it would take an older checkpoint."""
    if len(set(steps)) > 1:
        others = [rank for rank, step in enumerate(steps) if step != max(steps)]
        raise UserError(
            f"{folder.checkpoints}: rank {others[0]} can read step {steps[others[0]]} at most, others step "
            f"{max(steps)}: check that all hosts see the same disk"
        )
