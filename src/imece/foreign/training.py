"""The same settings as a file of `imece train`."""

from __future__ import annotations

import dataclasses
from typing import Any

from imece.data_parallel.sharding.offload import check_strategy
from imece.data_parallel.strategy import find_strategy
from imece.errors import UserError
from imece.foreign.settings import OptimizerSettings, Settings
from imece.observe.visible import visible
from imece.train.config import OptimizerSection, TrainConfig, flat
from imece.train.config_file import as_toml

_TYPE = "optimizer.type"
_DTYPES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")


def lacking(settings: Settings) -> str | None:
    """What `imece train` does not have of it, so that a file would train otherwise; None: it has all."""
    optimizer = settings.optimizer
    if optimizer is not None and _is_adamw(optimizer):
        return None
    left = (each.value for each in settings.values if each.name == _TYPE and each.fate == "left out")
    name = optimizer.name if optimizer is not None else next(left, None)
    if name is None:
        return None
    if name == "Muon":
        return "its own Muon makes updates as long as AdamW's, and so wants another lr"
    return f"it has AdamW and a Muon of its own, not {name}"


def train_toml(settings: Settings) -> str:
    """A file for `imece train` that says what `settings` does, and what of it is left out; the rest is usual.

    UserError, with the file's name, for what no run can have, and where something is `lacking`.
    """
    if (why := lacking(settings)) is not None:
        raise UserError(f"{settings.file}: no file for imece train: {why}: leave --to out, or change {_TYPE}")
    values = _values(settings)
    _check(settings, values)
    said = [_comment(f"what {settings.file} says, {settings.source}'s configuration")]
    said += [
        _comment(f"left out: {each.name} = {each.value!r}: {each.text}")
        for each in settings.values
        if each.fate == "left out"
    ]
    if settings.autos:
        said.append(_comment(f"as its Trainer says, so as usual here: {', '.join(settings.autos)}"))
    said += [f"{name} = {as_toml(value)}" for name, value in values.items() if "." not in name]
    for section in dict.fromkeys(name.split(".")[0] for name in values if "." in name):
        said += ["", f"[{section}]"]
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")
        }
        said += [f"{name} = {as_toml(value)}" for name, value in own.items()]
    return "\n".join(said) + "\n"


def _values(settings: Settings) -> dict[str, Any]:
    """Dotted names of TrainConfig's."""
    values: dict[str, Any] = {"strategy": settings.strategy}
    if settings.dtype != "fp32" or not {*_DTYPES} & {*settings.autos}:
        values["compute.dtype"] = settings.dtype
    if settings.ranks is not None and settings.hosts == 1:
        values["ranks"] = settings.ranks
    if settings.global_batch is not None:
        values["batch.sequences"] = settings.global_batch
    if settings.micro_batch is not None:
        values["batch.micro"] = settings.micro_batch
    optimizer, schedule = settings.optimizer, settings.schedule
    if optimizer is not None:
        values["optimizer.kind"] = "adamw"
        pairs = {"lr": optimizer.lr, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
        if optimizer.betas is not None:
            pairs |= dict(zip(("beta1", "beta2"), optimizer.betas, strict=True))
        values |= {f"optimizer.{name}": value for name, value in pairs.items() if value is not None}
    if schedule is not None:
        values["optimizer.schedule"] = schedule.kind
        if schedule.warmup is not None:
            values["optimizer.warmup"] = schedule.warmup
        if schedule.kind == "cosine" and schedule.least is not None:
            values["optimizer.min_lr"] = schedule.least
        if schedule.kind == "cosine" and schedule.steps is not None:
            values["steps"] = schedule.steps
    if settings.clip is not None:
        values["optimizer.clip"] = settings.clip
    for name, wanted in (("recompute", settings.recompute), ("compile", settings.compile)):
        if wanted:
            values[f"compute.{name}"] = True
    if settings.offload is not None:
        values["compute.offload"] = settings.offload
    return values


def _is_adamw(optimizer: OptimizerSettings) -> bool:
    """Adam without decay is the same."""
    return optimizer.name == "AdamW" or (optimizer.name == "Adam" and optimizer.weight_decay == 0)


def _comment(text: str) -> str:
    return "# " + visible(text).replace("\n", "\\n")


def _check(settings: Settings, values: dict[str, Any]) -> None:
    """As the file will be checked when it is read."""
    known = flat(TrainConfig())
    assert values.keys() <= known.keys()
    try:
        own = {
            name.partition(".")[2]: value for name, value in values.items() if name.startswith("optimizer.")
        }
        dataclasses.replace(OptimizerSection(), **own)
        if settings.offload is not None:
            check_strategy(settings.offload, find_strategy(settings.strategy))
    except ValueError as error:
        raise UserError(f"{settings.file}: {error}") from None
