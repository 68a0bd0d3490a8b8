"""Options of `imece bench`: one dataclass for each benchmark, whose plan() says what to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from imece.bench import memory
from imece.bench.collectives import collectives
from imece.bench.collectives.contenders import LIBRARIES, OPS
from imece.bench.hosts import hosts
from imece.bench.reference_model import MODELS, REFERENCE
from imece.bench.step import parameter_cost, step
from imece.bench.step.ways import STRATEGIES, STRATEGY_WAYS, WAYS
from imece.bench.train import contenders as train_contenders
from imece.bench.train.contenders import WAYS as TRAIN_WAYS
from imece.cli.bench_values import (
    at_least_one,
    check_ranks,
    counts,
    read_choices,
    read_size,
    read_sizes,
    whole,
)
from imece.errors import UserError
from imece.footprint import Offload
from imece.train.config import TrainConfig

_QUICK_S = 0.004


@dataclass(frozen=True)
class CollectivesOptions:
    """Options of `imece bench collectives`."""

    ranks: str = "2"
    """Numbers of ranks, for instance 2,4."""
    sizes: str = "1KiB..256MiB,6MiB"
    """Message sizes: a list, or a range in which each size is four times the one before."""
    ops: str = ",".join(OPS)
    """Which operations: a list."""
    rounds: int = 5
    """Rounds, in each of which every library is timed once."""
    against: str = "gloo,mpich,deepspeed"
    """Other libraries; those that are not installed are left out."""
    shared: bool = True
    """Measure shm with tensors in shared memory (imece.shared_empty)."""
    ordinary: bool = True
    """Measure shm with ordinary tensors."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Write a plot (PNG) to this file."""
    quick: bool = False
    """Few sizes, 3 short rounds: to see that it works, not to quote."""

    def plan(self) -> collectives.Plan:
        """What to measure. UserError for options that cannot be met."""
        ranks = tuple(whole(word, "--ranks") for word in self.ranks.split(","))
        check_ranks(ranks)
        at_least_one(self.rounds, "--rounds")
        against = read_choices(self.against, LIBRARIES[2:], "--against", or_none=True)
        ours = [name for name, wanted in zip(LIBRARIES, (self.shared, self.ordinary), strict=False) if wanted]
        chosen = tuple(ours + against)
        ops = tuple(read_choices(self.ops, OPS, "--ops"))
        if not chosen:
            raise UserError("nothing to measure: name at least one library")
        sizes = tuple(read_sizes(self.sizes))
        if self.quick:
            default = self.sizes == CollectivesOptions.sizes
            quick_sizes = tuple(read_sizes("1KiB,64KiB,1MiB,8MiB")) if default else sizes
            return collectives.Plan(ranks, ops, quick_sizes, chosen, min(self.rounds, 3), _QUICK_S)
        return collectives.Plan(ranks, ops, sizes, chosen, self.rounds)


@dataclass(frozen=True)
class HostsOptions:
    """Options of `imece bench hosts`."""

    size: str = "16MiB"
    """Message size."""
    rate: str = "1gbit"
    """Rate of the cable in each direction, in tc's notation."""
    rounds: int = 5
    """Rounds, in each of which all ways are measured."""
    steps: bool = True
    """Also time training steps across the cable."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """2 MiB, 2 rounds and no training steps: to see that it works, not to quote."""

    def plan(self) -> hosts.Plan:
        """What to measure. UserError for options that cannot be met."""
        if re.fullmatch(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?[kmg]?bit", self.rate) is None:
            raise UserError(f"--rate {self.rate!r} is not a rate like 1gbit or 100mbit")
        at_least_one(self.rounds, "--rounds")
        size = read_size(self.size) // 4 * 4
        if self.quick:
            return hosts.Plan(min(size, 2 * 2**20), min(self.rounds, 2), self.rate, (1, 4), False)
        return hosts.Plan(size, self.rounds, self.rate, steps=self.steps)


@dataclass(frozen=True)
class StepOptions:
    """Options of `imece bench step`."""

    tokens: str = "128,512"
    """Tokens of one rank in one step: a list."""
    ways: str = ",".join(WAYS)
    """Which ways of training: a list. Ways that are not installed are left out; no-sync is always
    measured."""
    #: Compare strategies of imece with torch's instead: a list of replicate, zero1, zero2, zero3,
    #: zero3-gather (as between hosts), torch-zero1 (ZeroRedundancyOptimizer), fully-shard, deepspeed-zero3;
    #: or all.
    strategy: str = ""
    ranks: int = 2
    """Number of ranks."""
    rounds: int = 7
    """Rounds, in each of which all ways are measured."""
    steps: int = 4
    """Training steps in each round."""
    memory: bool = False
    """Also measure memory, each way in ranks of its own."""
    parameters: str = ""
    """Measure instead what each parameter costs in backward, in models of so many parameters: a list, for
    instance 1000,10000."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw the timeline of one step to this PNG file; if several ways were traced, one file for each."""
    trace: Path | None = None
    """Write the timeline for ui.perfetto.dev (Chrome trace events) to this file; again one for each way."""
    quick: bool = False
    """2 rounds of 1 step: to see that it works, not to quote."""

    def plan(self) -> step.Plan | parameter_cost.Plan:
        """What to measure. UserError for options that cannot be met."""
        _check_counts(self)
        if self.parameters:
            if self.plot or self.trace:
                raise UserError("--parameters measures no timeline: leave --plot and --trace out")
            sizes = tuple(sorted(counts(self.parameters, "--parameters")))
            return parameter_cost.Plan(sizes, self.ranks, min(self.rounds, 2) if self.quick else self.rounds)
        tokens = counts(self.tokens, "--tokens")
        for count in tokens:
            if count > REFERENCE.length and count % REFERENCE.length:
                raise UserError(
                    f"--tokens {count}: more than {REFERENCE.length} must be a multiple of {REFERENCE.length}"
                )
        ways = step.wanted(read_choices(self.ways, WAYS, "--ways", or_none=True))
        if self.strategy:
            every = self.strategy == "all"
            chosen = ",".join(STRATEGY_WAYS) if every else self.strategy
            ways = step.wanted(read_choices(chosen, STRATEGY_WAYS, "--strategy"))
        rounds, steps = (min(self.rounds, 2), 1) if self.quick else (self.rounds, self.steps)
        return step.Plan(ways, tokens, self.ranks, rounds, steps, self.memory)


