"""The same settings as a file of `imece train`."""

from __future__ import annotations

import dataclasses
from typing import Any

from imece.errors import UserError
from imece.foreign.settings import Settings
from imece.train.config import OptimizerSection, TrainConfig, flat
from imece.train.config_file import as_toml

_KINDS = {"AdamW": "adamw", "Muon": "muon"}


def train_toml(settings: Settings) -> str:
    """A file for `imece train` that says what `settings` does, and nothing else: the rest is as by default.

    UserError, with the file's name, for what no run can have.
    """
    values = _values(settings)
    _check(settings, values)
    said = [f"# what {settings.file} says, {settings.source}'s configuration"]
    said += [f"{name} = {as_toml(value)}" for name, value in values.items() if "." not in name]
    for section in dict.fromkeys(name.split(".")[0] for name in values if "." in name):
        said += ["", f"[{section}]"]
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")
        }
        said += [f"{name} = {as_toml(value)}" for name, value in own.items()]
    return "\n".join(said) + "\n"


def _values(settings: Settings) -> dict[str, Any]:
    """Dotted names of TrainConfig's; of an optimizer that imece train does not have, nothing."""
    values: dict[str, Any] = {"strategy": settings.strategy, "compute.dtype": settings.dtype}
    if settings.ranks is not None and settings.hosts == 1:
        values["ranks"] = settings.ranks
    if settings.global_batch is not None:
        values["batch.sequences"] = settings.global_batch
    if settings.micro_batch is not None:
        values["batch.micro"] = settings.micro_batch
    optimizer, schedule = settings.optimizer, settings.schedule
    if optimizer is not None and optimizer.name in _KINDS:
        values["optimizer.kind"] = _KINDS[optimizer.name]
        pairs = {"lr": optimizer.lr, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
        if optimizer.betas is not None:
            pairs |= dict(zip(("beta1", "beta2"), optimizer.betas, strict=True))
        values |= {f"optimizer.{name}": value for name, value in pairs.items() if value is not None}
    if schedule is not None:
        values["optimizer.schedule"], values["optimizer.warmup"] = schedule.kind, schedule.warmup
        if schedule.kind == "cosine" and schedule.least is not None:
            values["optimizer.min_lr"] = schedule.least
        if schedule.kind == "cosine" and schedule.steps is not None:
            values["steps"] = schedule.steps
    values["optimizer.clip"] = settings.clip or 0.0
    for name, wanted in (("recompute", settings.recompute), ("compile", settings.compile)):
        if wanted:
            values[f"compute.{name}"] = True
    if settings.offload is not None:
        values["compute.offload"] = settings.offload
    return values


def _check(settings: Settings, values: dict[str, Any]) -> None:
    """As the file will be checked when it is read."""
    known = flat(TrainConfig())
    assert values.keys() <= known.keys()
    try:
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith("optimizer.")
        }
        dataclasses.replace(OptimizerSection(), **own)
    except ValueError as error:
        raise UserError(f"{settings.file}: {error}") from None
