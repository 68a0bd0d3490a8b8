"""Options of `imece bench tensor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imece.bench.reference_model import REFERENCE
from imece.bench.tensor import tensor
from imece.bench.tensor.ways import shape
from imece.cli.bench_values import at_least_one, counts
from imece.errors import UserError
from imece.model_parallel.plan import check_counts


@dataclass(frozen=True)
class TensorOptions:
    """Options of `imece bench tensor`."""

    ranks: int = 2
    """Number of ranks that divide the matrices."""
    tokens: str = "128,512"
    """Tokens per step: a list."""
    vocabularies: str = "512,16384"
    """Entries of the vocabulary: a list."""
    rounds: int = 7
    """Rounds, in each of which all ways are measured."""
    steps: int = 4
    """Training steps in each round."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """128 tokens, 512 entries, 2 rounds of 1 step: to see that it works, not to quote."""

    def plan(self) -> tensor.Plan:
        """What to measure. UserError for options that cannot be met."""
        tokens = counts(self.tokens, "--tokens")
        vocabularies = counts(self.vocabularies, "--vocabularies")
        at_least_one(self.rounds, "--rounds")
        at_least_one(self.steps, "--steps")
        if self.ranks < 2:
            raise UserError(f"--ranks {self.ranks}: at least 2 are needed to divide a matrix")
        model = shape(vocabularies[0])
        check_counts({"heads": model.heads, "mlp_width": model.mlp_width}, self.ranks)
        for each in vocabularies:
            check_counts({"--vocabularies": each}, self.ranks)
        for each in tokens:
            length = min(each, REFERENCE.length)
            if each % length or length % self.ranks:
                raise UserError(
                    f"--tokens {each}: up to {REFERENCE.length}, or a multiple of it, and for {self.ranks} "
                    "ranks to divide"
                )
        if self.quick:
            return tensor.Plan(self.ranks, (128,), (512,), 2, 1)
        return tensor.Plan(self.ranks, tokens, vocabularies, self.rounds, self.steps)
