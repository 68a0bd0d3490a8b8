"""Options of `imece bench save`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imece.bench.save import save
from imece.bench.save.save import STRATEGIES
from imece.cli.bench_values import at_least_one, read_choices
from imece.errors import UserError


@dataclass(frozen=True)
class SaveOptions:
    """Options of `imece bench save`."""

    strategies: str = ",".join(STRATEGIES)
    """Which strategies: a list. For hybrid ones the ranks pretend to be on two hosts."""
    model: Literal["10.9M", "97M"] = "97M"
    """Which model."""
    ranks: int = 4
    """Number of ranks."""
    rounds: int = 5
    """Saves with each strategy."""
    folder: Path | None = None
    """Write checkpoints below this folder and remove them afterwards. Default: the folder for temporary
    files."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """The small model on 2 ranks, one save: to see that it works, not to quote."""

    def plan(self) -> save.Plan:
        """What to measure. UserError for options that cannot be met."""
        strategies = tuple(read_choices(self.strategies, STRATEGIES, "--strategies"))
        if not 2 <= self.ranks <= 64 or self.ranks % 2:
            raise UserError(f"--ranks {self.ranks}: an even number from 2 to 64 can be measured")
        at_least_one(self.rounds, "--rounds")
        if self.folder is not None and not (os.path.isdir(self.folder) and os.access(self.folder, os.W_OK)):
            raise UserError(
                f"--folder {self.folder}: no folder that can be written to: make it, or name another"
            )
        if self.quick:
            return save.Plan(strategies, "10.9M", 2, rounds=1, steps=1, folder=self.folder)
        return save.Plan(strategies, self.model, self.ranks, rounds=self.rounds, folder=self.folder)
