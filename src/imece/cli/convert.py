"""`imece convert FILE`: translates a configuration of DeepSpeed or Accelerate to imece."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from imece.cli.options import parse
from imece.data_parallel.strategy import find_strategy
from imece.errors import UserError
from imece.foreign.files import read_settings
from imece.foreign.settings import TORCH, ScheduleSettings, Settings
from imece.foreign.training import lacking, train_toml
from imece.listing import many
from imece.observe.run_files import as_argument
from imece.writing import asked_for, write_whole

PROG = "imece convert"
DESCRIPTION = (
    "Read a configuration of DeepSpeed's (.json) or Accelerate's (.yaml, .json): what becomes of each value, "
    "the lines for your own script, the command that starts it, and a file for imece train."
)
_PARAMS = "optimizer.params."
_WIDE = 100  # columns of a line of code
_FATES = {"taken": "taken", "needless": "so already, or of no account here", "left out": "LEFT OUT"}


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `imece convert`."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The configuration of DeepSpeed or Accelerate."""
    ranks: int | None = None
    """Number of ranks on all hosts together. Default: the number in the file, if it has one."""
    to: Path | None = None
    """Write the configuration for imece train to this .toml file, which must not exist yet."""


def run(argv: Sequence[str]) -> int:
    """`imece convert ARGV`: exit status 0."""
    options = parse(ConvertOptions, argv, PROG, DESCRIPTION)
    if options.to is not None and options.to.suffix != ".toml":
        raise UserError(f"--to {options.to}: imece train reads a .toml file: name one")
    if options.to is not None and os.path.lexists(options.to):
        raise UserError(f"--to {options.to}: it is there already, and stays as it is: name another")
    settings = read_settings(options.file, options.ranks)
    shown = list(lines(settings))  # first, for it raises UserError
    if options.to is None:
        print(*shown, sep="\n")
    else:
        written = train_toml(settings)
        print(*shown, sep="\n")
        with asked_for(options.to):
            write_whole(options.to, written.encode())
        print(f"\nwritten  {options.to}: {training(settings, options.to)}")
    return 0


def lines(settings: Settings) -> Iterator[str]:
    """The whole report, line by line."""
    of = f", for {many(settings.ranks, 'rank')}" if settings.ranks else ""
    yield f"{settings.file}: {settings.source}'s configuration{of}"
    for fate, title in _FATES.items():
        those = [each for each in settings.values if each.fate == fate]
        if not those:
            continue
        yield ""
        yield title
        names = max(len(each.name) for each in those)
        shown = [_short(each.value) for each in those]
        wide = max(map(len, shown))
        for each, value in zip(those, shown, strict=True):
            yield f"  {each.name:<{names}}  {value:<{wide}}  {each.text}"
    yield ""
    yield "in your script"
    yield from (f"  {line}".rstrip() for line in script(settings))
    yield ""
    yield "start it"
    yield f"  {command(settings)}"
    yield ""
    if (why := lacking(settings)) is not None:
        yield f"no file for imece train: {why}"
        return
    yield f"for imece train (--to FILE.toml writes it){_batch_note(settings)}"
    yield from (f"  {line}".rstrip() for line in train_toml(settings).splitlines())