@dataclass(frozen=True)
class MemoryOptions:
    """Options of `imece bench memory`."""

    strategies: str = ",".join(STRATEGIES)
    """Which strategies: a list. zero3-gather is zero3 as it runs between hosts."""
    models: str = ",".join(MODELS)
    """Which models: a list of 10.9M, 29.5M, 97M."""
    ranks: str = "2,4"
    """Numbers of ranks: a list."""
    bf16: bool = False
    """Keep parameters and gradients in bf16 with masters in fp32, instead of all in fp32."""
    offload: Offload | None = None
    """Count the optimizer, or the parameters too, as lying in a GPU's host. Here all of it is in the CPU's
    memory."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw stacked bars (PNG) to this file."""
    quick: bool = False
    """The small model on 2 ranks: to see that it works."""

    def plan(self) -> memory.Plan:
        """What to measure. UserError for options that cannot be met."""
        strategies = tuple(read_choices(self.strategies, STRATEGIES, "--strategies"))
        models = tuple(read_choices(self.models, tuple(MODELS), "--models"))
        ranks = counts(self.ranks, "--ranks")
        check_ranks(ranks)
        if self.quick:
            models, ranks = models[:1], ranks[:1]
        plan = memory.Plan(strategies, models, ranks, self.bf16, self.offload)
        if not any(map(plan.can_be, strategies)):
            given = "--bf16" if self.offload is None else f"--offload {self.offload}"
            can = ", ".join(filter(plan.can_be, STRATEGIES))
            raise UserError(f"{given} cannot be with --strategies {self.strategies}: name one of {can}")
        return plan


@dataclass(frozen=True)
class TrainOptions:
    """Options of `imece bench train`."""

    ways: str = ",".join(TRAIN_WAYS)
    """Which ways of training: a list. The default of `imece train` is always measured."""
    ranks: int = 2
    """Number of ranks."""
    rounds: int = 5
    """Rounds, in each of which all ways are measured."""
    steps: int = 4
    """Training steps in each round."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """A tiny model, 2 rounds of 1 step: to see that it works, not to quote."""

    def plan(self) -> train_contenders.Plan:
        """What to measure. UserError for options that cannot be met."""
        _check_counts(self)
        config = train_contenders.QUICK if self.quick else TrainConfig()
        if config.batch.sequences % self.ranks:
            raise UserError(
                f"--ranks {self.ranks}: they cannot share the {config.batch.sequences} sequences of a step"
            )
        ways = tuple(read_choices(self.ways, TRAIN_WAYS, "--ways", or_none=True))
        rounds, steps = (min(self.rounds, 2), 1) if self.quick else (self.rounds, self.steps)
        return train_contenders.Plan(ways, self.ranks, rounds, steps, config)


def _check_counts(options: StepOptions | TrainOptions) -> None:
    check_ranks([options.ranks])
    at_least_one(options.rounds, "--rounds")
    at_least_one(options.steps, "--steps")
