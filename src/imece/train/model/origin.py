"""The folder that a run begins from: a model in Hugging Face's format, or another run.

Its weights are read once, before the first step; each rank reads what it keeps. Shape and tokenizer are
copied, so that the run needs only its own folder from then on:

    from/config.json       the shape, in Hugging Face's format
    from/tokenizer.json    and the tokenizer's other files, unchanged: `imece export` writes them again
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from imece.checkpoint.load import Saved, Source
from imece.checkpoint.state.names import MODEL
from imece.checkpoint.state.weights import check_shapes, fill
from imece.data.chats import open_template
from imece.data.tokenizer import Tokenizer, load_tokenizer
from imece.errors import UserError
from imece.models.hugging_face import (
    CONFIG,
    TOKENIZER_FILES,
    HuggingFaceModel,
    read_config,
    shapes_of,
    to_hugging_face,
)
from imece.models.language_model import LanguageConfig, LanguageModel, give_memory, outline
from imece.train.config import TrainConfig
from imece.train.model.adapters import check_libraries
from imece.train.model.merged import Merged
from imece.train.run.folder import RunFolder, Which, find_run, read_shape
from imece.writing import other_place, write_whole

_LONGEST = 512  # default length of sequences in tokens: contexts may have up to 131,072


@dataclass(frozen=True)
class Weights(Source):
    """A model on the disk as a checkpoint that has parameters and nothing else."""

    config: LanguageConfig
    home: RunFolder
    """The run, or the folder itself: here the tokenizer lies."""
    saved: Saved | None
    """The run's checkpoint."""
    _of: HuggingFaceModel | Saved | Merged

    @property
    def folder(self) -> Path:
        """For messages."""
        return self._of.folder

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {MODEL + name: shape for name, shape in shapes_of(self.config).items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._of.dtype(self._there(name))

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flat tensor, on the CPU. UserError if they cannot be read."""
        return self._of.slice(self._there(name), start, stop)

    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill all of `target` with the tensor's elements from `start` on. UserError if they cannot be
        read."""
        self._of.fill(target.detach(), self._there(name), start)

    def _there(self, name: str) -> str:
        return name if self.saved is not None else name.removeprefix(MODEL)


def open_weights(name: str, which: Which = "best") -> Weights:
    """The model in a folder; `which` of a run's checkpoints, or the one whose own folder this is. UserError
    if the folder is wrong."""
    run, which = find_run(name, which)
    if not os.path.isdir(run.path):
        there = "a file, not a folder" if os.path.exists(run.path) else "no such folder"
        raise UserError(
            f"{name}: {there}: name a run, or a folder with {CONFIG}, safetensors and "
            "tokenizer.json; a model of the Hub has to be downloaded first"
        )
    if not os.access(run.path, os.R_OK | os.X_OK):
        raise UserError(f"{name}: cannot be read: check its permissions")
    if os.path.exists(run.config_file):
        return weights_of(run, run.saved(which))
    if not os.path.exists(run.path / CONFIG):
        raise UserError(
            f"{name} is neither a run, it has no {run.config_file.name}, nor a model in Hugging Face's "
            f"format, it has no {CONFIG}: check the path"
        )
    if which != "best":
        raise UserError(f"--which {which}: {name} is no run, and has no checkpoints: leave --which out")
    model = HuggingFaceModel.open(run.path)
    return Weights(model.config, run, None, model)


def weights_of(run: RunFolder, saved: Saved) -> Weights:
    """The model in a run's checkpoint; adapters are merged into it. UserError if their base is gone."""
    config, shape = run.config(), read_shape(saved.state["model"])
    found: Saved | Merged = saved
    if config.lora.rank:
        check_libraries(config.lora, to_train=False)
        base = open_base(config, run)
        found = Merged(saved, base, config.model.weights, config.lora, base.config)
    check_shapes(found, shapes_of(shape))
    return Weights(shape, run, saved, found)


def model_of(weights: Weights, device: torch.device | str = "cpu") -> LanguageModel:
    """The model, in fp32, ready for evaluation. UserError if its weights cannot be read."""
    model = outline(weights.config)
    give_memory(model, device)
    fill(model, weights)
    return model.eval()


def trained_model(
    run: RunFolder, which: Which = "last", device: torch.device | str = "cpu"
) -> tuple[LanguageModel, Saved]:
    """The model that a run trained, and the checkpoint that has it."""
    saved = run.saved(which)
    return model_of(weights_of(run, saved), device), saved


def tokenizer_of(weights: Weights) -> Tokenizer:
    """The tokenizer that lies with the model. UserError if it is another model's."""
    file, saved = weights.home.tokenizer_file, weights.saved
    tokenizer = load_tokenizer(file)
    if saved is not None and tokenizer.hash != saved.state["tokenizer_hash"]:
        raise UserError(
            f"{file}: not the tokenizer that step {saved.step} was trained with, so its tokens mean "
            "something else: put the old file back"
        )
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise UserError(
            f"{file} has {tokenizer.vocab_size:,} entries, the model beside it only "
            f"{weights.config.vocab_size:,}: they are not of one model, get both from one place"
        )
    return tokenizer


def open_base(config: TrainConfig, run: RunFolder) -> Weights:
    """The model beside which a run trains adapters. UserError if its folder is wrong."""
    name = config.model.weights
    if run.config_file.exists() and not os.path.isdir(os.path.expanduser(name)):
        raise UserError(
            f"{run.path}: its adapters stand beside the model of {name}, which is not there: put it back, or "
            f"say in {run.config_file} where it is now (weights, below [model])"
        )
    found, kept = open_weights(name), run.origin / CONFIG
    if kept.exists() and shapes_of(read_config(kept)) != shapes_of(found.config):
        raise UserError(
            f"{run.path}: its adapters stand beside another model than that of {name}, which has changed "
            "since: put the old one back"
        )
    return found


def keep(config: TrainConfig) -> None:
    """Copy what the run needs from the folder that it begins from into the run folder, unless it is there.

    Any number of processes may call this at once. UserError if one of the two folders is wrong.
    """
    run = RunFolder(config.folder)
    if not config.model.weights or (run.origin / CONFIG).exists():
        return
    found = open_weights(config.model.weights)
    sequence_length(config, found.config)
    tokenizer = tokenizer_of(found)
    if config.data.format == "chat":
        open_template(found.home.tokenizer_file.parent)
    source = found.home
    files = dict[str, Path]()
    for folder in (source.path, source.origin):  # a run's own copy takes precedence
        files |= {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    try:
        run.origin.mkdir(parents=True, exist_ok=True)
        for name, path in files.items():
            write_whole(run.origin / name, path.read_bytes(), durable=True)
        # Last, so that its presence means the copy is complete. Copied unchanged, because it says more than
        # the shape.
        for path in (source.origin / CONFIG, source.path / CONFIG):
            if path.exists():
                content = path.read_bytes()
                break
        else:
            own = to_hugging_face(found.config, (), end=tokenizer.end)[0]
            content = json.dumps(own | {"bos_token_id": tokenizer.before}, indent=2).encode()
        write_whole(run.origin / CONFIG, content, durable=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or run.origin}: cannot be kept in the run folder ({error.strerror}): "
            f"{other_place(error, 'folder')}"
        ) from error


def shape_of(config: TrainConfig, vocab_size: int) -> LanguageConfig:
    """The shape of the run's model. vocab_size: the tokenizer's, for random weights. UserError."""
    if not config.model.weights:
        return config.model.shape(vocab_size)
    kept = RunFolder(config.folder).origin / CONFIG
    return read_config(kept) if kept.exists() else open_weights(config.model.weights).config


def sequence_length(config: TrainConfig, shape: LanguageConfig) -> int:
    """Tokens per training sequence. UserError if the model has fewer positions."""
    if not config.model.weights:
        return shape.max_seq
    asked = config.model.max_seq
    if asked is not None and asked > shape.max_seq:
        raise UserError(
            f"--model.max-seq {asked}: the model of {config.model.weights} has {shape.max_seq} positions: "
            f"at most {shape.max_seq}"
        )
    return asked or min(_LONGEST, shape.max_seq)
