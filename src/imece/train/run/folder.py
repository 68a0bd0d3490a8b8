"""The run folder: holds everything of one run, and is all that a later command needs."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from imece.checkpoint.files import step_of
from imece.checkpoint.load import Saved, all_steps, best, newest, of_step
from imece.data.batches import Batches
from imece.data.build import discard
from imece.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from imece.data.tokenizer import Tokenizer
from imece.errors import UserError
from imece.listing import many
from imece.models.foreign import ForeignConfig
from imece.models.hugging_face import CONFIG, TOKENIZER_FILES
from imece.models.language_model import LanguageConfig
from imece.models.shape import RopeScaling, TransformerConfig
from imece.observe.environment import version
from imece.observe.metrics import FILE as FIGURES
from imece.observe.metrics import read_metrics
from imece.reading import json_if_any
from imece.saying import say
from imece.train.config import TrainConfig
from imece.train.config_file import read_toml, to_toml
from imece.train.run.lock import FILE, RunLock
from imece.train.run.same import check_same_run
from imece.writing import leftovers, other_place, write_whole

Which = str
"""A checkpoint: "best", which has the lowest validation loss, "last", or the number of a step."""


def check_which(which: Which) -> None:
    """ValueError if this names no checkpoint."""
    if which not in ("best", "last") and not re.fullmatch("[0-9]{1,18}", which):
        raise ValueError(f"--which {which!r}: best, last, or the number of a step")


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run is."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The complete config; a folder is a run folder once this file exists."""
        return self.path / "config.toml"

    @property
    def origin(self) -> Path:
        """Copies from the folder that the run began from: see origin.py."""
        return self.path / "from"

    @property
    def tokenizer_file(self) -> Path:
        """Where the tokenizer is or will be."""
        kept = self.origin / "tokenizer.json"
        return kept if kept.exists() else self.path / kept.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_open(self) -> bool:
        """Whether ranks have started on it: until then the next command could make everything in it again."""
        return any(os.path.lexists(path) for path in (self.path / FIGURES, self.checkpoints))

    def tokens(self, config: TrainConfig) -> Path:
        """The folder of token files, which runs on the same text may share."""
        folder = config.data.folder
        return Path(os.path.expanduser(folder)) if folder else self.path / "tokens"

    def config(self) -> TrainConfig:
        """The run's config. UserError if this is no run folder, or the config cannot be read."""
        try:
            is_empty = os.stat(self.config_file).st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.path} is no run folder, it has no {self.config_file.name}: check the path"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read ({error.strerror}): check the path and its permissions"
            ) from error
        self._check_plain()
        if is_empty:  # it would be a run with the defaults of everything, its text too
            raise UserError(f"{self.config_file}: damaged (it is empty): put it back")
        try:
            return read_toml(self.config_file)
        except UserError as mistake:
            raise UserError(f"{mistake}{self._of_another_version()}") from mistake

    def _of_another_version(self) -> str:
        """What a message about this run adds where another version of imece has written it, else ""."""
        theirs, ours = json_if_any(self.path / "environment.json").get("imece"), version("imece")
        if theirs in (None, ours):
            return ""
        return f" (imece {theirs} has written this run, and this is {ours}: take that one)"

    def begin(self, config: TrainConfig, lock: RunLock | None = None) -> bytes | None:
        """Make the folder, or go on with the run in it. From then on `config` is its config, with absolute
        paths to texts.

        Returns the config file's previous content, None if there was none. lock: the folder's; it is taken
        before anything changes. UserError if another command is running this run, if the folder holds another
        run, one whose checkpoints are gone, or files that are no run, or if it cannot be
        written.
        """
        made = self.to_make()
        try:
            content = to_toml(config.absolute()).encode()
            if not self.config_file.exists():
                if os.path.lexists(self.path) and not self.path.is_dir():
                    what = "a file" if self.path.exists() else "a link that leads to nothing"
                    raise UserError(f"{self.path} is {what}: name a folder with --run")
                if self.path.is_dir() and set(self.path.iterdir()) - self._leftovers() - {self.path / FILE}:
                    raise UserError(
                        f"{self.path} holds other files, but no run: name another folder with --run"
                    )
                self.path.mkdir(parents=True, exist_ok=True)
            self._check_plain()
            if lock is not None:
                lock.begin()
            before = None
            if self.config_file.exists():  # perhaps only since a moment ago
                self._check_same(config)
                self._check_checkpoints()
                before = self.config_file.read_bytes()
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            if before != content:
                write_whole(self.config_file, content, durable=True)
            return before
        except OSError as error:
            with suppress(OSError):  # above all if it is not empty
                if made:
                    (self.path / FILE).unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            raise UserError(
                f"{self.path}: the run folder cannot be written ({error.strerror}): {other_place(error)}"
            ) from error
        except UnicodeEncodeError as error:
            value = next(line for line in error.object.splitlines() if error.object[error.start] in line)
            raise UserError(
                f"{value}: a name that is not UTF-8, which no TOML can hold: rename it"
            ) from error

    @contextmanager
    def begun(self, config: TrainConfig, lock: RunLock | None = None) -> Iterator[None]:
        """`begin`, but undone if the code inside fails by a mistake, Ctrl-C or anything else, so that the
        user can then change any option. UserError as from `begin`."""
        made = self.to_make()
        before = self.begin(config, lock)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if before is not None:
                    write_whole(self.config_file, before, durable=True)
                else:
                    self.take_back(config, made)
            raise

    def to_make(self) -> list[Path]:
        """The folders that do not exist yet: the run's own first, then those around it."""
        return list(takewhile(lambda folder: not os.path.lexists(folder), (self.path, *self.path.parents)))

    def take_back(self, config: TrainConfig, made: Sequence[Path]) -> None:
        """Remove what a run has before its first step, but no file that others put there meanwhile. OSError.

        made: the folders to remove as well, as `to_make` named them. A folder that existed before may be a
        link, or have permissions that a new one would not.
        """
        self._discard(config)
        for path in (self.config_file, self.path / FILE):
            path.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()

    def _discard(self, config: TrainConfig) -> None:
        """Remove what was made for this config before any rank started. OSError."""
        tokenizer = self.path / "tokenizer.json"
        lock = tokenizer.with_name(f".{tokenizer.name}.lock")
        kept = (self.origin / name for name in (CONFIG, *TOKENIZER_FILES))
        for path in (tokenizer, tokenizer.with_name(TOKENIZER_CONFIG), lock, *kept, *self._leftovers()):
            path.unlink(missing_ok=True)
        run, tokens, checkpoints = map(os.path.abspath, (self.path, self.tokens(config), self.checkpoints))
        if Path(tokens).is_relative_to(run):
            discard(Path(tokens))
        for folder in {tokens, checkpoints, os.path.abspath(self.origin)} - {run}:
            if Path(folder).is_relative_to(run):
                with suppress(OSError):  # it is missing, or holds something else too
                    os.rmdir(folder)

    def put_back(self, config: TrainConfig, tokenizer: Tokenizer) -> bool:
        """Restore what checkpoints need beside them to be usable, if it is gone; returns whether it was.
        OSError.

        config, tokenizer: of the run, which is under way.
        """
        if self.config_file.exists() and self.tokenizer_file.exists():
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        tokenizer.write(self.tokenizer_file)
        write_whole(self.config_file, to_toml(config.absolute()).encode(), durable=True)
        return True

    def _check_plain(self) -> None:
        """UserError for a pipe, a socket or a device in it: whoever opens a pipe waits forever, and no signal
        ends that. Those in checkpoints count as damage of these."""
        for folder, _, names in os.walk(self.path):
            if step_of(Path(folder)) is not None:
                continue
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # a link to nowhere, or it has gone meanwhile
                    if not stat.S_ISREG(path.stat().st_mode):
                        raise UserError(
                            f"{path}: no plain file, but a pipe, a socket or a device: remove it, or put "
                            "back the file that was there"
                        )

    def _leftovers(self) -> set[Path]:
        """Left-over files of killed processes; in a folder that is no run yet, only those of its first
        files."""
        names = ("*",) if self.config_file.exists() else (self.config_file.name, "tokenizer.json")
        found = (leftovers(self.path, name) for name in names)
        return leftovers(self.origin).union(*found)

    def _check_same(self, config: TrainConfig) -> None:
        """UserError unless `config` goes on with the run in here. What was only prepared for another run is
        removed, because its tokenizer would be used as it is."""
        before = self.config()
        try:
            check_same_run(before, config)
        except UserError:
            if self.is_open:
                raise
            config.check_origin()  # checks the options together with the values that they change
            self._discard(before)

    def with_steps(self, config: TrainConfig, batches: Batches) -> TrainConfig:
        """`config` with the steps that its epochs come to, if it counts in epochs. UserError if the run has
        made more."""
        asked = f"--steps {config.steps}"
        if config.epochs:
            config = dataclasses.replace(config, steps=batches.steps(config.epochs))
            asked = f"the {config.steps} of --epochs {config.epochs:g}"
        done = max(all_steps(self.checkpoints), default=0)  # counts damaged ones too: they may be repaired
        if done > config.steps:
            raise UserError(
                f"{self.path} has {many(done, 'step')} already, more than {asked}: at least {done}"
            )
        return config

    def _check_checkpoints(self) -> None:
        """UserError if the folder of checkpoints is gone. It exists before the first step, so a run that was
        killed before its first save may go on."""
        if not os.path.isdir(self.checkpoints) and (records := read_metrics(self.path)):
            raise UserError(
                f"{self.path} has figures of {records[-1]['step']} steps, but {self.checkpoints.name}/ is "
                "gone: put it back; to begin anew, name another folder with --run or remove this one"
            )

    def saved(self, which: Which = "last") -> Saved:
        """The newest whole checkpoint, the one with the lowest validation loss, or that of a step.

        Prints a line on standard error for each damaged one that is skipped. UserError if none is whole.
        """
        damaged: list[str] = []
        if which not in ("best", "last"):
            found = of_step(self.checkpoints, int(which), damaged.append)
        else:
            found = best(self.checkpoints, damaged.append) if which == "best" else None
            if found is None:  # or it was saved without a validation
                found = newest(self.checkpoints, damaged.append)
        if found is None:
            if not damaged and (steps := all_steps(self.checkpoints)):
                there = ", ".join(map(str, steps))
                raise UserError(f"{self.path} has no checkpoint of step {which}: those of {there} are there")
            why = f": {damaged[0]}" if damaged else " yet: train first"
            raise UserError(f"{self.path} has no checkpoint that can be read{why}")
        for line in dict.fromkeys(damaged):
            say(f"damaged, so another checkpoint is used: {line}")
        return found


def find_run(name: str, which: Which = "best") -> tuple[RunFolder, Which]:
    """The run in a folder, and `which`; of the folder of one of its checkpoints, the run and that step.

    UserError for such a folder if `which` names another one. Whether there is a run is not looked at.
    """
    if not name:
        raise UserError("RUN is empty: name a run folder")
    folder = Path(os.path.expanduser(name))
    run, step = RunFolder(Path(os.path.abspath(folder)).parent.parent), step_of(folder)
    if step is None or folder.parent.name != run.checkpoints.name or not os.path.exists(run.config_file):
        return RunFolder(folder), which
    if which != "best":
        raise UserError(f"--which {which}: {name} is the checkpoint of step {step}: leave --which out")
    return run, str(step)


def shape_as_json(config: LanguageConfig) -> dict[str, Any]:
    """The shape for a checkpoint's state."""
    return dataclasses.asdict(config)


def read_shape(content: dict[str, Any]) -> LanguageConfig:
    """The reverse of `shape_as_json`."""
    # JSON has no tuples.
    content = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    if "content" in content:
        return ForeignConfig(**content)
    scaling = content.get("rope_scaling")
    return TransformerConfig(**{**content, "rope_scaling": RopeScaling(**scaling) if scaling else None})