def script(settings: Settings) -> list[str]:
    """The lines of a training script that do what the file asks for."""
    arguments = _arguments(settings)
    precision = any("torch." in each for each in arguments)
    shown = ["import imece", *(["import torch"] if precision or settings.optimizer else []), ""]
    shown.append("mesh = imece.init()")
    if settings.recompute:
        shown.append("model.gradient_checkpointing_enable()  # of transformers; else torch.utils.checkpoint")
    if settings.compile:
        shown.append("imece.compile_blocks(model)")
    if settings.optimizer is not None:
        said = {name: getattr(settings.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")}
        given = "".join(f", {name}={value!r}" for name, value in said.items() if value is not None)
        autos = [each.removeprefix(_PARAMS) for each in settings.autos if each.startswith(_PARAMS)]
        note = f"  # {', '.join(autos)}: as its Trainer says" if autos else ""
        shown.append(f"optimizer = torch.optim.{settings.optimizer.name}(model.parameters(){given}){note}")
    call = f"model, optimizer = imece.parallelize(model, optimizer, {', '.join(arguments)})"
    if len(call) <= _WIDE:
        shown.append(call)
    else:
        shown.append("model, optimizer = imece.parallelize(")
        shown += [f"    {each}," for each in ("model, optimizer", *arguments)]
        shown.append(")")
    if settings.dtype != "fp32" and (settings.autocast or not settings.is_sharded):
        shown.append(f"# forward and loss in torch.autocast(mesh.device.type, torch.{TORCH[settings.dtype]})")
    if settings.dtype == "fp16":
        scaler = dataclasses.asdict(settings.scaler) if settings.scaler is not None else {}
        given = "".join(f", {name}={value!r}" for name, value in scaler.items() if value is not None)
        shown.append(f"# backward and step through imece.GradScaler(mesh.device.type{given})")
    if (settings.accumulation or 1) > 1:
        parts = settings.accumulation
        step = f"{parts} backwards, each of loss / {parts}"
        how = "all but the last in model.no_sync()"
        if find_strategy(settings.strategy).gradients:
            how = "none in model.no_sync(), which would keep whole gradients"
        shown.append(f"# a step is {step}, {how}")
    if settings.clip:
        shown.append(f"# before optimizer.step(): model.clip_grad_norm_({settings.clip:g})")
    if settings.schedule is not None and (shape := _shape(settings.schedule)):
        shown.append(f"# after optimizer.step(): scheduler.step(), one of torch's: {shape}")
    return shown


def _shape(schedule: ScheduleSettings) -> str:
    """How the learning rate goes, in words; nothing if it stays as it is."""
    rise = f"a warm-up of {schedule.warmup} steps" if schedule.warmup else ""
    if schedule.kind == "constant":
        return rise
    fall = f"{schedule.kind} to {schedule.least or 0:g} of the rate"
    end = f" at step {schedule.steps}" if schedule.steps else ""
    return ", then ".join(filter(None, [rise, fall + end]))


def training(settings: Settings, file: Path) -> str:
    """The command that starts `imece train` with its file; imece train alone runs on one host."""
    text = f"imece train {as_argument(file)} --data YOUR_TEXT"
    several = settings.hosts > 1 or find_strategy(settings.strategy).hybrid
    return command(settings, f"-m {text}") if several else _visible(settings) + text


def command(settings: Settings, program: str = "train.py") -> str:
    """The command that starts the ranks of a script."""
    if settings.ranks is None:
        count = "RANKS"
    elif settings.ranks % settings.hosts:
        raise UserError(
            f"{settings.file}: {settings.ranks} ranks cannot be shared evenly by {settings.hosts} hosts"
        )
    else:
        count = str(settings.ranks // settings.hosts)
    hosts = ""
    if settings.hosts > 1:
        where = settings.rendezvous or "HOST:29400"
        hosts = f" --hosts {settings.hosts} --host-rank {settings.host_rank} --rendezvous {where}"
    return f"{_visible(settings)}imece launch{hosts} --ranks {count} {program}"


def _visible(settings: Settings) -> str:
    gpus = settings.visible_gpus
    return "" if gpus is None else f"CUDA_VISIBLE_DEVICES={shlex.quote(gpus) if gpus else ''} "


def _arguments(settings: Settings) -> list[str]:
    """The arguments of imece.parallelize, as one types them."""
    typed = []
    for name, value in dataclasses.replace(settings, unit_classes=()).arguments().items():
        if name == "precision":
            pairs = ((each, getattr(value, each)) for each in ("param", "reduce"))
            inside = ", ".join(f"{each}={dtype}" for each, dtype in pairs if dtype is not None)
            typed.append(f"precision=imece.MixedPrecision({inside})")
        elif name == "strategy":
            typed.append(f'"{value}"')
        else:
            typed.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}")
    if settings.unit_classes and settings.strategy in ("zero3", "hybrid"):
        typed.append(f"units=[{', '.join(settings.unit_classes)}]")
    return typed


def _batch_note(settings: Settings) -> str:
    if settings.global_batch is None and settings.micro_batch is not None and settings.ranks is None:
        return "; the whole batch depends on the ranks: --ranks"
    return ""


def _short(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
