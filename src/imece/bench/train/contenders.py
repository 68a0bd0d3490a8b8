"""The ways of training that `imece bench train` compares: their processes, configs and run folders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from imece.bench.crew import Crew
from imece.bench.options import Options, check_ranks, names
from imece.data.prepare import prepare
from imece.errors import UserError
from imece.observe.units import megabytes
from imece.train.batch import BatchPlan, plan_batch
from imece.train.config import (
    BatchSection,
    CheckpointSection,
    DataSection,
    Dtype,
    ModelSection,
    OptimizerSection,
    TrainConfig,
    ValidateSection,
)
from imece.train.model.precision import choose_precision
from imece.train.run.folder import RunFolder

OURS = {"bf16": "imece-bf16", "fp32": "imece-fp32"}
COMPILED = {"bf16": "imece-compiled-bf16", "fp32": "imece-compiled-fp32"}
"""The same ways with --compute.compile."""
PLAIN = {"bf16": "plain-bf16", "fp32": "plain-fp32"}
SAME_LOSS = {"bf16": "plain-loss-bf16", "fp32": "plain-loss-fp32"}
ONE_RANK, ALONE = "imece-1-rank", "no-sync"
WAYS = (*OURS.values(), *COMPILED.values(), *PLAIN.values(), *SAME_LOSS.values(), ONE_RANK, ALONE)

_OURS_MODULE, _PLAIN_MODULE = "imece.bench.train.rank", "imece.bench.train.plain"
NEVER_DONE = 10**6  # steps of a run, because its last one would validate and save

# A tiny model on a few bytes of text, to see that everything works. It learns fast from the first step on, so
# a loop that does something else is noticed soon.
QUICK = TrainConfig(
    model=ModelSection(preset="tiny"),
    data=DataSection(paths=(str(Path(json.__file__).parent),), tokenizer="bytes"),
    batch=BatchSection(sequences=4),
    optimizer=OptimizerSection(warmup=0),
)


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    ways: Annotated[tuple[str, ...], names("--ways", WAYS, or_none=True)] = WAYS
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

    @property
    def config(self) -> TrainConfig:
        """Model, text, batch and optimizer; the rest of it is not used."""
        return QUICK if self.quick else TrainConfig()

    @property
    def default(self) -> str:
        """The way that `imece train` takes here by default."""
        return OURS[choose_precision(self.config.compute.dtype, torch.device("cpu")).name]

    @property
    def every(self) -> tuple[str, ...]:
        """All ways that are measured, the default first."""
        return tuple(dict.fromkeys((self.default, *self.ways)))

    def check(self) -> None:
        check_ranks(self.ranks)
        self.at_least_one("rounds", "steps")
        if (sequences := self.config.batch.sequences) % self.ranks:
            raise UserError(f"--ranks {self.ranks}: they cannot share the {sequences} sequences of a step")

    def shortened(self) -> Plan:
        return replace(self, rounds=min(self.rounds, 2), steps=1)


class Contender:
    """A way of training, and the crews that continue it together when ordered to."""

    def __init__(self, way: str, crews: Sequence[Crew], folder: Path) -> None:
        self.way, self._crews, self._folder = way, crews, folder

    def open(self) -> dict[str, Any]:
        """Begin; returns the first rank's answer."""
        return self.ask("open", folder=str(self._folder))[0]

    def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        with ThreadPoolExecutor(len(self._crews)) as threads:
            asked = [threads.submit(crew.ask, do, way=self.way, **details) for crew in self._crews]
            return [answer for each in asked for answer in each.result()]


def with_text(config: TrainConfig, folder: Path, say: Callable[[str], None]) -> TrainConfig:
    """The config with its text tokenized, once for all ways."""
    tokenizer, tokens = folder / "tokenizer.json", folder / "tokens"
    prepared = prepare(config.data, tokenizer, tokens)
    name = ", ".join(config.data.paths) or "Python standard library"
    say(f"text     {name}: {megabytes(prepared.source_bytes)}, {len(prepared.tokens.train.tokens):,} tokens")
    data = replace(config.data, tokenizer=str(tokenizer), folder=str(tokens))
    return replace(config, data=data)


def start_all(
    plan: Plan, config: TrainConfig, folder: Path, crews: contextlib.ExitStack
) -> dict[str, Contender]:
    """All ways of the plan, by name; `crews` ends their processes. config: the plan's, with its text ready.

    Ways of the same kind share processes, because only one works at a time; a plain loop has its own.
    """

    # Empty, so that nothing compiled earlier helps.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}

    def start(name: str, module: str, ranks: int) -> Crew:
        return crews.enter_context(Crew.of_ranks(name, module, ranks, extra=[cache] * ranks))

    ours = {*OURS.values(), *COMPILED.values()}
    started: dict[str, list[Crew]] = {}
    contenders = {}
    for way in plan.every:
        kind = "alone" if way in (ONE_RANK, ALONE) else "ours" if way in ours else "plain"
        if kind not in started and kind == "alone":
            started[kind] = [start(f"{kind} {rank}", _OURS_MODULE, 1) for rank in range(plan.ranks)]
        elif kind not in started:
            module = _OURS_MODULE if kind == "ours" else _PLAIN_MODULE
            started[kind] = [start(kind, module, plan.ranks)]
        run_folder = folder / way
        RunFolder(run_folder).begin(_config_of(way, plan, config, run_folder))
        contenders[way] = Contender(way, started[kind][: 1 if way == ONE_RANK else None], run_folder)
    return contenders


def batch_of(config: TrainConfig, ranks: int) -> BatchPlan:
    """The batch among this many ranks. UserError if they cannot divide it."""
    return plan_batch(config.batch, config.model.shape(config.data.vocab_size).max_seq, ranks)


def _config_of(way: str, plan: Plan, config: TrainConfig, run_folder: Path) -> TrainConfig:
    computed: tuple[Dtype, ...] = ("bf16", "fp32")
    dtypes = {names[dtype]: dtype for names in (OURS, COMPILED, PLAIN, SAME_LOSS) for dtype in computed}
    dtype = dtypes[way if way in dtypes else plan.default]
    batch = config.batch
    if way == ALONE:  # each rank does alone what a rank does among others
        share = batch_of(config, plan.ranks).sequences // plan.ranks
        batch = replace(batch, sequences=share, tokens=0)
    return replace(
        config,
        run=str(run_folder),
        steps=NEVER_DONE,
        batch=batch,
        compute=replace(config.compute, dtype=dtype, compile=way in COMPILED.values()),
        validate=ValidateSection(every=0),
        checkpoint=CheckpointSection(every=0),
    )
