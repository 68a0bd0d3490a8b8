"""Options of `imece bench pipeline`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imece.bench.pipeline import pipeline
from imece.bench.pipeline.rank import BLOCKS
from imece.cli.bench_values import at_least_one, counts, read_choices
from imece.errors import UserError
from imece.model_parallel.schedules import SCHEDULES


@dataclass(frozen=True)
class PipelineOptions:
    """Options of `imece bench pipeline`."""

    stages: str = "2,4"
    """Ranks of a pipeline: a list. If there are more ranks than cores, blocks wait instead of computing."""
    micro_batches: str = "1,2,4,8,16"
    """Micro-batches per batch: a list. Numbers that a schedule cannot run are left out."""
    schedules: str = ",".join(SCHEDULES)
    """Which schedules: a list."""
    steps: int = 5
    """Steps of each measurement."""
    wait: bool = False
    """Let blocks wait instead of computing for any number of ranks, if others use the cores too."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """2 ranks, 2 and 4 micro-batches, 1 step: to see that it works, not to quote."""

    def plan(self) -> pipeline.Plan:
        """What to measure. UserError for options that cannot be met."""
        schedules = tuple(read_choices(self.schedules, SCHEDULES, "--schedules"))
        stages = counts(self.stages, "--stages")
        micro_batches = counts(self.micro_batches, "--micro-batches")
        if wrong := [each for each in stages if not 2 <= each <= BLOCKS]:
            raise UserError(f"--stages {wrong[0]}: from 2 to {BLOCKS}, the blocks of the model")
        if wrong := [each for each in micro_batches if each > 256]:
            raise UserError(f"--micro-batches {wrong[0]}: 256 at most")
        at_least_one(self.steps, "--steps")
        if self.quick:
            return pipeline.Plan((2,), (2, 4), schedules, 1, self.wait)
        return pipeline.Plan(stages, micro_batches, schedules, self.steps, self.wait)
