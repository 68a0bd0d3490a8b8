"""Checks that a command goes on with the run that it finds: it must compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.listing import some
from imece.train.config import TrainConfig, flat
from imece.writing import as_toml

_MOST_NAMED = 3  # further values named in a message, after the first that differs

# Where the run found things of which it has its own copy.
_PLACES = ("data.paths", "data.validation", "model.weights")

# Options that may change when a run goes on: none that changes what it computes, except the numbers of ranks,
# steps and epochs. Gradients are averaged over tokens, so more ranks only change the rounding.
MAY_CHANGE = frozenset(
    {
        "run",
        "ranks",
        "steps",
        "epochs",
        "strategy",
        "mesh.context",
        "mesh.tensor",
        "mesh.sequence",
        "mesh.pipeline",
        "mesh.schedule",
        "batch.micro",
        "data.folder",
        "compute.compile",
        "compute.recompute",
        "compute.offload",
        "compute.wire",
        "compute.accumulate",
        "compute.bad_steps",
        "validate.every",
        "validate.tokens",
        "validate.patience",
        "checkpoint.every",
        "checkpoint.minutes",
        "checkpoint.keep",
        "watch.drift_every",
        "watch.slow_ratio",
    }
)


def check_same_run(before: TrainConfig, now: TrainConfig) -> None:
    """UserError if `now` would not go on with the run that `before` has begun."""
    old, new = (_computing(each) for each in (before, now))
    if names := [name for name in old if old[name] != new[name]]:
        options = "those options" if names[1:] else "that option"
        raise UserError(
            f"{now.folder} holds a run with {names[0]} = {_said(names[0], old)}, this command says "
            f"{_said(names[0], new)}{_more(names)}: name another folder with --run, or leave {options} out"
        )


def computed_with(config: TrainConfig) -> dict[str, Any]:
    """The values, for a checkpoint, that `check_computed_with` compares; without the places of text and
    weights."""
    values = ((name, value) for name, value in _computing(config).items() if name not in _PLACES)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}  # JSON's


def check_computed_with(before: Mapping[str, Any], now: TrainConfig, where: Path) -> None:
    """UserError if the run's file was edited since. before: values from the checkpoint `where`; values that
    it lacks, as from an older version, are not compared."""
    new = computed_with(now)
    if names := [name for name in new if name in before and before[name] != new[name]]:
        raise UserError(
            f"{where} was made with {names[0]} = {as_toml(before[names[0]])}, the run's config.toml says "
            f"{as_toml(new[names[0]])}{_more(names)}: put it back, or begin another run with --run"
        )


def _computing(config: TrainConfig) -> dict[str, Any]:
    values = flat(config.absolute())
    return {name: value for name, value in values.items() if name not in MAY_CHANGE}


def _said(name: str, values: Mapping[str, Any]) -> str:
    by_default = name == "data.paths" and not values[name]
    return as_toml(values[name]) + " (no --data: Python's standard library)" * by_default


def _more(names: Sequence[str]) -> str:
    """Names further differences after the first."""
    named = some(names[1:], _MOST_NAMED)
    return f" ({named} differ{'s' * (len(names) == 2)} too)" if named else ""
