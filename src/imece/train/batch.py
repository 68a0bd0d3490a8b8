"""The global batch, cut for the ranks: sequences = micro-batch x accumulation x ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from imece.errors import UserError
from imece.train.config import BatchSection

_MOST_AT_ONCE = 8  # sequences: beyond that the products of a CPU rank gain nothing more


@dataclass(frozen=True)
class BatchPlan:
    """Sequences of one step, and who computes them."""

    seq: int  # tokens in each sequence
    sequences: int  # the global batch
    ranks: int  # that share them out, or groups of ranks
    micro: int  # sequences that one rank computes at once
    accumulation: int  # times it does so
    context: int = 1  # ranks of a group among which its sequences are divided
    tensor: int = 1  # and matrices

    @property
    def tokens(self) -> int:
        """Of the global batch."""
        return self.sequences * self.seq

    def describe(self) -> str:
        """The arithmetic, in words."""
        ranks = _ranks(self.ranks, self.context * self.tensor)
        if self.sequences != self.micro * self.accumulation * self.ranks:
            return (
                f"{self.sequences} sequences x {self.seq} over {ranks}, micro-batches of up to "
                f"{self.micro} x {self.accumulation} accumulated, {self.tokens:,} tokens a step"
            )
        return (
            f"{self.sequences} sequences x {self.seq} = micro-batch {self.micro} x {self.accumulation} "
            f"accumulated x {ranks}, {self.tokens:,} tokens a step"
        )


def shared_among(plan: BatchPlan, ranks: int) -> BatchPlan:
    """The same global batch for another number of ranks: the first ones may have one sequence more."""
    share = math.ceil(plan.sequences / ranks)
    micro = min(plan.micro, share)
    return replace(plan, ranks=ranks, micro=micro, accumulation=math.ceil(share / micro))


def plan_batch(section: BatchSection, seq: int, ranks: int, context: int = 1, tensor: int = 1) -> BatchPlan:
    """UserError, with the nearest numbers that would do, if the batch cannot be divided.

    ranks: that have sequences of their own; groups of context x tensor, where these divide a model.
    """
    sequences, size = section.sequences, context * tensor
    if section.tokens:
        if section.tokens % seq:
            raise UserError(
                f"--batch.tokens {section.tokens} is not a multiple of sequences of {seq} tokens; "
                f"the nearest are {_nearest(section.tokens, seq)}"
            )
        sequences = section.tokens // seq
    if sequences < ranks:
        asked = f"--ranks {ranks} are" if size == 1 else f"{_ranks(ranks, size)} are"
        raise UserError(
            f"{asked} more than the {sequences} sequence{'s' * (sequences != 1)} of a step: "
            f"at most {_ranks(sequences, size)}, or at least {_option(section, seq, ranks)}"
        )
    share = sequences // ranks
    if section.micro > share:
        raise UserError(
            f"--batch.micro {section.micro} is more than the {share} sequence{'s' * (share != 1)} of a rank "
            f"in a step: at most {share}"
        )
    step = ranks * (section.micro or 1)
    if sequences % step:
        by = _ranks(ranks, size) + (f" x micro-batch {section.micro}" if section.micro else "")
        also = f", which is {sequences} sequences," if section.tokens else ""
        unit = seq if section.tokens else 1
        raise UserError(
            f"{_option(section, seq, sequences)}{also} cannot be divided by {by}; the nearest are "
            f"{_nearest(sequences * unit, step * unit)}"
            f"{_other_ranks(sequences, section.micro or 1, ranks, size)}"
        )
    micro = section.micro or max(n for n in range(1, min(share, _MOST_AT_ONCE) + 1) if share % n == 0)
    return BatchPlan(seq, sequences, ranks, micro, share // micro, context, tensor)


def _ranks(count: int, size: int) -> str:
    if size == 1:
        return f"{count} rank{'s' * (count != 1)}"
    return f"{count} group{'s' * (count != 1)} of {size} ranks"


def _option(section: BatchSection, seq: int, sequences: int) -> str:
    """That asks for so many: tokens, where they are given, count before sequences."""
    return f"--batch.tokens {sequences * seq}" if section.tokens else f"--batch.sequences {sequences}"


def _other_ranks(sequences: int, micro: int, ranks: int, size: int) -> str:
    """Those that divide it: a run that is gone on with keeps its global batch."""
    fit = [each for each in range(1, sequences // micro + 1) if sequences % (each * micro) == 0]
    near = [*[each for each in fit if each < ranks][-1:], *[each for each in fit if each > ranks][:1]]
    near = [each * size for each in near]
    return f", or {' or '.join(map(str, near))} rank{'s' * (near != [1])}" if near else ""


def _nearest(number: int, step: int) -> str:
    below = number // step * step
    return f"{below} and {below + step}" if below else f"{step} and {2 * step}"
