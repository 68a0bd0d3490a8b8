"""`imece train [config.toml] [--any.value ...]`: from text on disk to a language model, in one run folder."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.table import Column

from imece.checkpoint.load import all_steps
from imece.cli.options import check_named, parse
from imece.data.corpus import suffix_of
from imece.data.sources import SUFFIXES
from imece.errors import UserError
from imece.launch.generations import Limits
from imece.launch.local import launch
from imece.listing import many
from imece.observe.report import catch_up
from imece.observe.run_files import as_argument
from imece.saying import say
from imece.train.config import TrainConfig, defaults
from imece.train.config_file import read_toml, to_toml
from imece.train.loop import NotFiniteError
from imece.train.model.adapters import check_asked
from imece.train.other_names import OURS
from imece.train.run.folder import RunFolder
from imece.train.run.lock import HELD, RunLock
from imece.train.start import Progress as Report
from imece.train.start import make_ready, run_rank
from imece.train.watch.drift import DriftError
from imece.train.watch.stopping import SIGNALS, Stop

PROG = "imece train"
DESCRIPTION = (
    "Train a language model on text: imece train --data notes/ --run runs/notes. Without options it trains a "
    "small one on the Python standard library here. The same command goes on with a run that was stopped. "
    "With a file, imece train [config.toml] [options], options overrule its values; --print-config shows a "
    "whole file."
)
_PRINT = "--print-config"
_GRACE_S = 120.0  # for the end of a step and a save; a second Ctrl-C does not wait
# Options that say where a run lies, what it begins from and what it reads.
_NAMING = ("--run", "--from", "--model.weights", "--data", "--data.paths", "--data.validation")
_ELSEWHERE = {f"--{theirs}": f"--{ours}" for theirs, ours in OURS.items()} | dict.fromkeys(
    ("--config", "--config-file"), f"{PROG} FILE.toml"
)
_LONG_BYTES = 1_000_000  # of text: less is tokenized before anybody wonders


def run(argv: Sequence[str]) -> int:
    """`imece train ARGV`: 0 when training is done, 128 + the signal that stopped it, 1 if it cannot go on."""
    words = list(argv)
    printing = _PRINT in words
    if printing:
        words.remove(_PRINT)
    config = read_config(words)
    if printing:
        print(to_toml(config), end="")
        return 0
    folder = RunFolder(config.folder)
    made, new = folder.to_make(), not os.path.lexists(folder.config_file)
    with RunLock(folder.path) as lock:
        with _progress() as report:
            ranks = make_ready(config, report, lock)
        before = all_steps(folder.checkpoints)[-1:]
        _under_way(f"starting {many(ranks, 'rank')}")
        # Absolute, because a path that begins with - would be taken for an option.
        command = [sys.executable, "-m", "imece", "train", os.path.abspath(folder.config_file)]
        environ = {**os.environ, HELD: "1"}
        status = launch(command, Limits(ranks, restart=True), grace_s=_GRACE_S, environ=environ, direct=True)
        if status != 2:
            catch_up(folder.path)
        if status == 2 and new and not folder.is_open:  # or the user could not mend any option
            with suppress(OSError):
                folder.take_back(config, made)
        if status - 128 in SIGNALS and all_steps(folder.checkpoints)[-1:] == before:  # no rank says it
            again = f"imece train --run {as_argument(folder.path)}"
            say(f"no step was saved; go on with: {again}")
        return status


def read_config(words: list[str]) -> TrainConfig:
    """The configuration from file, run folder and options: options overrule the file, the file the defaults.

    Without a file, options change the values of the run folder that is named, or that the folder of MODEL
    lies in. A run's own file means that run, wherever it was moved and wherever the command is started.
    """
    file = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    if file is not None and (os.path.isdir(file) or suffix_of(file) in SUFFIXES):
        is_run = os.path.lexists(RunFolder(file).config_file)
        how = f"to go on with this run say {PROG} --run" if is_run else f"to train on it say {PROG} --data"
        raise UserError(f"{file} is no config file: {how} {as_argument(file)}")
    if file is not None and os.path.exists(file) and not os.path.isfile(file):  # it would be read for ever
        raise UserError(f"{file}: neither a file nor a folder: copy its content to a file and name that")
    check_named(words, _NAMING)
    try:
        config = parse(
            TrainConfig, words, PROG, DESCRIPTION, _start(file), others=[_PRINT], elsewhere=_ELSEWHERE
        )
    except UserError as mistake:
        told = str(mistake).replace(";", "").split()
        late = [word for word in words if word.endswith(".toml") and word in told]
        if late and file is None:
            raise UserError(
                f"{late[0]}: a config file stands before the options: {PROG} {late[0]} ..."
            ) from None
        raise
    if config.model.weights:  # for which other values are usual
        start = _start(file, config.model.weights, config.lora.rank)
        config = parse(TrainConfig, words, PROG, DESCRIPTION, start)
    config.check_origin()
    folder = RunFolder(config.folder)
    if file is None and os.path.isfile(folder.config_file):
        before = dataclasses.replace(folder.config(), run=config.run)
        if config.model.weights and config.absolute().model.weights != before.absolute().model.weights:
            began = f"the weights of {before.model.weights}" if before.model.weights else "random weights"
            raise UserError(
                f"{config.folder} holds a run that began with {began}, not with those of "
                f"{config.model.weights}: name another folder with --run"
            )
        config = parse(TrainConfig, words, PROG, DESCRIPTION, before)
    check_asked(config)
    config.data.check_weights()
    _check_effects(words, config)
    return config


def _check_effects(words: Sequence[str], config: TrainConfig) -> None:
    """UserError for an option without an effect: a schedule, steps beside epochs, a batch in sequences beside
    one in tokens, and the like.
    One from a run or a file may stay, and so may a schedule beside `--mesh.pipeline 1`."""
    named = {word.partition("=")[0] for word in words}
    if config.mesh.pipeline == 1 and "--mesh.schedule" in named and "--mesh.pipeline" not in named:
        raise UserError(
            f"--mesh.schedule {config.mesh.schedule} is for ranks to which layers are dealt: give "
            "--mesh.pipeline, 2 or more"
        )
    if config.validate.patience and not (config.data.held_out or config.data.validation):
        raise UserError(
            f"--validate.patience {config.validate.patience} has no effect beside data.held_out = 0, with "
            "which nothing is validated: give one of them, or text with --data.validation"
        )
    if config.data.validation and "--data.held-out" in named:
        raise UserError(
            f"--data.held-out {config.data.held_out} has no effect beside data.validation: give one of them"
        )
    if config.epochs and "--steps" in named:
        raise UserError(
            f"--steps {config.steps} has no effect beside epochs = {config.epochs:g}: give one of them, or "
            "--epochs 0"
        )
    if config.batch.tokens and "--batch.sequences" in named:
        raise UserError(
            f"--batch.sequences {config.batch.sequences} has no effect beside batch.tokens = "
            f"{config.batch.tokens}: give one of them, or --batch.tokens 0"
        )


def _start(file: Path | None, weights: str = "", rank: int | None = None) -> TrainConfig:
    """The configuration that the options change. weights: the folder to begin from; rank: of adapters."""
    if file is None:
        return defaults(weights, rank or 0)
    start = read_toml(file, weights, rank)
    if _is_of_run(file) and not _is_same(start.folder, file.parent):
        start = dataclasses.replace(start, run=str(file.parent))
    return start


def _is_of_run(file: Path) -> bool:
    folder = RunFolder(file.parent)
    return folder.is_open and _is_same(file, folder.config_file)


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def run_as_rank(argv: Sequence[str], stop: Stop) -> int:
    """`imece train ARGV` as one of the ranks that a launcher started. stop: already listens for signals."""
    try:
        return run_rank(read_config(list(argv)), stop)
    except (NotFiniteError, DriftError) as error:
        say(str(error))
        return 1


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar while text is tokenized; it vanishes, because the header reports the result.

    Without a terminal: one line for what takes long. Ctrl-C inside gets a message.
    """
    console = Console(stderr=True)
    sizes = DownloadColumn(table_column=Column(no_wrap=True))  # a second line would be drawn again and again
    columns = (TextColumn("{task.description}"), BarColumn(), sizes)
    tasks: dict[str, TaskID] = {}
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

            def report(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bars.add_task(what, total=total)
                    if bars.disable and total >= _LONG_BYTES:
                        _under_way(what)
                bars.update(tasks[what], completed=done, total=total)

            yield report
    except KeyboardInterrupt:
        doing = next(reversed(tasks), "reading the text")
        raise KeyboardInterrupt(f"interrupted while {doing}; nothing was saved") from None


def _under_way(text: str) -> None:
    """Say that something slow has begun; only where no terminal shows progress.

    BrokenPipeError if nobody reads it: ranks go on without a reader, as their launcher sees that it is gone.
    """
    if sys.stdout.isatty() and Console().is_interactive:
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # a full disk: training matters more
        return
