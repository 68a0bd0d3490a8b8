"""Options of `imece bench gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imece.bench.gpu import gpu
from imece.bench.gpu.gpu import PARTS
from imece.cli.bench_values import at_least_one, read_choices
from imece.errors import UserError


@dataclass(frozen=True)
class GpuOptions:
    """Options of `imece bench gpu`."""

    parts: str = ",".join(PARTS)
    """Which parts: a step with and without wrappers, compiled, in sharded strategies, the loop of imece
    train, the optimizer alone."""
    model: Literal["tiny", "small", "medium", "1.3b"] = "1.3b"
    """A preset of the model, in bf16."""
    sequences: int = 4
    """Sequences per step, each as long as the model's context."""
    rounds: int = 5
    """Rounds, in each of which all ways are measured."""
    steps: int = 5
    """Training steps in each round."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: only with --model tiny, to see that it works, not to quote."""
    json: Path | None = None
    """Write all figures to this file."""
    trace: Path | None = None
    """Write what torch's profiler saw of some steps of imece to this file (open it in Perfetto)."""

    def plan(self) -> gpu.Plan:
        """What to measure. UserError for options that cannot be met."""
        at_least_one(self.sequences, "--sequences")
        at_least_one(self.rounds, "--rounds")
        at_least_one(self.steps, "--steps")
        parts = tuple(read_choices(self.parts, PARTS, "--parts"))
        if self.device == "cpu" and self.model != "tiny":
            raise UserError(f"--device cpu --model {self.model}: on a CPU only --model tiny is measured")
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise UserError(
                    "imece bench gpu needs a CUDA device, and torch sees none here: install a CUDA build of "
                    "torch, or try it with --device cpu --model tiny"
                )
        if self.trace is not None and (self.device == "cpu" or "wrapper" not in parts):
            raise UserError("--trace: it is of steps on a GPU, of --parts wrapper")
        trace = "" if self.trace is None else str(self.trace.absolute())
        return gpu.Plan(self.device, self.model, parts, self.sequences, self.rounds, self.steps, trace)
