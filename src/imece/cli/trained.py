"""What `sample`, `eval` and `export` share: they open a trained run and check that its parts match."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from imece.checkpoint.load import Saved
from imece.data.tokenizer import Tokenizer
from imece.errors import UserError
from imece.train.run_folder import RunFolder


def say(line: str) -> None:
    """Print on stderr: stdout is for the result."""
    print(f"imece: {line}", file=sys.stderr, flush=True)


def best_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_run(path: str) -> RunFolder:
    """The run in this folder. UserError if there is none."""
    folder = RunFolder(Path(path))
    folder.config()
    return folder


def tokenizer_of(folder: RunFolder, saved: Saved) -> Tokenizer:
    """The run's tokenizer. UserError if the checkpoint was trained with another one."""
    tokenizer = folder.tokenizer()
    if tokenizer.hash != saved.state["tokenizer_hash"]:
        raise UserError(
            f"{folder.tokenizer_file}: not the tokenizer that step {saved.step} was trained with, so its "
            "tokens mean something else: put the old file back"
        )
    return tokenizer
