"""One folder holds all of a run, and is all that a later command needs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from imece.checkpoint.load import Saved, all_steps, best, newest
from imece.data.build import discard
from imece.data.files import other_place
from imece.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from imece.data.tokenizer import Tokenizer, load_tokenizer
from imece.errors import UserError
from imece.listing import many
from imece.models.hugging_face import CONFIG, TOKENIZER_FILES
from imece.models.shape import RopeScaling, TransformerConfig
from imece.observe.metrics import FILE as FIGURES
from imece.observe.metrics import read_metrics
from imece.train.config import TrainConfig
from imece.train.config_file import read_toml, to_toml
from imece.train.run_lock import FILE, RunLock
from imece.train.same_run import check_same_run
from imece.writing import leftovers, write_whole

Which = Literal["best", "last"]


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run is."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The whole resolved config; the folder is a run folder once it is there."""
        return self.path / "config.toml"

    @property
    def origin(self) -> Path:
        """What is kept of the folder whose model it began with: see origin.py."""
        return self.path / "from"

    @property
    def tokenizer_file(self) -> Path:
        """Where it is, or is to be made."""
        kept = self.origin / "tokenizer.json"
        return kept if kept.exists() else self.path / kept.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_open(self) -> bool:
        """Whether ranks have begun with it: until then it holds only what the next command makes again."""
        return any(os.path.lexists(path) for path in (self.path / FIGURES, self.checkpoints))

    def tokens(self, config: TrainConfig) -> Path:
        """The folder of token files, which runs on the same text may share."""
        folder = config.data.folder
        return Path(os.path.expanduser(folder)) if folder else self.path / "tokens"

    def config(self) -> TrainConfig:
        """UserError if this is no run folder, or its config cannot be read."""
        try:
            os.stat(self.config_file)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.path} is no run folder, it has no {self.config_file.name}: check the path"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read ({error.strerror}): check the path and its permissions"
            ) from error
        return read_toml(self.config_file)

    def begin(self, config: TrainConfig, lock: RunLock | None = None) -> bytes | None:
        """Make the folder, or go on with the run that it holds; from here on `config` is its config, in which
        the names of texts do not depend on the folder that a command is started in.

        Returns what the config's file held before, None if it was not there. lock: of the folder; it begins
        before anything is changed. UserError if the run is under way in another command, if the folder holds
        another run, or one of more steps, or one whose checkpoints are gone, or files that are no run, or if
        it cannot be written to.
        """
        made = self.to_make()
        try:
            content = to_toml(config.absolute()).encode()
            if not self.config_file.exists():
                if self.path.exists() and not self.path.is_dir():
                    raise UserError(f"{self.path} is a file: name a folder with --run")
                if self.path.is_dir() and set(self.path.iterdir()) - self._leftovers() - {self.path / FILE}:
                    raise UserError(
                        f"{self.path} holds other files, but no run: name another folder with --run"
                    )
                self.path.mkdir(parents=True, exist_ok=True)
            if lock is not None:
                lock.begin()
            before = None
            if self.config_file.exists():  # perhaps since a moment ago
                self._check_same(config)
                self._check_steps(config)
                self._check_checkpoints()
                before = self.config_file.read_bytes()
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            if before != content:
                write_whole(self.config_file, content, durable=True)
            return before
        except OSError as error:
            with suppress(OSError):  # if it is not empty, above all
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
        """`begin`, which is taken back if what follows ends the command, by a mistake, Ctrl-C or whatever
        else: with another one, a person can then mend any option. UserError as `begin`.
        """
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
        """The folders that are not there yet, the run's own first, then those around it."""
        return list(takewhile(lambda folder: not os.path.lexists(folder), (self.path, *self.path.parents)))

    def take_back(self, config: TrainConfig, made: Sequence[Path]) -> None:
        """What a run has before its first step, and no file that others have put there meanwhile. OSError.

        made: the folders that go too, as `to_make` named them before; one that was there may be a link, or
        have permissions that a new one would not.
        """
        self._discard(config)
        for path in (self.config_file, self.path / FILE):
            path.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()

    def _discard(self, config: TrainConfig) -> None:
        """What was made for this config before any rank has begun. OSError."""
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
                with suppress(OSError):  # it is not there, or holds something else too
                    os.rmdir(folder)

    def put_back(self, config: TrainConfig, tokenizer: Tokenizer) -> bool:
        """What its checkpoints need beside them to be of use, if that is gone; whether it was. OSError.

        config, tokenizer: of the run, which is under way.
        """
        if self.config_file.exists() and self.tokenizer_file.exists():
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        tokenizer.write(self.tokenizer_file)
        write_whole(self.config_file, to_toml(config.absolute()).encode(), durable=True)
        return True

    def _leftovers(self) -> set[Path]:
        """Of processes that were killed; in a folder that is no run yet, those of its first files alone."""
        names = ("*",) if self.config_file.exists() else (self.config_file.name, "tokenizer.json")
        found = (leftovers(self.path, name) for name in names)
        return leftovers(self.origin).union(*found)

    def _check_same(self, config: TrainConfig) -> None:
        """UserError unless it goes on with what is here; but what was only prepared for another is discarded:
        its tokenizer would be taken as it is."""
        before = self.config()
        try:
            check_same_run(before, config)
        except UserError:
            if self.is_open:
                raise
            config.check_origin()  # of the options, with the values here that they change
            self._discard(before)

    def _check_steps(self, config: TrainConfig) -> None:
        done = max(all_steps(self.checkpoints), default=0)  # damaged ones too: those may be mended
        if done > config.steps:
            raise UserError(
                f"{self.path} has {many(done, 'step')} already, more than --steps {config.steps}: "
                f"at least {done}"
            )

    def _check_checkpoints(self) -> None:
        """Their folder is there before the first step: a run that was killed before it saved may go on."""
        if not os.path.isdir(self.checkpoints) and (records := read_metrics(self.path)):
            raise UserError(
                f"{self.path} has figures of {records[-1]['step']} steps, but {self.checkpoints.name}/ is "
                "gone: put it back; to begin anew, name another folder with --run or remove this one"
            )

    def tokenizer(self) -> Tokenizer:
        """The run's own. UserError if there is none yet."""
        return load_tokenizer(self.tokenizer_file)

    def saved(self, which: Which = "last") -> Saved:
        """The newest checkpoint, or the one with the lowest validation loss: of those that are whole.

        A line on standard error for each damaged one that is passed over. UserError if none is whole.
        """
        damaged: list[str] = []
        found = best(self.checkpoints, damaged.append) if which == "best" else None
        if found is None:  # or nothing was validated when it was saved
            found = newest(self.checkpoints, damaged.append)
        if found is None:
            why = f": {damaged[0]}" if damaged else " yet: train first"
            raise UserError(f"{self.path} has no checkpoint that can be read{why}")
        for line in dict.fromkeys(damaged):
            print(f"imece: damaged, so another checkpoint is used: {line}", file=sys.stderr, flush=True)
        return found


def shape_as_json(config: TransformerConfig) -> dict[str, Any]:
    """For the checkpoint's state."""
    return dataclasses.asdict(config)


def read_shape(content: dict[str, Any]) -> TransformerConfig:
    """The reverse of `shape_as_json`."""
    scaling = content.get("rope_scaling")
    # JSON knows no tuples.
    content = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return TransformerConfig(**{**content, "rope_scaling": RopeScaling(**scaling) if scaling else None})
