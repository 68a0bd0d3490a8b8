"""Divides the global batch among ranks: sequences = micro-batch x accumulation x ranks.

The micro-batches that one rank would accumulate go through a pipeline's stages instead, if there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from imece.data.batches import Batches
from imece.data.mix import whole_weights
from imece.data.prepare import Prepared
from imece.errors import UserError
from imece.listing import many
from imece.model_parallel.schedules import check_schedule
from imece.observe.units import multiples_near
from imece.train.config import BatchSection, MeshSection, TrainConfig

_MOST_AT_ONCE = 8  # sequences: with more, a CPU rank gets no faster
_BY_STAGE = 4  # micro-batches per stage of a pipeline, which then idles at most a fifth of the time
_ALONE = MeshSection()


@dataclass(frozen=True)
class BatchPlan:
    """The sequences of one step, and who computes them."""

    seq: int  # tokens per sequence
    sequences: int  # in the global batch
    ranks: int  # ranks, or groups of ranks, that divide the sequences
    micro: int  # sequences that a rank computes at once
    accumulation: int  # micro-batches per rank and step
    mesh: MeshSection = _ALONE  # how the ranks of a group work together
    whole: bool = True  # gradients stay on their rank until the last micro-batch, also if the strategy shards

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.sequences * self.seq

    @property
    def at_once(self) -> int:
        """Sequences that a rank receives together: in a pipeline all of its micro-batches."""
        return self.micro * (self.accumulation if self.mesh.pipeline > 1 else 1)

    def describe(self) -> str:
        """The arithmetic in words."""
        ranks = _ranks(self.ranks, self.mesh.size)
        how = "in the pipeline" if self.mesh.pipeline > 1 else "accumulated"
        if self.sequences != self.micro * self.accumulation * self.ranks:
            return (
                f"{self.sequences} sequences x {self.seq} over {ranks}, micro-batches of up to "
                f"{self.micro} x {self.accumulation} accumulated, {self.tokens:,} tokens a step{self._sums}"
            )
        return (
            f"{self.sequences} sequences x {self.seq} = micro-batch {self.micro} x {self.accumulation} "
            f"{how} x {ranks}, {self.tokens:,} tokens a step{self._sums}"
        )

    @property
    def _sums(self) -> str:
        return ", gradients summed after each micro-batch" * (self.accumulation > 1 and not self.whole)


def batches_of(config: TrainConfig, prepared: Prepared, plan: BatchPlan) -> Batches:
    """What the steps of a run read. UserError if the text is too short for that."""
    weights = whole_weights(config.data.weights)
    return Batches(prepared.tokens.train, plan.seq, plan.sequences, config.seed, weights)


def shared_among(plan: BatchPlan, ranks: int) -> BatchPlan:
    """The same global batch for another number of ranks; the first ranks may have one sequence more."""
    share = math.ceil(plan.sequences / ranks)
    micro = min(plan.micro, share)
    return replace(plan, ranks=ranks, micro=micro, accumulation=math.ceil(share / micro))


def plan_batch(section: BatchSection, seq: int, ranks: int, mesh: MeshSection = _ALONE) -> BatchPlan:
    """Choose micro-batch and accumulation. UserError, with the nearest numbers that work, if the batch cannot
    be divided.

    ranks: with sequences of their own; or groups of ranks, if several work together as `mesh` says.
    """
    sequences, size = section.sequences, mesh.size
    if section.tokens:
        if section.tokens % seq:
            raise UserError(
                f"--batch.tokens {section.tokens} is not a multiple of sequences of {seq} tokens; "
                f"the nearest are {multiples_near(section.tokens, seq)}"
            )
        sequences = section.tokens // seq
    if sequences < ranks:
        asked = f"--ranks {ranks} are" if size == 1 else f"{_ranks(ranks, size)} are"
        raise UserError(
            f"{asked} more than the {many(sequences, 'sequence')} of a step: "
            f"at most {_ranks(sequences, size)}, or at least {_option(section, seq, ranks)}"
        )
    share = sequences // ranks
    if section.micro > share:
        raise UserError(
            f"--batch.micro {section.micro} is more than the {many(share, 'sequence')} of a rank "
            f"in a step: at most {share}"
        )
    step = ranks * (section.micro or 1)
    if sequences % step:
        by = _ranks(ranks, size) + (f" x micro-batch {section.micro}" if section.micro else "")
        also = f", which is {sequences} sequences," if section.tokens else ""
        unit = seq if section.tokens else 1
        raise UserError(
            f"{_option(section, seq, sequences)}{also} cannot be divided by {by}; the nearest are "
            f"{multiples_near(sequences * unit, step * unit)}"
            f"{_other_ranks(sequences, section.micro or 1, ranks, size)}"
        )
    micro = section.micro or _most_at_once(share, mesh)
    if not _goes(mesh, share // micro):
        _refuse(section, seq, share, ranks, mesh)
    return BatchPlan(seq, sequences, ranks, micro, share // micro, mesh)


def _most_at_once(share: int, mesh: MeshSection) -> int:
    """Default size of a micro-batch in sequences. In a pipeline fewer sequences let stages wait less."""
    sizes = [micro for micro in range(1, min(share, _MOST_AT_ONCE) + 1) if share % micro == 0]
    if mesh.pipeline == 1:
        return sizes[-1]
    going = [micro for micro in sizes if _goes(mesh, share // micro)]
    enough = [micro for micro in going if share // micro >= _BY_STAGE * mesh.pipeline]
    return enough[-1] if enough else going[0] if going else 1


def _goes(mesh: MeshSection, count: int) -> bool:
    """Whether this many micro-batches can go through the pipeline."""
    try:
        check_schedule(mesh.schedule, count, mesh.chunks, mesh.pipeline)
    except ValueError:
        return False
    return True


def _refuse(section: BatchSection, seq: int, share: int, ranks: int, mesh: MeshSection) -> NoReturn:
    going = [micro for micro in range(1, share + 1) if share % micro == 0 and _goes(mesh, share // micro)]
    micro = section.micro or 1
    count = share // micro
    cure = (
        f"--batch.micro {' or '.join(map(str, going))}"
        if going
        else f"at least {_option(section, seq, ranks * mesh.pipeline)}"
    )
    raise UserError(
        f"--mesh.pipeline {mesh.pipeline}: {many(count, 'micro-batch')} of "
        f"{many(micro, 'sequence')} a step cannot go through {mesh.pipeline} stages by "
        f"--mesh.schedule {mesh.schedule}: {cure}, or --mesh.schedule gpipe"
    )


def _ranks(count: int, size: int) -> str:
    if size == 1:
        return many(count, "rank")
    return f"{many(count, 'group')} of {size} ranks"


def _option(section: BatchSection, seq: int, sequences: int) -> str:
    """The option that asks for this many sequences, or for their tokens: tokens overrule sequences."""
    return f"--batch.tokens {sequences * seq}" if section.tokens else f"--batch.sequences {sequences}"


def _other_ranks(sequences: int, micro: int, ranks: int, size: int) -> str:
    """Numbers of ranks that divide the batch: a run that goes on keeps its global batch."""
    fit = [each for each in range(1, sequences // micro + 1) if sequences % (each * micro) == 0]
    near = [*[each for each in fit if each < ranks][-1:], *[each for each in fit if each > ranks][:1]]
    near = [each * size for each in near]
    return f", or {' or '.join(map(str, near))} rank{'s' * (near != [1])}" if near else ""
