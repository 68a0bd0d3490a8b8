"""One folder holds all of a run, and is all that a later command needs."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from imece.checkpoint.load import Saved, all_steps, best, newest
from imece.checkpoint.weights import load_weights
from imece.data.files import write_whole
from imece.data.tokenizer import Tokenizer, load_tokenizer
from imece.errors import UserError
from imece.models.shape import RopeScaling, TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TrainConfig, check_same_run, read_toml, to_toml

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
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def tokens(self, config: TrainConfig) -> Path:
        """The folder of token files, which runs on the same text may share."""
        return Path(config.data.folder) if config.data.folder else self.path / "tokens"

    def config(self) -> TrainConfig:
        """UserError if this is no run folder, or its config cannot be read."""
        if not self.config_file.is_file():
            raise UserError(
                f"{self.path} is no run folder, it has no {self.config_file.name}: check the path"
            )
        return read_toml(self.config_file)

    def begin(self, config: TrainConfig) -> None:
        """Make the folder, or go on with the run that it holds; from here on `config` is its config.

        UserError if it holds another run, or one of more steps, or files that are no run, or if it cannot be
        written to.
        """
        new = not os.path.isdir(self.path)
        try:
            content = to_toml(config).encode()
            if self.config_file.exists():
                check_same_run(self.config(), config)
                self._check_steps(config)
            elif self.path.exists() and not self.path.is_dir():
                raise UserError(f"{self.path} is a file: name a folder with --run")
            elif self.path.is_dir() and set(self.path.iterdir()) - self._leftovers():
                raise UserError(f"{self.path} holds other files, but no run: name another folder with --run")
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            if not self.config_file.exists() or self.config_file.read_bytes() != content:
                write_whole(self.config_file, content)
        except OSError as error:
            with suppress(OSError):  # if it is not empty, above all
                if new:
                    self.path.rmdir()
            raise UserError(
                f"{self.path}: the run folder cannot be written ({error.strerror}): make room or name another"
            ) from error
        except UnicodeEncodeError as error:
            value = next(line for line in error.object.splitlines() if error.object[error.start] in line)
            raise UserError(
                f"{value}: a name that is not UTF-8, which no TOML can hold: rename it"
            ) from error

    @contextmanager
    def begun(self, config: TrainConfig) -> Iterator[None]:
        """`begin`, which is taken back if what follows ends the command: with another one, a person can then
        mend any option. UserError as `begin`.
        """
        before = self.config_file.read_bytes() if os.path.isfile(self.config_file) else None
        empty = os.path.isdir(self.path)
        self.begin(config)
        try:
            yield
        except (UserError, SystemExit):
            with suppress(OSError):
                if before is not None:
                    write_whole(self.config_file, before)
                else:
                    shutil.rmtree(self.path)
                    if empty:
                        self.path.mkdir()
            raise

    def _leftovers(self) -> set[Path]:
        """Of processes that were killed in `begin`."""
        return set(self.path.glob(f"{self.config_file.name}.*.partial"))

    def _check_steps(self, config: TrainConfig) -> None:
        done = max(all_steps(self.checkpoints), default=0)  # damaged ones too: those may be mended
        if done > config.steps:
            raise UserError(
                f"{self.path} has {done} steps already, more than --steps {config.steps}: at least {done}"
            )

    def tokenizer(self) -> Tokenizer:
        """The run's own. UserError if there is none yet."""
        return load_tokenizer(self.tokenizer_file)

    def saved(self, which: Which = "last") -> Saved:
        """The newest checkpoint, or the one with the lowest validation loss. UserError if none is whole."""
        damaged: list[str] = []
        found = best(self.checkpoints) if which == "best" else newest(self.checkpoints, damaged.append)
        if found is None and which == "best":
            found = newest(self.checkpoints, damaged.append)  # nothing was validated when it was saved
        if found is None:
            why = f": {damaged[0]}" if damaged else " yet: train first"
            raise UserError(f"{self.path} has no checkpoint that can be read{why}")
        return found

    def model(self, which: Which = "last", device: torch.device | str = "cpu") -> tuple[Transformer, Saved]:
        """The trained model, ready for evaluation."""
        saved = self.saved(which)
        with torch.device("meta"):
            model = Transformer(read_shape(saved.state["model"]))
        model.to_empty(device=device)
        load_weights(model, saved)
        return model.eval(), saved


def shape_as_json(config: TransformerConfig) -> dict[str, Any]:
    """For the checkpoint's state."""
    return dataclasses.asdict(config)


def read_shape(content: dict[str, Any]) -> TransformerConfig:
    """The reverse of `shape_as_json`."""
    scaling = content.get("rope_scaling")
    return TransformerConfig(**{**content, "rope_scaling": RopeScaling(**scaling) if scaling else None})
