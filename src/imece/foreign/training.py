"""Writes the settings of another program as a file for `imece train`."""

from __future__ import annotations

import dataclasses
from typing import Any

from imece.errors import UserError
from imece.foreign.settings import OptimizerSettings, Settings
from imece.observe.visible import visible
from imece.train.config import OptimizerSection, TrainConfig, flat
from imece.writing import as_toml

_TYPE = "optimizer.type"
_DTYPES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")


def lacking(settings: Settings) -> str | None:
    """The setting that `imece train` lacks, so that it would train differently; None if it has them all."""
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
    """A file for `imece train` that says the same as `settings`, and which of them are left out; the rest is
    usual.

    UserError, with the file's name, for settings that no run can have or that `imece train` is `lacking`.
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
        said += [f"{name} = {as_toml(value)}" for name, value in _of_section(values, section).items()]
    return "\n".join(said) + "\n"


def _values(settings: Settings) -> dict[str, Any]:
    """Dotted names of TrainConfig -> values."""
    says_dtype = settings.dtype != "fp32" or not {*_DTYPES} & {*settings.autos}
    values: dict[str, Any] = {
        "strategy": settings.strategy,
        "compute.dtype": settings.dtype if says_dtype else None,
        "ranks": settings.ranks if settings.hosts == 1 else None,
        "batch.sequences": settings.global_batch,
        "batch.micro": settings.micro_batch,
    }
    optimizer, schedule = settings.optimizer, settings.schedule
    if optimizer is not None:
        beta1, beta2 = optimizer.betas or (None, None)
        values |= {
            "optimizer.kind": "adamw",
            "optimizer.lr": optimizer.lr,
            "optimizer.eps": optimizer.eps,
            "optimizer.weight_decay": optimizer.weight_decay,
            "optimizer.beta1": beta1,
            "optimizer.beta2": beta2,
        }
    if schedule is not None:
        values |= {"optimizer.schedule": schedule.kind, "optimizer.warmup": schedule.warmup}
        if schedule.kind != "constant":
            values |= {"optimizer.min_lr": schedule.least, "steps": schedule.steps}
    values |= {
        "optimizer.clip": settings.clip,
        "compute.recompute": settings.recompute or None,
        "compute.compile": settings.compile or None,
        "compute.offload": settings.offload,
        "compute.wire": settings.wire,
    }
    return {name: value for name, value in values.items() if value is not None}


def _of_section(values: dict[str, Any], section: str) -> dict[str, Any]:
    return {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}


def _is_adamw(optimizer: OptimizerSettings) -> bool:
    """Whether this is AdamW, or Adam without decay, which is the same."""
    return optimizer.name == "AdamW" or (optimizer.name == "Adam" and optimizer.weight_decay == 0)


def _comment(text: str) -> str:
    return "# " + visible(text).replace("\n", "\\n")


def _check(settings: Settings, values: dict[str, Any]) -> None:
    """Check the values as the file's reader will."""
    known = flat(TrainConfig())
    assert values.keys() <= known.keys()
    try:
        dataclasses.replace(OptimizerSection(), **_of_section(values, "optimizer"))
    except ValueError as error:
        raise UserError(f"{settings.file}: {error}") from None
